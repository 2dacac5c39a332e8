"""The error that is the user's."""

from __future__ import annotations


class UserError(ValueError):
    """A wrong option, file or call.  Its text is one line that names the thing, its value and the way out.

    Programs print that line alone; any other exception, torch's own ValueErrors too, keeps its traceback.
    """
