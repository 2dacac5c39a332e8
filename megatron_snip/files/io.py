"""Users' files: read with limits, written atomically, and errors in one line.

Plans, statistics, tables of GEMM times, options and metrics come from outside.  They are read here, and must be regular
files of limited size, with JSON that repeats no key.  Source: rename(2) is atomic within one file system, so a
temporary file is in the target's own folder.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import stat
import tempfile
import tomllib
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import Repr
from typing import Any, BinaryIO

from megatron_snip.errors import UserError

MOST_BYTES = 64 << 20  # limit for files that users exchange; the largest, statistics, have a few MB
MOST_SHOWN = 2000  # characters of an error line; names in files may be of any length
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_WAYS_OUT = {
    errno.ENOENT: "check the path",
    errno.EACCES: "give a path that you may read and write",
    errno.EPERM: "give a path that you may read and write",
    errno.EROFS: "give a path that you may write to",
    errno.EISDIR: "give the path of a file",
    errno.ENOTDIR: "one of the folders in it is a file; give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENOSPC: "free some space, or give a path on another disk",
    errno.EDQUOT: "free some space, or give a path on another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
_TEMPORARY = ".tmp"
#: A surrogate, which stands for a byte that is not UTF-8; not allowed in JSON and TOML files.
HALF_PAIR = re.compile("[\ud800-\udfff]")
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: Any) -> str:
    """``repr`` of an untrusted value, shortened if long or deep."""
    return _SHORT.repr(value)


def one_line(error: UserError | OSError) -> str:
    """The line for the user: the error's text, or an OSError's path, reason and way out."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, UserError):
        way_out = _WAYS_OUT.get(error.errno or 0, "check the path and its disk")
        text = f"{error.filename}: {error.strerror}; {way_out}"
    text = " ".join(text.splitlines())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]} ... {text[-MOST_SHOWN // 2 :]}"


@contextmanager
def about(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the path to an OSError of the block that names no path, or only a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and (error.filename is None or str(error.filename).endswith(_TEMPORARY)):
            error.filename = os.fspath(path)
        raise


def path_word(text: str) -> str:
    """A path on a tool's command line, for argparse's ``type``.  An empty one would mean the current folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"the path is {text!r}; give one")
    return text


def check_output(option: str, path: Path) -> None:
    """Raise UserError, before the work, if its result cannot be written.  Leaves nothing behind."""
    try:
        is_folder = path.is_dir()
        with suppress(FileNotFoundError):
            os.lstat(path)  # fails if a name is too long or a folder is a file
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        _try_to_write(nearest)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written ({error.strerror}); give another path") from None
    if is_folder:
        raise UserError(f"{option} {path} is a folder; give a file")


def _try_to_write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 16))


def check_folder(option: str, path: Path) -> None:
    """Raise UserError unless the folder is writable or can be created.  Leaves nothing behind."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists() or folder.is_symlink())
    if not nearest.exists():
        raise UserError(f"{option} {path}: {nearest} is a broken link to {os.readlink(nearest)}; mend it")
    if not nearest.is_dir():
        below = f" lies below {nearest}, which" if nearest != path else ""
        raise UserError(f"{option} {path}{below} is not a folder; give another")
    try:
        _try_to_write(nearest)
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno or 0, "give another")
        raise UserError(f"{option} {path} cannot be written ({error.strerror}: {nearest}); {way_out}") from None


@contextmanager
def open_file(path: str | os.PathLike[str], what: str, way_out: str) -> Iterator[BinaryIO]:
    """Open a regular file for reading.  Raises UserError with the file's name and the reason if that fails."""
    try:
        # A pipe would block until a writer comes, which may be never.
        stream = open(  # noqa: SIM115 - closed below; the caller's block handles its own errors
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot read the {what} ({reason}); {way_out}") from None
    with stream:
        if kind := _KINDS.get(stat.S_IFMT(os.fstat(stream.fileno()).st_mode)):
            raise UserError(f"{path}: cannot read the {what} (it is {kind}, not a file); {way_out}")
        yield stream


def read_file(path: str | os.PathLike[str], what: str, way_out: str, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file of at most ``most`` bytes.  Raises UserError with the file's name and the reason."""
    with open_file(path, what, way_out) as stream:
        try:
            data = stream.read(most + 1)
        except OSError as error:
            raise UserError(f"{path}: cannot read the {what} ({error.strerror}); {way_out}") from None
    if len(data) > most:
        raise UserError(f"{path}: this {what} has more than {most >> 20} MiB; {way_out}")
    return data


def parse_json(text: str | bytes) -> Any:
    """The value of a UTF-8 JSON text.

    Raises UserError also for duplicate keys, unpaired surrogates and deep nesting.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"), object_pairs_hook=_object)
    except RecursionError:
        raise UserError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for pair in pairs:
        for part in pair:
            if isinstance(part, str) and not part.isascii() and (half := HALF_PAIR.search(part)):
                raise UserError(f"a string has {half[0]!r}, half of a surrogate pair, which is not a character")
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise UserError(f"key {shown(counts.most_common(1)[0][0])} appears twice")
    return found


def toml_value(value: str | bool | int | float) -> str:
    """A value as TOML.  Raises UserError for text that is not Unicode, which file names may be."""
    if not isinstance(value, str):
        return json.dumps(value)
    if half := HALF_PAIR.search(value):
        raise UserError(f"{value!r} has {half[0]!r}, which is not a character; give a name in UTF-8")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has no surrogate pairs


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables of a UTF-8 TOML file.  Raises UserError also for deep nesting and very long keys."""
    try:
        return tomllib.loads(_without_long_keys(data.decode("utf-8")))
    except RecursionError:
        raise UserError("it is nested too deeply") from None


def _without_long_keys(text: str) -> str:
    """The text itself.  Raises UserError for a key of 64 parts, since tomllib's memory is quadratic in them."""
    part = r"""(?:"[^"\n]*+"|'[^'\n]*+'|[\w-]++)[ \t]*+\.[ \t]*+"""
    if re.search(rf"(?<![\w-])(?:{part}){{64}}", text):
        raise UserError("a key has more than 64 parts")
    return text


def temporary_beside(path: str | Path) -> Path:
    """A unique name in ``path``'s folder, which is created if needed.  No two processes get the same name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.parent / f".{path.name[:40]}.{os.getpid()}-{uuid.uuid4().hex[:8]}{_TEMPORARY}"


@contextmanager
def atomic_output(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to ``path`` if the block succeeds and removed if it raises.

    An OSError of the block, such as a full disk, names ``path``.
    """
    with about(path):
        temporary = temporary_beside(path)
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
