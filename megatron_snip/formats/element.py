"""Element types: the grid of values of one low-precision number.

An element has a sign, ``exponent_bits`` and ``mantissa_bits``.  Everything else is derived from these counts and
from the meaning of the top codes, so a constant cannot disagree with its type.
Sources: OCP 8-bit Floating Point Specification (OFP8) rev. 1.0 for E4M3 and E5M2; OCP Microscaling Formats (MX)
v1.0, sec. 5.3, for E2M1, E2M3 and E3M2.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_snip.errors import UserError

Specials = Literal["ieee", "fn", "finite"]

#: Stored code of NaN.  No finite value of any element uses this byte.
NAN_CODE = 0xFF


@dataclass(frozen=True)
class Element:
    """A layout of sign, exponent and mantissa in at most 8 bits.

    ``specials`` gives the meaning of the top codes: with "ieee" the top exponent is infinity and NaN (E5M2), with
    "fn" only the all-ones code is NaN (E4M3), and "finite" has neither (E2M1).
    Raises UserError unless the layout has 2 to 6 exponent bits, at least 1 mantissa bit and at most 8 bits, and for
    an 8-bit "finite" element, which leaves no code for NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: Specials

    def __post_init__(self) -> None:
        fits = 2 <= self.exponent_bits <= 6 and self.mantissa_bits >= 1 and self.bits <= 8
        if not fits:
            raise UserError(
                f"element {self.name}: needs 2 to 6 exponent bits, at least 1 mantissa bit "
                "and at most 8 bits with the sign; choose another eXmY"
            )
        if self.specials not in ("ieee", "fn", "finite"):
            raise UserError(f"element {self.name}: specials={self.specials!r}; choose ieee, fn or finite")
        if self.specials == "finite" and self.bits == 8:
            raise UserError(f"element {self.name}: 8 bits leave no code for NaN; choose specials ieee or fn")

    @property
    def name(self) -> str:
        """The usual name of the layout, such as "E4M3"."""
        return f"E{self.exponent_bits}M{self.mantissa_bits}"

    @property
    def bits(self) -> int:
        """Bits of one element, including the sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent bias: a stored exponent e stands for 2**(e - bias)."""
        return int(2 ** (self.exponent_bits - 1) - 1)

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value and of all subnormal values."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value."""
        top = 2**self.exponent_bits - 1
        return (top - 1 if self.specials == "ieee" else top) - self.bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        last_step = 2 if self.specials == "fn" else 1
        return float(2.0**self.emax * (2.0 - last_step * 2.0**-self.mantissa_bits))

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value."""
        return float(2.0**self.emin)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value, which is the spacing of subnormal values."""
        return float(2.0 ** (self.emin - self.mantissa_bits))

    @property
    def saturation(self) -> float:
        """Largest float32 magnitude that rounds to ``max`` or less, to nearest even.

        Larger magnitudes overflow in the sense of OFP8 sec. 5.2: they saturate and are counted.
        """
        midpoint = self.max + 2.0 ** (self.emax - self.mantissa_bits) / 2
        if self.max_code % 2 == 0:  # ties go to the even code, which is max
            return midpoint
        (bits,) = struct.unpack("<I", struct.pack("<f", midpoint))
        return float(struct.unpack("<f", struct.pack("<I", bits - 1))[0])

    @cached_property
    def carrier(self) -> Element | None:
        """The FP8 tensor-core element that holds every value of this element exactly.

        E4M3 if possible, else E5M2, else None.  E2M1 is carried in E4M3.
        """
        values = set(self.values())
        return next((element for element in (E4M3, E5M2) if values <= set(element.values())), None)

    @property
    def max_code(self) -> int:
        """Code of the largest finite value: exponent and mantissa bits, without the sign."""
        codes = 2 ** (self.exponent_bits + self.mantissa_bits)
        reserved = {"ieee": 2**self.mantissa_bits, "fn": 1, "finite": 0}[self.specials]
        return int(codes - reserved - 1)

    @property
    def sign_code(self) -> int:
        """The code's sign bit."""
        return int(2 ** (self.bits - 1))

    def value(self, code: int) -> float:
        """The value of a code that includes the sign bit; NaN for ``NAN_CODE``.

        Raises UserError if the code is not a finite value.
        """
        if code == NAN_CODE:
            return float("nan")
        sign, magnitude = divmod(code, self.sign_code)
        if sign not in (0, 1) or magnitude > self.max_code:
            raise UserError(
                f"element {self.name}: code {code:#x} is not a finite value; codes end at {self.max_code:#x}, "
                f"plus {self.sign_code:#x} for the sign"
            )
        exponent, mantissa = divmod(magnitude, 2**self.mantissa_bits)
        leading = 1.0 if exponent else 0.0
        size = (leading + mantissa * 2.0**-self.mantissa_bits) * 2.0 ** (max(exponent, 1) - self.bias)
        return float(-size if sign else size)

    def values(self) -> list[float]:
        """All non-negative finite values in ascending order, indexed by code."""
        return [self.value(code) for code in range(self.max_code + 1)]


E5M2 = Element(exponent_bits=5, mantissa_bits=2, specials="ieee")
E4M3 = Element(exponent_bits=4, mantissa_bits=3, specials="fn")
E2M1 = Element(exponent_bits=2, mantissa_bits=1, specials="finite")


def element_named(exponent_bits: int, mantissa_bits: int) -> Element:
    """The element that eXmY usually means.

    E5M2, E4M3 and E2M1 are those above.  Other layouts are "finite" below 8 bits, as in OCP MX, and "ieee" at 8 bits.
    Raises UserError for a layout that ``Element`` rejects.
    """
    for known in (E5M2, E4M3, E2M1):
        if (known.exponent_bits, known.mantissa_bits) == (exponent_bits, mantissa_bits):
            return known
    specials: Specials = "ieee" if 1 + exponent_bits + mantissa_bits == 8 else "finite"
    return Element(exponent_bits, mantissa_bits, specials)
