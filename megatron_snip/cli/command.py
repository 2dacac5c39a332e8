"""What all commands share: help under the name that you called, and errors in one line.

Exit status of every command: 0 done, 2 an error that one line explains (`error: ...`), 130 Ctrl-C, 1 anything else.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_snip.arguments import program_name
from megatron_snip.errors import UserError
from megatron_snip.files.io import one_line

Main = Callable[[Sequence[str] | None], int]


class Parser(argparse.ArgumentParser):
    """Reads a command's own options.  A mistake on the command line is a UserError."""

    def __init__(self, description: str | None = None, **more: Any) -> None:
        more.setdefault("prog", program_name())
        more |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(description=description, **more)

    def error(self, message: str) -> NoReturn:
        """Raise the UserError; argparse itself would print the usage and exit."""
        raise UserError(f"{message}; --help lists all options and their values")


def reported(main: Main) -> Main:
    """``main`` of a command that runs in one process: errors become one line, and the exit status."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except BrokenPipeError:  # no error: nobody reads on, as in `... | head`
            raise
        except (UserError, OSError) as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as error:
            print(f"error: {error or 'interrupted'}", file=sys.stderr)
            return 130

    return run
