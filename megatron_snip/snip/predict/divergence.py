"""Divergences [L, O] from statistics, and predictions for a plan: pure numpy functions.

    loss divergence    dL(l, o)    = T/2 * sum_t (sum_n G[t,n] dY_f[t,n])^2           f = o.fprop    nats
                                     (q, k, v: at the attention's output)
    weight divergence  rho^2(l, o) = |u(g + E_f) - u(g)|_F^2 / U^2                    f = o.wgrad    1
        U^2            = sum over all linears k of |u(g_k)|_F^2

Source: SNIP, arXiv 2602.01410, as worked out in docs/numerics.md.
Convention: T tokens of the global batch; rows are the statistics' linears; bf16 costs nothing; NaN marks values that
were not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from megatron_snip.files.json import Text
from megatron_snip.formats import get_format
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure.statistics import Floats, Statistics


def loss_divergence(stats: Statistics, options: Sequence[LinearPrecision]) -> Floats:
    """dL [L, O] in nats: increase of the loss by each option's fprop.  UserError if a format was not measured."""
    return stats.tokens / 2 * by_format(stats, "token", [option.fprop for option in options])


def weight_divergence(stats: Statistics, options: Sequence[LinearPrecision]) -> Floats:
    """rho^2 [L, O]: squared change of the linear's update by each option's wgrad, relative to the whole update.

    Raises UserError if a format was not measured.
    """
    updates = stats.column("update")
    total = float(updates[np.isfinite(updates)].sum())
    own = by_format(stats, "own", [option.wgrad for option in options])
    # Without any update (learning has not begun) the total is 0, and no error can change an update.
    return own / total if total > 0 else 0.0 * own


def by_format(stats: Statistics, kind: str, formats: Sequence[str]) -> Floats:
    """[L, len(formats)] of a kind of column, NaN for linears that are not finite, 0 for bf16."""
    bad = np.where(stats.finite, 0.0, np.nan)
    columns = [stats.column(f"{kind}/{fmt}") if get_format(fmt).quantised else 0.0 for fmt in formats]
    return np.stack([column + bad for column in columns], axis=1)


class Predictions(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """dL in nats and rho^2 of every linear with finite statistics: linear -> format -> value.

    dL depends on the format of a linear's fprop, rho^2 on that of its wgrad.  None means not measured.
    """

    loss: dict[Text, dict[Text, float]]
    weight: dict[Text, dict[Text, float]]

    @classmethod
    def of(cls, stats: Statistics) -> Predictions:
        """The predictions of some statistics."""
        options = [LinearPrecision.uniform(fmt) for fmt in ("bf16", *stats.formats)]

        def table(values: Floats) -> dict[str, dict[str, float]]:
            rows = zip(stats.names, values.tolist(), stats.finite, strict=True)
            return {name: dict(zip(("bf16", *stats.formats), row)) for name, row, good in rows if good}

        weight = table(weight_divergence(stats, options)) if stats.has_updates else {}
        return cls(table(loss_divergence(stats, options)), weight)

    def loss_divergence(self, name: str, precision: LinearPrecision) -> float | None:
        """dL of one linear in nats."""
        return self.loss.get(name, {}).get(precision.fprop)

    def weight_divergence(self, name: str, precision: LinearPrecision) -> float | None:
        """rho^2 of one linear."""
        return self.weight.get(name, {}).get(precision.wgrad)

    def total_loss_divergence(self, linears: Mapping[str, LinearPrecision]) -> float | None:
        """Sum of dL over a plan's linears in nats, without unknown ones; None if a format was not measured."""
        return _total([self.loss_divergence(n, p) for n, p in linears.items() if n in self.loss])

    def total_weight_divergence(self, linears: Mapping[str, LinearPrecision]) -> float | None:
        """Sum of rho^2 over a plan's linears; None as above."""
        return _total([self.weight_divergence(n, p) for n, p in linears.items() if n in self.weight])


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None
