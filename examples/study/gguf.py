"""Reads a GGUF file of version 3: its table of metadata, and its tensors as float32.

Source: ggml's docs/gguf.md for the file, and ggml-quants.c for the blocks.  Only the kinds of tensor that SmolLM2's
file has: F32, Q4_1 and Q8_0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_snip.errors import UserError
from megatron_snip.files.io import read_file, shown

_WAY_OUT = "give a GGUF of version 3 in F32, Q4_1 and Q8_0"
_MOST_BYTES = 1 << 30
_BLOCK = 32  # numbers that share a scale
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True)
class Kind:
    """How a kind of tensor is stored: numbers and bytes of a block, and blocks [N, bytes] -> float32 [N, numbers]."""

    name: str
    numbers: int
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


def _half(raw: np.ndarray, first: int) -> np.ndarray:
    """The FP16 at a byte of each block: float32 [N, 1]."""
    return raw[:, first : first + 2].copy().view("<f2").astype(np.float32)


def _f32(raw: np.ndarray) -> np.ndarray:
    return raw.copy().view("<f4")


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """d * q + m; a byte holds numbers i and i + 16 of the block, the first in its low half."""
    codes = raw[:, 4:]
    q = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)
    return _half(raw, 0) * q + _half(raw, 2)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    return _half(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)


KINDS = {0: Kind("F32", 1, 4, _f32), 3: Kind("Q4_1", _BLOCK, 20, _q4_1), 8: Kind("Q8_0", _BLOCK, 34, _q8_0)}


@dataclass(frozen=True)
class Gguf:
    """A file's metadata by key, and its tensors by name, each decoded when it is asked for."""

    fields: Mapping[str, Any]
    places: Mapping[str, tuple[Kind, tuple[int, ...], np.ndarray]]

    def tensor(self, name: str) -> np.ndarray:
        """float32, rows first, as torch has it; GGUF lists the sizes the other way round."""
        kind, shape, raw = self.places[name]
        return kind.decode(raw.reshape(-1, kind.bytes)).reshape(shape)


class _Reader:
    """Walks through the bytes; ValueError where they end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, within something that begins at byte {self.at}")
        self.at += count
        return self.data[self.at - count : self.at]

    def unsigned(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def string(self) -> str:
        return self.take(self.unsigned(8)).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            each, count = self.unsigned(4), self.unsigned(8)
            if each == _STRING:
                return [self.string() for _ in range(count)]
            return self.numbers(each, count).tolist()
        return self.numbers(kind, 1)[0].item()

    def numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise ValueError(f"a value of kind {kind}, where 0 to 12 and no array of arrays is known")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def _parsed(data: bytes) -> Gguf:
    reader = _Reader(data)
    if (magic := reader.take(4)) != b"GGUF":
        raise ValueError(f"it begins with {magic!r}")
    if (version := reader.unsigned(4)) != 3:
        raise ValueError(f"it has version {version}")
    tensors, entries = reader.unsigned(8), reader.unsigned(8)
    fields: dict[str, Any] = {}
    for _ in range(entries):
        key = reader.string()
        fields[key] = reader.value(reader.unsigned(4))
    told = []
    for _ in range(tensors):
        name, dims = reader.string(), reader.unsigned(4)
        shape = tuple(reader.unsigned(8) for _ in range(dims))[::-1]
        told.append((name, shape, reader.unsigned(4), reader.unsigned(8)))
    alignment = int(fields.get("general.alignment", 32))
    start = -(-reader.at // alignment) * alignment
    places = {}
    for name, shape, number, offset in told:
        if (kind := KINDS.get(number)) is None:
            raise ValueError(f"tensor {shown(name)} is of kind {number}")
        if not shape or shape[-1] % kind.numbers:
            raise ValueError(f"tensor {shown(name)} has shape {shape}, no rows of whole blocks of {kind.numbers}")
        reader.at = start + offset
        raw = reader.take(math.prod(shape) // kind.numbers * kind.bytes)
        places[name] = (kind, shape, np.frombuffer(raw, np.uint8))
    return Gguf(fields, places)


def read_gguf(path: Path) -> Gguf:
    """The file's content.  UserError, in one line, for anything else than a GGUF of these kinds."""
    data = read_file(path, "GGUF", _WAY_OUT, most=_MOST_BYTES)
    try:
        return _parsed(data)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"{path}: this GGUF cannot be read ({error}); {_WAY_OUT}") from None
