"""The fingerprint of a dataset's files, and the record of its token ids.

A fingerprint is ``{"lengths": ..., "size": ..., "content": ...}``: a hash of the sequence and document boundaries, the
size of the .bin, and a hash of samples of its bytes.  It does not depend on file names.
A record is ``<prefix>.ids.json``: the smallest and largest id, with the fingerprint of their dataset.  The fingerprint
keeps a record from being used for another dataset of the same name.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from megatron_snip.errors import UserError
from megatron_snip.files.io import parse_json, read_file
from megatron_snip.files.json import Count, Text, checked, write_json

LOGGER = logging.getLogger("megatron_snip.data")
BLOCKS = 64  # samples per .bin
BLOCK_BYTES = 1 << 14
AT_ONCE = 1 << 22  # array elements per hash update
Array = npt.NDArray[Any]
Id = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of token ids: the dataset's fingerprint and the range of its ids."""

    version: Literal[1]
    least_id: Id
    largest_id: Id
    lengths: Text
    size: Count
    content: Text


def fingerprint(descriptor: int, dtype: np.dtype[Any], lengths: Array, documents: Array) -> dict[str, Any]:
    """The fingerprint of an open .bin with sequence lengths [S] and document indices [D].

    Reads a .bin of up to 1 MiB in full.  From a larger .bin, it reads 64 blocks of 16 KiB: the first, the last, and one
    at a random position in each of 62 equal parts in between.  That costs 12 bytes per sequence and at most 1 MiB.  It
    detects different lengths, sizes, texts and tokenizers.  It misses a changed stretch that covers a share p of a
    large file with probability (1 - p)^64, 4% for a twentieth, and almost always misses a few changed bytes.
    """
    cut = hashlib.blake2b(dtype.str.encode(), digest_size=16)
    for array in (lengths, documents):
        for start in range(0, len(array), AT_ONCE):
            cut.update(np.ascontiguousarray(array[start : start + AT_ONCE]).data)
    size = os.fstat(descriptor).st_size
    content = hashlib.blake2b(digest_size=16)
    for start, stop in _samples(size):
        content.update(os.pread(descriptor, stop - start, start))
    return {"lengths": cut.hexdigest(), "size": size, "content": content.hexdigest()}


def _samples(size: int) -> list[tuple[int, int]]:
    """The byte ranges [start, stop) to hash, a function of the size alone."""
    if size <= BLOCKS * BLOCK_BYTES:
        return [(0, size)]
    words = np.random.Philox(key=size).random_raw(BLOCKS)  # raw words are the same in every numpy version
    part = (size - 2 * BLOCK_BYTES) // (BLOCKS - 2)
    inner = [BLOCK_BYTES + i * part + int(words[i]) % (part - BLOCK_BYTES + 1) for i in range(BLOCKS - 2)]
    return [(start, start + BLOCK_BYTES) for start in (0, *inner, size - BLOCK_BYTES)]


def record_path(prefix: str) -> Path:
    """Path of a dataset's record."""
    return Path(f"{prefix}.ids.json")


def write_record(prefix: str, of: Mapping[str, Any], least: int, largest: int) -> None:
    """Write the record of the dataset with fingerprint ``of`` and ids in [least, largest]."""
    write_json(record_path(prefix), {"version": 1, "least_id": least, "largest_id": largest, **of})


def recorded_ids(prefix: str, of: Mapping[str, Any]) -> tuple[int, int] | None:
    """The smallest and largest id of the dataset with fingerprint ``of``; None without a record of it."""
    path = record_path(prefix)
    try:
        if not path.exists():
            return None
        record = checked(parse_json(read_file(path, "record of token ids", "remove it", most=1 << 16)), _Record)
        if any(getattr(record, key) != value for key, value in of.items()):
            raise UserError("it belongs to another dataset")
        return record.least_id, record.largest_id
    except (OSError, ValueError) as error:
        LOGGER.warning(f"{path} is ignored, so token ids are checked as they are read: {error}")
        return None
