"""Text of this machine for a real model: prose of /usr/share/doc, code of Python's standard library.

Each file belongs to one side by its content alone, so what is probed or trained on is never held out:
`probe.txt` has prose and code by turns, `held_out_prose.txt` and `held_out_code.txt` are what the judge reads.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from megatron_snip.cli.gather_text import SYSTEM_DOCUMENTATION, read_text, source_files
from megatron_snip.errors import UserError
from megatron_snip.files.json import write_atomic

PROSE, CODE = SYSTEM_DOCUMENTATION, Path(sysconfig.get_path("stdlib"))
HELD_OUT = 0.3  # share of the files
#: Characters of a file, and of all files of one package: no program's manual outweighs the others.
MOST_OF_FILE, MOST_OF_PACKAGE = 16 << 10, 128 << 10
LEAST = 200_000  # characters of each text
_IS_PROSE = re.compile(r"readme|.*\.(txt|md|rst)(\.gz)?$", re.IGNORECASE)
_IS_LIST = re.compile(r"changelog|changes|news|authors|thanks|copyright|licen[cs]e|copying", re.IGNORECASE)
_SENTENCE = re.compile(r"[A-Z][^\n]*[a-z]")


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph has sentences, and is no table, list of names or code."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    return len(paragraph) >= 120 and letters >= 0.9 * len(paragraph) and bool(_SENTENCE.search(paragraph))


def prose_of(text: str, seen: set[bytes]) -> str:
    """The paragraphs of prose that were not seen before, as licences are everywhere."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        digest = hashlib.sha256(" ".join(paragraph.lower().split()).encode()).digest()
        if is_prose(paragraph) and digest not in seen:
            seen.add(digest)
            kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept)


def documents(folder: Path, *, prose: bool, of_package: int | None = None) -> Iterator[str]:
    """Text of each file of a kind, each once, in a fixed order that tells nothing: by digest.

    of_package: characters after which no more files of a package are taken.
    """
    seen: set[bytes] = set()
    found: dict[bytes, str] = {}
    taken: dict[str, int] = {}
    for path in source_files(folder):
        fits = _IS_PROSE.match(path.name) and not _IS_LIST.search(path.name) if prose else path.suffix == ".py"
        if not fits or (text := read_text(path)) is None:
            continue
        package = path.relative_to(folder).parts[0]
        text = (prose_of(text, seen) if prose else text)[:MOST_OF_FILE]
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 500 or (of_package is not None and taken.get(package, 0) > of_package):
            continue
        taken[package] = taken.get(package, 0) + len(text)
        found[digest] = text
    return (found[digest] for digest in sorted(found))


def split(texts: Iterator[str]) -> tuple[list[str], list[str]]:
    """Probe and held out, by content."""
    sides: tuple[list[str], list[str]] = [], []
    for text in texts:
        digest = hashlib.sha256(b"side" + text.encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64].append(text)
    return sides


def write_texts(
    folder: Path,
    prose: Path = PROSE,
    code: Path = CODE,
    least: int = LEAST,
    most: int | None = None,
    code_of_package: int | None = None,
) -> dict[Path, int]:
    """Write the three files into a folder: {path: bytes}.  UserError where there is too little text.

    most: characters of `probe.txt`, of which the held-out texts may have a thirtieth; what is behind is left out.
    code_of_package: as in ``documents``, for code.
    """
    (probe_prose, held_prose), (probe_code, held_code) = (
        split(documents(prose, prose=True, of_package=MOST_OF_PACKAGE)),
        split(documents(code, prose=False, of_package=code_of_package)),
    )  # fmt: skip
    turns = [text for text in chain.from_iterable(zip_longest(probe_prose, probe_code)) if text]
    texts = {"probe": turns, "held_out_prose": held_prose, "held_out_code": held_code}
    sizes = {}
    for name, parts in texts.items():
        text = joined(parts)[: most if most is None or name == "probe" else most // 30]
        if len(text) < least:
            raise UserError(f"{name} has {len(text)} characters of {prose} and {code}, less than {least}; install docs")
        write_atomic(path := folder / f"{name}.txt", text)
        sizes[path] = len(text.encode())
    return sizes


def joined(parts: Sequence[str]) -> str:
    """Documents one behind the other."""
    return "\n\n".join(parts) + "\n"
