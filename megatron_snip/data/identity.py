"""What identifies the data of a pair of files, and the record of its token ids that lies beside it.

A fingerprint is ``{"lengths": ..., "size": ..., "content": ...}``: a hash of how the tokens are cut into sequences and
documents, the bytes of the .bin, and a hash of samples of them.  It does not depend on the files' names.
A record is ``<prefix>.ids.json``, the least and the largest id with the fingerprint of the pair that has them, so that
the record of another pair, left under the same name, is not taken for this one's.
"""

from __future__ import annotations

import hashlib
import json
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
from megatron_snip.files import atomic_output, parse_json, read_file
from megatron_snip.jsonfile import Count, Text, checked

LOGGER = logging.getLogger("megatron_snip.data")
BLOCKS = 64  # samples of a .bin
BLOCK_BYTES = 1 << 14
AT_ONCE = 1 << 22  # array elements that are hashed in one go
Array = npt.NDArray[Any]
Id = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of token ids: the pair's fingerprint and the ends of its ids."""

    version: Literal[1]
    least_id: Id
    largest_id: Id
    lengths: Text
    size: Count
    content: Text


def fingerprint(descriptor: int, dtype: np.dtype[Any], lengths: Array, documents: Array) -> dict[str, Any]:
    """The fingerprint of an open .bin with sequence lengths [S] and document indices [D].

    All of a .bin up to 1 MiB is read, of a larger one 64 blocks of 16 KiB: the first, the last, and one at a place
    drawn from each of 62 equal parts between them.  So the cost is 12 bytes a sequence and 1 MiB, whatever the size.
    It catches other lengths, another size, and other tokens all over the file, as another text or tokenizer gives
    them.  A changed stretch of a share p of a large file is missed with a chance of about (1 - p)^64: 4% for a
    twentieth, but a few changed bytes in a large file are missed almost always.
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
    """The byte ranges [start, stop) that are hashed: a function of the size alone."""
    if size <= BLOCKS * BLOCK_BYTES:
        return [(0, size)]
    words = np.random.Philox(key=size).random_raw(BLOCKS)  # raw words are the same in every numpy
    part = (size - 2 * BLOCK_BYTES) // (BLOCKS - 2)
    inner = [BLOCK_BYTES + i * part + int(words[i]) % (part - BLOCK_BYTES + 1) for i in range(BLOCKS - 2)]
    return [(start, start + BLOCK_BYTES) for start in (0, *inner, size - BLOCK_BYTES)]


def record_path(prefix: str) -> Path:
    """Where the record of a pair lies."""
    return Path(f"{prefix}.ids.json")


def write_record(prefix: str, of: Mapping[str, Any], least: int, largest: int) -> None:
    """Write the record of the pair whose fingerprint is ``of``, with ids in [least, largest]."""
    record = {"version": 1, "least_id": least, "largest_id": largest, **of}
    with atomic_output(record_path(prefix)) as path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def recorded_ids(prefix: str, of: Mapping[str, Any]) -> tuple[int, int] | None:
    """The least and the largest id of the pair whose fingerprint is ``of``; None without a record of that pair."""
    path = record_path(prefix)
    try:
        if not path.exists():
            return None
        record = checked(parse_json(read_file(path, "record of token ids", "remove it", most=1 << 16)), _Record)
        if any(getattr(record, key) != value for key, value in of.items()):
            raise UserError("it is of another pair of files")
        return record.least_id, record.largest_id
    except (OSError, ValueError) as error:
        LOGGER.warning(f"{path} is not used, token ids are checked as they are read: {error}")
        return None
