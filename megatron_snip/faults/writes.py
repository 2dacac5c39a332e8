"""One policy for writes that fail while a run goes on: warn, count, go on, try again, and end at last."""

from __future__ import annotations

import logging
from collections.abc import Callable

LOGGER = logging.getLogger("megatron_snip")


class FailedWrites:
    """Counts the writes to one place that failed in a row.

    what: the place, as a warning names it.  limit: failures in a row after which `reason` says why the run must end.
    """

    def __init__(self, what: str, limit: int) -> None:
        self.what, self.limit = what, limit
        self.in_a_row = 0
        self._last = ""

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write` and say whether it went well.  An exception of its is warned of and counted, never raised.

        The 1st, 2nd, 4th, 8th, ... failure in a row is warned of, and the first success after it is told.
        """
        try:
            write()
        except Exception as error:  # a full disk, or whatever a logging service raises
            self.in_a_row += 1
            self._last = " ".join(str(error).split()) or type(error).__name__
            if self.in_a_row & (self.in_a_row - 1) == 0:
                times = f", {self.in_a_row} times in a row" if self.in_a_row > 1 else ""
                LOGGER.warning(f"{self.what} cannot be written{times} ({self._last}); the run continues and will retry")
            return False
        if self.in_a_row:
            LOGGER.warning(f"{self.what} is written again, after {self.in_a_row} failures")
            self.in_a_row = 0
        return True

    @property
    def reason(self) -> str | None:
        """Why the run must end, one line with the way out; None while it may go on."""
        if self.in_a_row < self.limit:
            return None
        return (
            f"{self.what} could not be written {self.in_a_row} times in a row ({self._last}); "
            "make room or mend the folder, and continue from the last checkpoint"
        )
