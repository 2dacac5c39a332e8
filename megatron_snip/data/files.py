"""Files that are either whole or absent: write beside the target, then rename.

Source: rename(2) is atomic within one file system, so the temporary file lies in the target's own folder.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_beside(path: str | Path) -> Path:
    """A fresh name in ``path``'s folder, which is made if need be; two processes never get the same one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.parent / f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"


@contextmanager
def atomic_output(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path; it becomes ``path`` if the block ends well and is removed if it raises."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
