"""Divergences [L, O] from statistics, and the quality objectives that the solver minimises, by name.

    loss divergence    dL(l, o)    = T/2 * sum_t (sum_n G[t,n] dY_f[t,n])^2         f = o.fprop    nats
    weight divergence  rho^2(l, o) = |u(g + E_w,f) - u(g)|_F^2 / sum_k |u(g_k)|_F^2   f = o.wgrad    1
    snip               Q = dL / L0 + c/2 rho^2                                                       1

Source: SNIP, arXiv 2602.01410, as worked out in docs/numerics.md.
Convention: T tokens of the global batch, L0 its loss, bf16 costs nothing, Q is the difference from the base
option: fp8 where it is among the options, else the first.  A new objective is one entry of OBJECTIVES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_snip.formats import get_format
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip import baselines
from megatron_snip.snip.cost import LinearShape
from megatron_snip.snip.stats import LinearStats, ProbeStats

Floats = NDArray[np.float64]

BASE = LinearPrecision.uniform("fp8")


class NonFiniteStatistics(ValueError):
    """Some linears' statistics are NaN or infinite; ``names`` are theirs.  Hold them at the base option."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        shown = ", ".join(self.names[:8]) + (", ..." if len(self.names) > 8 else "")
        super().__init__(
            f"statistics of {len(self.names)} linears are not finite: {shown}; hold them at the base option"
        )


@dataclass(frozen=True)
class ObjectiveInputs:
    """What an objective may look at.  Q has a row per shape and a column per option.

    stats is None for rules that need none; update_weight is c of the snip objective; seed is for "random".
    """

    shapes: Sequence[LinearShape]
    options: Sequence[LinearPrecision]
    stats: ProbeStats | None = None
    update_weight: float = 1.0
    seed: int = 0

    @property
    def names(self) -> list[str]:
        """Names of the linears, in the order of the rows."""
        return [shape.name for shape in self.shapes]

    def measured(self) -> ProbeStats:
        """The statistics.  Raises ValueError if there are none."""
        if self.stats is None:
            raise ValueError("this objective needs statistics; probe first, or choose a rule such as random")
        return self.stats


@dataclass(frozen=True)
class Objective:
    """A quality objective: inputs -> Q [L, O], any unit.  needs_stats: whether a probe must come first."""

    compute: Callable[[ObjectiveInputs], Floats]
    needs_stats: bool
    summary: str


def loss_divergence(stats: ProbeStats, names: Sequence[str], options: Sequence[LinearPrecision]) -> Floats:
    """dL [L, O] in nats: what each option's fprop adds to the loss.

    Raises ValueError if a linear or a format was not measured, NonFiniteStatistics as it says.
    """

    def value(linear: LinearStats, option: LinearPrecision) -> float | None:
        return _entry(linear.token_square_sum, option.fprop)

    return stats.tokens / 2 * _matrix(stats, names, options, value)


def weight_divergence(stats: ProbeStats, names: Sequence[str], options: Sequence[LinearPrecision]) -> Floats:
    """rho^2 [L, O]: squared change of the update by each option's wgrad, relative to all linears' update.

    The update's norm is that of all linears in ``stats`` whose own norm is finite.
    Raises ValueError if a linear or a format was not measured, NonFiniteStatistics as it says.
    """

    def value(linear: LinearStats, option: LinearPrecision) -> float | None:
        return _entry(linear.own_sq, option.wgrad)

    own = _matrix(stats, names, options, value)
    norms = np.array([linear.update_norm_sq for linear in stats.linears.values()])
    total = float(norms[np.isfinite(norms)].sum())
    # No update at all (learning has not begun): relative to nothing, but no error of it either.
    return own / total if total > 0 else np.zeros_like(own)


def base_option(options: Sequence[LinearPrecision]) -> int:
    """Index of the option that differences are taken from: fp8 if it is there, else the first."""
    return list(options).index(BASE) if BASE in options else 0


def quality_loss(objective: str, inputs: ObjectiveInputs) -> Floats:
    """Q [L, O] of a named objective, as the difference from the base option.

    Raises ValueError for an unknown name, listing the known ones, and what the objective itself raises.
    """
    values = get_objective(objective).compute(inputs)
    return values - values[:, [base_option(inputs.options)]]


def get_objective(name: str) -> Objective:
    """The objective of that name.  Raises ValueError for an unknown one, listing the known."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


def finite_or_held(
    objective: str, inputs: ObjectiveInputs, fixed: NDArray[np.int64] | None = None
) -> tuple[Floats, NDArray[np.int64], tuple[str, ...]]:
    """Q [L, O], ``fixed`` [L] and the names held: linears with non-finite statistics are fixed to the base.

    ``fixed`` as in ilp.solve; -1 is free.  The rows of held linears are zero.
    """
    held = () if inputs.stats is None else non_finite_linears(inputs.stats, inputs.names)
    rows = np.array([name in held for name in inputs.names])
    healthy = [shape for shape, bad in zip(inputs.shapes, rows) if not bad]
    result = np.zeros((len(rows), len(inputs.options)))
    if healthy:
        part = ObjectiveInputs(healthy, inputs.options, inputs.stats, inputs.update_weight, inputs.seed)
        result[~rows] = quality_loss(objective, part)
    free = np.full(len(rows), -1, np.int64) if fixed is None else np.array(fixed, np.int64)
    return result, np.where(rows, base_option(inputs.options), free), held


def non_finite_linears(stats: ProbeStats, names: Sequence[str]) -> tuple[str, ...]:
    """Those of ``names`` that have a NaN or infinite statistic, in their order."""
    return tuple(name for name in names if name in stats.linears and not _is_finite(stats.linears[name]))


def _is_finite(linear: LinearStats) -> bool:
    numbers = [*linear.token_square_sum.values(), *linear.own_sq.values(), linear.update_norm_sq]
    return bool(np.isfinite(numbers).all())


def _entry(values: Mapping[str, float], fmt: str) -> float | None:
    return values.get(fmt) if get_format(fmt).quantised else 0.0


def _matrix(
    stats: ProbeStats,
    names: Sequence[str],
    options: Sequence[LinearPrecision],
    value: Callable[[LinearStats, LinearPrecision], float | None],
) -> Floats:
    """[L, O] of ``value``; None means that the option's format was not measured."""
    if missing := [name for name in names if name not in stats.linears]:
        raise ValueError(f"statistics of iteration {stats.iteration} have no such linears: {missing}")
    if bad := non_finite_linears(stats, names):
        raise NonFiniteStatistics(bad)
    result = np.empty((len(names), len(options)))
    for row, name in enumerate(names):
        for column, option in enumerate(options):
            entry = value(stats.linears[name], option)
            if entry is None:
                raise ValueError(
                    f"statistics of iteration {stats.iteration} lack a format of option {option} for {name}; "
                    "probe with these options"
                )
            result[row, column] = entry
    return result


def _snip_loss(inputs: ObjectiveInputs) -> Floats:
    stats = inputs.measured()
    if not (np.isfinite(stats.loss) and stats.loss > 0):
        raise ValueError(f"loss of the probe at iteration {stats.iteration} is {stats.loss}; it must be above 0")
    return loss_divergence(stats, inputs.names, inputs.options) / stats.loss


def _snip(inputs: ObjectiveInputs) -> Floats:
    rho_sq = weight_divergence(inputs.measured(), inputs.names, inputs.options)
    return _snip_loss(inputs) + inputs.update_weight / 2 * rho_sq


def _rule(rank: Callable[[Sequence[str], int], Floats]) -> Callable[[ObjectiveInputs], Floats]:
    def compute(inputs: ObjectiveInputs) -> Floats:
        return baselines.protect(rank(inputs.names, inputs.seed), inputs.shapes, inputs.options)

    return compute


OBJECTIVES: Mapping[str, Objective] = {
    "snip": Objective(_snip, True, "loss divergence / loss + c/2 weight divergence"),
    "snip_loss": Objective(_snip_loss, True, "loss divergence / loss"),
    "random": Objective(_rule(baselines.random_ranks), False, "linears in an order drawn from the seed"),
    "layer_id": Objective(_rule(baselines.layer_id_ranks), False, "blocks in the middle first"),
    "layer_type": Objective(_rule(baselines.layer_type_ranks), False, "kinds of linear, down_proj last"),
}
