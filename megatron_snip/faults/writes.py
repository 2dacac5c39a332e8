"""One policy for failed writes: warn, count, continue, retry, and finally end the run."""

from __future__ import annotations

import logging
from collections.abc import Callable

LOGGER = logging.getLogger("megatron_snip")


class FailedWrites:
    """Counts consecutive failed writes to one place.

    what: the place, as named in warnings.  limit: consecutive failures after which `reason` ends the run.
    """

    def __init__(self, what: str, limit: int) -> None:
        self.what, self.limit = what, limit
        self.in_a_row = 0
        self._last = ""

    def attempt(self, write: Callable[[], object]) -> bool:
        """Call `write` and return whether it succeeded.  Its exceptions are counted, never raised.

        Logs the 1st, 2nd, 4th, 8th, ... consecutive failure, and the first success after one.
        """
        try:
            write()
        except Exception as error:  # a full disk, or any error of a logging service
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
        """Why the run must end, and the way out; None while it may continue."""
        if self.in_a_row < self.limit:
            return None
        return (
            f"{self.what} could not be written {self.in_a_row} times in a row ({self._last}); "
            "make room or mend the folder, and continue from the last checkpoint"
        )
