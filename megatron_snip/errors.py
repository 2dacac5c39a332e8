"""The exception for users' mistakes."""

from __future__ import annotations


class UserError(ValueError):
    """A wrong option, file or call.  Its message is one line that names the thing, its value and the way out.

    Programs print only that line.  Any other exception, including torch's own ValueErrors, keeps its traceback.
    """
