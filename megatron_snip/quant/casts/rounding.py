"""Random bits for stochastic rounding, as a function of position, without generator state.

The generator is Philox-4x32-7 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, whose tests it
passes), in plain torch int64 arithmetic.  Rows and columns are global, whatever the layout.  Element (row, col) of an
operand reads one of the eight 16-bit draws in the words of

    counter = (col >> 3, row & 0xffffffff, row >> 32, iteration)
    key     = (low, high 32 bits of mix64(mix64(seed) ^ stream))

Draw ``col & 7`` is half ``col & 1``, low half first, of word ``(col & 7) >> 1``.  mix64 is SplitMix64's step (Steele
et al., OOPSLA 2014).

Seed and stream stay the same for a whole run.  Iteration and row0 change, so GPU kernels read them from device memory:
they are written once per microbatch, and all of its casts read the same two numbers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.formats import ROLES

RANDOM_BITS = 16

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


def mix64(z: int) -> int:
    """SplitMix64's output for state ``z``: a bijection of 64-bit integers that mixes every bit."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def name_stream(name: str) -> int:
    """The 32-bit stream for a linear's name: CRC-32 of its UTF-8 bytes, the same in every process."""
    return zlib.crc32(name.encode())


class Rows(NamedTuple):
    """Where an operand's rows lie in the whole tensor, if a process has two pieces of each sequence.

    A piece has ``piece`` rows.  The first sequence's piece that begins at row ``first`` comes first, then the one at
    ``second``.  Then come the same pieces of the next sequence, which begins ``sequence`` rows later.  No scale block
    crosses a piece boundary.
    """

    piece: int
    sequence: int
    first: int
    second: int

    def places(self, rows: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions of rows 0, 1, ... in the whole tensor, counted from the first sequence: int64 [rows]."""
        row = torch.arange(rows, device=device)
        number = row // self.piece
        begin = torch.where(number % 2 == 0, self.first, self.second)
        return number // 2 * self.sequence + begin + row % self.piece


@dataclass(frozen=True)
class RoundingKey:
    """Identifies the random bits of one operand.

    seed: the run's.  iteration: the optimiser step.  stream: a hash of the linear and the role; ``name_stream`` hashes
    the linear, and ``for_operand`` adds the role.  Both GEMMs that read an operand round it with the same bits.
    row0, col0: global position of the operand's first element; row = global sample index * seq-length + position, col =
    channel.  rows: where the operand's rows lie, counted from row0; None if they are consecutive.
    Raises UserError for a negative row0 or col0, col0 above 2**34 or an iteration outside 32 bits.
    """

    seed: int
    iteration: int
    stream: int
    row0: int = 0
    col0: int = 0
    rows: Rows | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.iteration <= _MASK32:
            raise UserError(f"RoundingKey: iteration={self.iteration} does not fit 32 bits; count from 0")
        if not (0 <= self.row0 < 2**63 and 0 <= self.col0 < 2**34):
            raise UserError(f"RoundingKey: row0={self.row0}, col0={self.col0}; give positions from 0 up")

    @property
    def words(self) -> tuple[int, int]:
        """Philox's key: two 32-bit words made from seed and stream."""
        return _words(self.seed, self.stream)

    def for_operand(self, role: str, row0: int | None = None, col0: int | None = None) -> RoundingKey:
        """The key of one operand.  Positions default to this key's; with a row0, rows are consecutive.

        Raises UserError for an unknown role.
        """
        return RoundingKey(
            self.seed,
            self.iteration,
            _operand_stream(self.stream, role),
            self.row0 if row0 is None else row0,
            self.col0 if col0 is None else col0,
            self.rows if row0 is None else None,
        )


@lru_cache(maxsize=8192)  # three operands for each linear of a large model
def _operand_stream(stream: int, role: str) -> int:
    if role not in ROLES:
        raise UserError(f"role={role!r}: choose one of {', '.join(ROLES)}")
    return mix64((stream + (1 + ROLES.index(role) << 32)) & _MASK64)


@lru_cache(maxsize=8192)
def _words(seed: int, stream: int) -> tuple[int, int]:
    mixed = mix64(mix64(seed) ^ (stream & _MASK64))
    return mixed & _MASK32, mixed >> 32


def random_bits(key: RoundingKey, rows: int, cols: int, device: torch.device | str = "cpu") -> Tensor:
    """The 16-bit random integers of an operand: int64 [rows, cols], element (0, 0) at (row0, col0)."""
    places = torch.arange(rows, device=device) if key.rows is None else key.rows.places(rows, device)
    row = (key.row0 + places)[:, None]
    first_group, last_group = key.col0 >> 3, (key.col0 + max(cols, 1) - 1) >> 3
    group = torch.arange(first_group, last_group + 1, device=device)[None, :]
    iteration = torch.full_like(group, key.iteration)
    counter = torch.broadcast_tensors(group, row & _MASK32, row >> 32, iteration)
    words = torch.stack(philox(counter, key.words), dim=-1)
    draws = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(start_dim=1)
    skip = key.col0 & 7
    return draws[:, skip : skip + cols]


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-7, elementwise: four int64 tensors [R, C] of 32-bit words in, four out."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, computed by halves of ``b`` so that int64 never overflows."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & _MASK32
    return high, low
