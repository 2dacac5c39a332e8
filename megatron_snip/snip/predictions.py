"""What statistics predict for a plan, linear by linear and in sum.

    dL(l)    by the format of fprop                                       nats
    rho^2(l) own^2 by the format of wgrad + prop^2 by that of dgrad + fwd^2 by that of fprop    1

Source: divergence.py.  Convention: bf16 costs nothing.  None is what was not measured: a format without statistics,
a linear whose statistics are not finite, rho^2 without its passes.  Sums leave such linears out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_snip.formats import get_format
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.divergence import (
    Floats,
    fwd_divergence,
    knows_fwd,
    loss_divergence,
    non_finite_linears,
    own_divergence,
    prop_divergence,
)
from megatron_snip.snip.stats import ProbeStats

ByFormat = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Predictions:
    """dL, own^2, prop^2 and fwd^2 of every linear with finite statistics: linear -> format -> value.

    prop is empty where no backward noise was measured, fwd where no fprop was quantised or only NaN came of it.
    """

    loss: ByFormat
    own: ByFormat
    prop: ByFormat
    fwd: ByFormat

    @classmethod
    def of(cls, stats: ProbeStats) -> Predictions:
        """The predictions of some statistics."""
        bad = set(non_finite_linears(stats, list(stats.linears)))
        names = [name for name in stats.linears if name not in bad]
        formats = sorted({fmt for name in names for fmt in stats.linears[name].token_square_sum})
        options = [LinearPrecision.uniform(fmt) for fmt in formats]

        def table(values: Floats) -> ByFormat:
            return {name: dict(zip(formats, map(float, row))) for name, row in zip(names, values, strict=True)}

        if not (names and options):
            return cls({name: {} for name in names}, {name: {} for name in names}, {}, {})
        return cls(
            table(loss_divergence(stats, names, options)),
            table(own_divergence(stats, names, options)),
            table(prop_divergence(stats, names, options)) if stats.has("backward_noise") else {},
            table(fwd_divergence(stats, names, options)) if knows_fwd(stats) else {},
        )

    def loss_divergence(self, name: str, precision: LinearPrecision) -> float | None:
        """dL of one linear in nats."""
        return _entry(self.loss, name, precision.fprop)

    def weight_divergence(self, name: str, precision: LinearPrecision) -> float | None:
        """rho^2 of one linear."""
        gemms = ((self.own, precision.wgrad), (self.prop, precision.dgrad), (self.fwd, precision.fprop))
        return _total([_entry(table, name, fmt) for table, fmt in gemms])

    def total_loss_divergence(self, linears: Mapping[str, LinearPrecision]) -> float | None:
        """Sum of dL over the linears of a plan in nats; None if one of them has a format that was not measured."""
        return _total([self.loss_divergence(n, p) for n, p in linears.items() if n in self.loss])

    def total_weight_divergence(self, linears: Mapping[str, LinearPrecision]) -> float | None:
        """Sum of rho^2 over the linears of a plan; None as above."""
        return _total([self.weight_divergence(n, p) for n, p in linears.items() if n in self.loss])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Predictions:
        """The predictions that ``to_dict`` gave."""
        return cls(values["loss"], values["own"], values["prop"], values.get("fwd", {}))  # older ones have no fwd


def _entry(table: ByFormat, name: str, fmt: str) -> float | None:
    if not get_format(fmt).quantised:
        return 0.0 if name in table else None
    return table.get(name, {}).get(fmt)


def _total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None
