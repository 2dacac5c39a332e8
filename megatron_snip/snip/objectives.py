"""Quality objectives Q [L, O] that the solver minimises, by name.  A new one is one function and one entry.

    snip       dL / L0 + c/2 rho^2             per-token Fisher, weight divergence of own, prop and fwd
    snip_loss  dL / L0
    ggn        as snip, dL from the gradient of labels that the model drew itself
    norms      dL / L0 from Frobenius norms alone: T/2 (|dX|^2 |E_X|^2 / (T K) + |dW|^2 |E_W|^2 / (N K))
    paper      a reading of SNIP's own: |g| |delta| / sqrt(numel) over X and W, plus the change of all updates by
               noise after the last block, 1 + 3 + 3 passes; see docs/numerics.md
    abs_err    sum of |Q(A) - A|_F over the operands of the three GEMMs
    rel_err    sum of |Q(A) - A|_F / |A|_F
    random, layer_id, layer_type: rules of baselines.py, which measure nothing

Source: SNIP, arXiv 2602.01410, as worked out in docs/numerics.md.
Convention: Q is the difference from the base option: fp8 where it is among the options, else the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_snip.formats import get_format
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.quant.operands import REDUCTION_DIM
from megatron_snip.snip import baselines
from megatron_snip.snip.divergence import (
    loss_divergence,
    non_finite_linears,
    own_divergence,
    weight_divergence,
)
from megatron_snip.snip.stats import LinearStats, ProbeStats

Floats = NDArray[np.float64]

BASE = LinearPrecision.uniform("fp8")
_TENSOR = {"input": "X", "weight": "W", "grad_output": "G"}


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
    """A quality objective: inputs -> Q [L, O], any unit.

    passes: of a probe beside its statistics; None needs no probe.  draws: of each noise, None as the user says.
    """

    compute: Callable[[ObjectiveInputs], Floats]
    summary: str
    passes: tuple[str, ...] | None = None
    draws: int | None = None

    @property
    def needs_stats(self) -> bool:
        """Whether a probe must come first."""
        return self.passes is not None


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
        part = replace(inputs, shapes=healthy)
        result[~rows] = quality_loss(objective, part)
    free = np.full(len(rows), -1, np.int64) if fixed is None else np.array(fixed, np.int64)
    return result, np.where(rows, base_option(inputs.options), free), held


def _loss(inputs: ObjectiveInputs) -> float:
    """L0.  Raises ValueError if it is no positive number."""
    stats = inputs.measured()
    if not (np.isfinite(stats.loss) and stats.loss > 0):
        raise ValueError(f"loss of the probe at iteration {stats.iteration} is {stats.loss}; it must be above 0")
    return stats.loss


def _snip_loss(inputs: ObjectiveInputs) -> Floats:
    return loss_divergence(inputs.measured(), inputs.names, inputs.options) / _loss(inputs)


def _snip(inputs: ObjectiveInputs) -> Floats:
    rho_sq = weight_divergence(inputs.measured(), inputs.names, inputs.options)
    return _snip_loss(inputs) + inputs.update_weight / 2 * rho_sq


def _ggn(inputs: ObjectiveInputs) -> Floats:
    stats = inputs.measured()
    if missing := [name for name in inputs.names if stats.linears[name].sampled_square_sum is None]:
        raise ValueError(
            f"statistics of iteration {stats.iteration} have no sampled labels for {missing[0]}; collect them with ggn"
        )
    sampled = {
        name: replace(linear, token_square_sum=linear.sampled_square_sum or {})
        for name, linear in stats.linears.items()
    }
    divergence = loss_divergence(replace(stats, linears=sampled), inputs.names, inputs.options)
    rho_sq = weight_divergence(stats, inputs.names, inputs.options)
    return divergence / _loss(inputs) + inputs.update_weight / 2 * rho_sq


def _by_operand(
    inputs: ObjectiveInputs, value: Callable[[LinearStats, LinearShape, str, str, float], float], gemms: Sequence[str]
) -> Floats:
    """[L, O] of the sum of ``value(linear, shape, gemm, role, |E|_F)`` over the operands of ``gemms``."""
    stats = inputs.measured()
    result = np.zeros((len(inputs.shapes), len(inputs.options)))
    for row, shape in enumerate(inputs.shapes):
        linear = stats.linears[shape.name]
        for column, option in enumerate(inputs.options):
            for gemm in gemms:
                fmt = getattr(option, gemm)
                for role in REDUCTION_DIM[gemm] if get_format(fmt).quantised else ():
                    error = float(np.sqrt(linear.error_sq[f"{fmt}/{gemm}/{role}"]))
                    result[row, column] += value(linear, shape, gemm, role, error)
    return result


def _abs_err(inputs: ObjectiveInputs) -> Floats:
    return _by_operand(inputs, lambda linear, shape, gemm, role, error: error, GEMMS)


def _rel_err(inputs: ObjectiveInputs) -> Floats:
    def relative(linear: LinearStats, shape: LinearShape, gemm: str, role: str, error: float) -> float:
        norm = float(np.sqrt(linear.norm_sq[_TENSOR[role]]))
        return error / norm if norm > 0 else 0.0

    return _by_operand(inputs, relative, GEMMS)


def _gradient_by_size(linear: LinearStats, shape: LinearShape, role: str, tokens: int) -> float:
    """|dL/dA|_F / sqrt(numel of A) of the input or the weight."""
    if role == "input":
        return float(np.sqrt(linear.norm_sq["dX"] / (tokens * shape.in_features)))
    return float(np.sqrt(linear.norm_sq["dW"] / (shape.out_features * shape.in_features)))


def _norms(inputs: ObjectiveInputs) -> Floats:
    tokens = inputs.measured().tokens

    def value(linear: LinearStats, shape: LinearShape, gemm: str, role: str, error: float) -> float:
        return tokens / 2 * (_gradient_by_size(linear, shape, role, tokens) * error) ** 2

    return _by_operand(inputs, value, ["fprop"]) / _loss(inputs)


def _paper(inputs: ObjectiveInputs) -> Floats:
    stats = inputs.measured()

    def first_order(linear: LinearStats, shape: LinearShape, gemm: str, role: str, error: float) -> float:
        return _gradient_by_size(linear, shape, role, stats.tokens) * error

    def at_output(linear: LinearStats, shape: LinearShape, gemm: str, role: str, error: float) -> float:
        other = linear.norm_sq["W" if role == "input" else "X"]
        return error**2 * other / shape.in_features  # |dY|^2 if the errors are independent

    updates = sum(linear.update_norm_sq for linear in stats.linears.values() if linear.is_finite)
    own = np.sqrt(own_divergence(stats, inputs.names, inputs.options))
    backward = np.array([[_dgrad_error(stats, n, o) for o in inputs.options] for n in inputs.names])
    forward = np.sqrt(_by_operand(inputs, at_output, ["fprop"]))
    scale = 1.0 / np.sqrt(updates) if updates > 0 else 0.0
    far = backward * _gain(stats, "backward_noise") + forward * _gain(stats, "forward_noise")
    return _by_operand(inputs, first_order, ["fprop"]) + own + far * scale


def _dgrad_error(stats: ProbeStats, name: str, option: LinearPrecision) -> float:
    return float(np.sqrt(stats.linears[name].dgrad_error_sq.get(option.dgrad, 0.0)))


def _gain(stats: ProbeStats, kind: str) -> float:
    """Change of all updates by the noise after the last block that made it."""
    if kind not in stats.noise_sq:
        raise ValueError(f"statistics of iteration {stats.iteration} have no {kind}; collect them with paper")
    changes = [
        linear.noise_update_sq if kind == "backward_noise" else linear.forward_update_sq
        for linear in stats.linears.values()
        if linear.is_finite
    ]
    noise = stats.noise_sq[kind]
    return float(np.sqrt(sum(change or 0.0 for change in changes) / noise)) if noise > 0 else 0.0


def _rule(rank: Callable[[Sequence[LinearShape], int], Floats]) -> Callable[[ObjectiveInputs], Floats]:
    def compute(inputs: ObjectiveInputs) -> Floats:
        return baselines.protect(rank(inputs.shapes, inputs.seed), inputs.shapes, inputs.options)

    return compute


_NOISE = ("backward_noise",)
_WEIGHT = ("backward_noise", "quantised_fprop")  # what the weight divergence needs
OBJECTIVES: Mapping[str, Objective] = {
    "snip": Objective(_snip, "loss divergence / loss + c/2 weight divergence", _WEIGHT),
    "snip_loss": Objective(_snip_loss, "loss divergence / loss", ()),
    "ggn": Objective(_ggn, "as snip, with labels that the model draws", (*_WEIGHT, "sampled_labels")),
    "norms": Objective(_norms, "loss divergence from norms alone", ()),
    "paper": Objective(_paper, "norm-based loss and weight divergence", (*_NOISE, "forward_noise"), draws=3),
    "abs_err": Objective(_abs_err, "absolute quantisation error", ()),
    "rel_err": Objective(_rel_err, "relative quantisation error", ()),
    "random": Objective(_rule(baselines.random_ranks), "linears in an order drawn from the seed"),
    "layer_id": Objective(_rule(baselines.layer_id_ranks), "blocks in the middle first"),
    "layer_type": Objective(_rule(baselines.layer_type_ranks), "kinds of linear, down_proj last"),
}
