"""Collect text that is already on this machine, for a first training run without a download.

Sources: CPython's standard library and the system's documentation folder.  Order, split and duplicates depend only on
paths and contents, so a machine always gives the same files: ``train.jsonl`` and ``valid.jsonl``, with one
``{"text": ...}`` per file found.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_snip.cli.command import Parser, reported
from megatron_snip.errors import UserError
from megatron_snip.files.io import atomic_output, path_word

SYSTEM_DOCUMENTATION = Path("/usr/share/doc")
# Installed packages differ between machines, and test folders contain broken files on purpose.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
LARGEST_FILE = 256 << 10  # Bytes.  Larger files are tables, logs and pictures, and one outweighs a hundred pages.
SMALLEST_FILE = 64


def source_files(folder: Path) -> Iterator[Path]:
    """Regular files below ``folder`` in a fixed order.  Does not follow links."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path


def read_text(path: Path) -> str | None:
    """The file's text, unpacked if its name ends in .gz; None if it is not UTF-8 text of a sensible size."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return None
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        if not SMALLEST_FILE <= len(data) <= LARGEST_FILE or b"\0" in data:
            return None
        return data.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--output", required=True, type=path_word, help="folder for train.jsonl and valid.jsonl")
    parser.add_argument(
        "--min-bytes", type=int, default=4_000_000, help="fail if there is less text (default: 4000000)"
    )
    parser.add_argument("--max-bytes", type=int, default=None, help="stop after this much text (default: no limit)")
    parser.add_argument(
        "--valid-fraction", type=float, default=0.05, help="share of the files for validation (default: 0.05)"
    )
    parser.add_argument(
        "--source",
        nargs="+",
        type=path_word,
        default=[Path(sysconfig.get_path("stdlib")), SYSTEM_DOCUMENTATION],
        help="folders to read; by default CPython's standard library and the system's documentation",
    )
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.valid_fraction < 1:
        parser.error(f"--valid-fraction is {arguments.valid_fraction}; give 0 up to, but not, 1")
    return arguments


def gather(arguments: argparse.Namespace) -> dict[str, list[int]]:
    """Write the two files.  Returns {name: [files, bytes]}.  Raises UserError if there is too little text."""
    totals = {"train": [0, 0], "valid": [0, 0]}
    seen: set[bytes] = set()
    with ExitStack() as stack:
        streams = {}
        for name in totals:
            path = stack.enter_context(atomic_output(Path(arguments.output, f"{name}.jsonl")))
            streams[name] = stack.enter_context(open(path, "w", encoding="utf-8"))
        for path in (path for folder in arguments.source for path in source_files(folder)):
            if arguments.max_bytes is not None and sum(size for _, size in totals.values()) >= arguments.max_bytes:
                break
            if (text := read_text(path)) is None:
                continue
            data = text.encode("utf-8")
            digest = hashlib.sha256(data).digest()
            if digest in seen:
                continue
            seen.add(digest)
            share = int.from_bytes(digest[:8], "big") / 2**64
            name = "valid" if share < arguments.valid_fraction else "train"
            streams[name].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            totals[name][0] += 1
            totals[name][1] += len(data)
        if (found := sum(size for _, size in totals.values())) < arguments.min_bytes:
            folders = ", ".join(str(folder) for folder in arguments.source)
            raise UserError(
                f"found {found} bytes of text under {folders}, less than --min-bytes {arguments.min_bytes}; "
                "add folders with --source or lower --min-bytes"
            )
    return totals


@reported
def main(argv: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    arguments = parse_arguments(argv)
    totals = gather(arguments)
    for name, (files, size) in totals.items():
        print(f"{Path(arguments.output, name)}.jsonl: {files:,} files, {size:,} bytes")
    return 0
