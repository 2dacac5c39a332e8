"""A folder that keeps sample indices between runs.

Convention: an index is a pure function of its description, so the file name is the description's hash.  An entry is
``<hash>.<array>.npy`` files and ``<hash>.json`` with the description, shapes, dtypes and CRC-32s.
Writers write the JSON last and rename every file into place, so several ranks may write the same entry at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from megatron_snip.errors import UserError
from megatron_snip.files.io import atomic_output, parse_json, read_file
from megatron_snip.files.json import Count, Text, checked, write_json

LOGGER = logging.getLogger("megatron_snip.data")
Array = npt.NDArray[Any]


class _Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of an array."""

    shape: list[Count]
    dtype: Text
    crc32: Count


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry.  Array names are part of file names."""

    description: Any
    arrays: dict[Annotated[str, Meta(pattern=r"\A[a-z0-9_]{1,40}\Z")], _Array]


def array_hash(array: Array) -> str:
    """A hash of an array's dtype and values, for descriptions."""
    digest = hashlib.blake2b(array.dtype.str.encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _facts(array: Array) -> dict[str, Any]:
    crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return {"shape": list(array.shape), "dtype": array.dtype.str, "crc32": crc}


def cached(
    folder: str | os.PathLike[str] | None,
    description: Mapping[str, Any],
    build: Callable[[], dict[str, Array]],
) -> dict[str, Array]:
    """The arrays of ``build()``, read from ``folder`` if it has an intact entry, else built and written there.

    ``description`` is JSON with everything that the arrays depend on.  Arrays read from the folder are memory maps.  A
    damaged entry is rebuilt with a warning.  Raises UserError if the folder cannot be written.
    """
    if folder is None:
        return build()
    text = json.dumps(description, sort_keys=True)
    stem = Path(folder) / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    entry = stem.with_suffix(".json")
    if entry.exists():
        try:
            return _read(stem, parse_json(text))
        except Exception as error:  # damaged bytes may raise anything
            LOGGER.warning("index cache entry %s is damaged (%s); rebuilding it", entry, error)
    arrays = build()
    try:
        for name, array in arrays.items():
            with atomic_output(f"{stem}.{name}.npy") as path, open(path, "wb") as stream:
                np.save(stream, array, allow_pickle=False)
        facts = {name: _facts(array) for name, array in arrays.items()}
        write_json(entry, {"description": description, "arrays": facts})
    except OSError as error:
        raise UserError(
            f"--data-cache-path {folder} cannot be written ({error}); give another folder or leave it out"
        ) from error
    return arrays


def _read(stem: Path, description: Any) -> dict[str, Array]:
    entry = stem.with_suffix(".json")
    record = checked(parse_json(read_file(entry, "entry of the index cache", "remove it")), _Entry)
    if record.description != description:
        raise UserError("it describes another index")
    arrays = {}
    for name, facts in record.arrays.items():
        array = np.load(f"{stem}.{name}.npy", mmap_mode="r", allow_pickle=False).view(np.ndarray)
        if _facts(array) != msgspec.to_builtins(facts):
            raise UserError(f"{name} is not what was written")
        arrays[name] = array
    return arrays
