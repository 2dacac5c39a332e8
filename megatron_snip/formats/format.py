"""Formats as data: an element, the block that shares a scale, and the kind of scale.

Convention: ``x ~= scale * q`` with q on the element's grid, so a scale always decodes.
To add a format, write one literal in known.py: ``register(Format(name=..., element=..., ...))``.
Source of the block shapes (1x128 tiles for activations and gradients, 128x128 blocks for weights): SNIP
(arXiv 2602.01410) and DeepSeek-V3 (arXiv 2412.19437, sec. 3.3).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from megatron_snip.errors import UserError
from megatron_snip.formats.element import Element, element_named

ROLES = ("input", "weight", "grad_output")
#: A ``tile`` of whole rows: longer than any reduction dim.
ROW = 2**30


class _Scale(NamedTuple):
    """A kind of scale.

    bits: the size of a stored scale.  saturates_below: if an element's largest value is smaller than this, blocks may
    have finite values beyond it; 0 if no block can.
    """

    bits: int
    saturates_below: float


#: Kinds of scale.  The CPU kernel knows a kind by its index (enum Scale in cpu_kernels.h), Triton's by its name.
#: E2M5 can saturate under power-of-two scales: they encode by 4 / 2**128 at least.
_SCALES = {
    "fp32": _Scale(32, 0.0),
    "fp32_pow2": _Scale(32, 4.0),
    "e8m0": _Scale(8, math.inf),
    "e8m0_ceil": _Scale(8, 4.0),
    "e4m3": _Scale(8, math.inf),
    "e4m3_4over6": _Scale(8, math.inf),
}
SCALES = tuple(_SCALES)
#: Kinds with E4M3 block scales under one float32 scale for the whole tensor.
E4M3_SCALES = ("e4m3", "e4m3_4over6")

#: (role, reduction dim) -> the GEMM that reads this operand, and the role.
_OPERANDS = {
    ("input", 1): "fprop.input",
    ("weight", 1): "fprop.weight",
    ("grad_output", 1): "dgrad.grad_output",
    ("weight", 0): "dgrad.weight",
    ("grad_output", 0): "wgrad.grad_output",
    ("input", 0): "wgrad.input",
}

_LENGTHS = (16, 32, 128)
_EXMY = re.compile(r"e(\d)m(\d)")
_FORMATS: dict[str, Format] = {}


@dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform of both operands of some GEMMs, along the reduction dim (quant/casts/hadamard.py).

    signs: a "+" or "-" for each element of a group; their number is the group's length, 16, 32 or 128.
    gemms: the GEMMs whose operands are transformed.
    Raises UserError for other signs, lengths and GEMMs.
    """

    signs: str
    gemms: frozenset[str] = frozenset({"wgrad"})

    def __post_init__(self) -> None:
        if len(self.signs) not in _LENGTHS or set(self.signs) - set("+-"):
            raise UserError(
                f"Hadamard transform: signs={self.signs!r}, of length {len(self.signs)}; "
                f"give {', '.join(map(str, _LENGTHS))} of + and -"
            )
        known = tuple(dict.fromkeys(operand.partition(".")[0] for operand in _OPERANDS.values()))
        if not self.gemms or self.gemms - {*known}:
            raise UserError(f"Hadamard transform: gemms={sorted(self.gemms)}; choose from {', '.join(known)}")

    @property
    def length(self) -> int:
        """Elements per group."""
        return len(self.signs)


@dataclass(frozen=True)
class Format:
    """How one GEMM operand is stored.

    element: the grid, or None if the operand stays in the compute dtype (bf16).
    tile: elements along the reduction dim that share a scale; ROW for all of them (per-token, row-wise scales).
    weight_block: side of a weight's square block, or None to use tiles for weights too.
    scale: kind of scale (formulas in quant/casts/scales.py).  "fp32" is 1 / (element max / amax); "fp32_pow2" rounds
    that divisor down to a power of two; "e8m0" is 2**(floor(log2 amax) - element emax); "e8m0_ceil" is amax / element
    max rounded up to a power of two; "e4m3" is an E4M3 scale per block under one float32 scale per tensor;
    "e4m3_4over6" is that or 1.5 times it, whichever rounds the block with the smaller squared error.
    stochastic_roles: roles, or operands of one GEMM such as "wgrad.input", that round stochastically by default.
    hadamard: the transform of some GEMMs' operands before they are cast, or None.
    recast: roles whose operand along dim 0 is cast from the dequantised one along dim 1, not from the tensor itself.
    gradient_element: the grid of grad_output, with as many bits as ``element``, or None if it is the same.
    Raises UserError for an unknown role or kind of scale, sizes below 1, and gradients with other bit counts.
    """

    name: str
    element: Element | None
    tile: int = 128
    weight_block: int | None = 128
    scale: str = "fp32"
    stochastic_roles: frozenset[str] = frozenset()
    hadamard: Hadamard | None = None
    gradient_element: Element | None = None
    recast: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        return hash(self.name)  # cheap: every cast of a linear looks up a form

    def __post_init__(self) -> None:
        if self.scale not in _SCALES:
            raise UserError(f"format {self.name}: scale={self.scale!r}; known: {', '.join(_SCALES)}")
        if unknown := sorted(self.stochastic_roles - {*ROLES, *_OPERANDS.values()}):
            known = ", ".join((*ROLES, *_OPERANDS.values()))
            raise UserError(f"format {self.name}: stochastic_roles={unknown}; known: {known}")
        if self.tile < 1 or (self.weight_block is not None and self.weight_block < 1):
            raise UserError(f"format {self.name}: tile={self.tile}, weight_block={self.weight_block}; use 1 or more")
        if self.tile == ROW and self.needs_tensor_amax:
            raise UserError(f"format {self.name}: scale={self.scale!r} is of blocks, tile=ROW has none; choose fp32")
        if unknown := sorted(self.recast - {*ROLES}):
            raise UserError(f"format {self.name}: recast={unknown}; known: {', '.join(ROLES)}")
        if (own := self.gradient_element) is not None and (self.element is None or own.bits != self.element.bits):
            bits = 0 if self.element is None else self.element.bits
            raise UserError(
                f"format {self.name}: gradient_element={own.name} has {own.bits} bits, element {bits}; "
                "give one of as many bits"
            )

    def of(self, role: str) -> Format:
        """This format for one role: ``element`` is the grid of that role's operands."""
        return self if self.gradient_element is None else _of(self, role)

    @property
    def elements(self) -> tuple[Element, ...]:
        """Its element, and the gradients' if it differs; empty for bf16."""
        found = (self.element, self.gradient_element)
        return tuple(dict.fromkeys(element for element in found if element is not None))

    @property
    def quantised(self) -> bool:
        """False for formats that leave operands unchanged (bf16)."""
        return self.element is not None

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether block scales depend on the amax of the whole tensor."""
        return self.scale in E4M3_SCALES

    @property
    def saturates(self) -> bool:
        """Whether scales can leave finite values beyond the element's largest one (numerics.md, "saturated")."""
        return any(element.max < _SCALES[self.scale].saturates_below for element in self.elements)

    @property
    def element_bits(self) -> int:
        """Bits of one element without its scale (16, 8 or 4); this decides a GEMM's speed."""
        return 16 if self.element is None else self.element.bits

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element, including its share of a tile's scale."""
        if self.element is None:
            return 16.0
        return self.element.bits + (0 if self.tile == ROW else _SCALES[self.scale].bits / self.tile)

    def stochastic(self, role: str, dim: int) -> bool:
        """Whether a role's operand that is reduced along ``dim`` rounds stochastically by default."""
        return role in self.stochastic_roles or _OPERANDS[role, dim] in self.stochastic_roles

    def transforms(self, role: str, dim: int) -> bool:
        """Whether a role's operand that is reduced along ``dim`` is transformed before it is cast."""
        return self.hadamard is not None and _OPERANDS[role, dim].partition(".")[0] in self.hadamard.gemms

    @property
    def shares_weight(self) -> bool:
        """Whether fprop and dgrad share one cast of a weight: square blocks, rounded to nearest, not transformed."""
        differ = any(self.stochastic("weight", dim) or self.transforms("weight", dim) for dim in (0, 1))
        return self.block_shape("weight", 0) == self.block_shape("weight", 1) and not differ

    def block_shape(self, role: str, dim: int) -> tuple[int, int]:
        """(rows, columns) that share a scale in a 2-D operand reduced along ``dim``.

        Raises UserError for an unknown role or a dim other than 0 and 1.
        """
        if role not in ROLES:
            raise UserError(f"role={role!r}: choose one of {', '.join(ROLES)}")
        if dim not in (0, 1):
            raise UserError(f"dim={dim!r}: operands are 2-D, so the reduction dim is 0 or 1")
        if role == "weight" and self.weight_block is not None:
            return self.weight_block, self.weight_block
        return (1, self.tile) if dim == 1 else (self.tile, 1)


@cache
def _of(fmt: Format, role: str) -> Format:
    element = fmt.gradient_element if role == "grad_output" else fmt.element
    return replace(fmt, element=element, gradient_element=None)


def register(fmt: Format) -> Format:
    """Add a format to the registry and return it.  Raises UserError if the name is taken."""
    if fmt.name in _FORMATS:
        raise UserError(f"format {fmt.name}: this name is taken; choose another one")
    _FORMATS[fmt.name] = fmt
    return fmt


def format_names() -> list[str]:
    """Names of the registered formats in order of registration.  eXmY names are also valid."""
    return list(_FORMATS)


def get_format(name: str) -> Format:
    """The format with that name: a registered one, or any eXmY with the default tiles.

    Raises UserError, which lists the known names, for an unknown name.
    """
    fmt = _FORMATS.get(name)
    return fmt if fmt is not None else _exmy(name)


@cache
def _exmy(name: str) -> Format:
    """A format for an unregistered eXmY: default tiles, round to nearest everywhere."""
    match = _EXMY.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise UserError(f"unknown format {name!r}; known: {', '.join(_FORMATS)}, or an element such as e3m2")
    return Format(name=name, element=element_named(int(match[1]), int(match[2])))
