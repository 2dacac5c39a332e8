"""Quality objectives Q [L, O] that the solver minimises, by name.  To add one, write one function and one entry.

    snip       dL / L0 + c/2 rho^2, with c = 0 by default
    abs_err    sum of |Q(A) - A|_F over the operands of the three GEMMs
    rel_err    sum of |Q(A) - A|_F / |A|_F
    random, layer_id, layer_type: rules that measure nothing

Source: SNIP, arXiv 2602.01410, as worked out in docs/numerics.md; the rules are its baselines.
Convention: Q is the difference from the base option: fp8 if it is an option, else the first with least FP4.  A rule
gives each linear a rank in (0, 1]; higher ranks keep their precision longer.  Its Q is the rank times the linear's
FLOPs times the precision that fprop loses.  So the cost per FLOP saved depends only on the rank, and large linears are
not spared.  By GEMM, dgrad and wgrad cost nothing, as in `snip` at c = 0; else a rule would spend its FP4 worse than
any plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron_snip.errors import UserError
from megatron_snip.formats import get_format
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape
from megatron_snip.quant.linears.operands import REDUCTION_DIM
from megatron_snip.snip.measure.statistics import Floats, Statistics
from megatron_snip.snip.plan.cost import efficiency
from megatron_snip.snip.predict.divergence import loss_divergence, weight_divergence

BASE = LinearPrecision.uniform("fp8")
#: For rule "layer_type", in the order in which kinds lose precision.  A rule of thumb, not a measurement: down's input
#: (SwiGLU's product) has the widest outliers, and o and v reach the residual stream unscaled.
FIRST_TO_LEAVE = ("gate", "up", "q", "k", "v", "o", "down")
_TENSOR = {"input": "X", "weight": "W", "grad_output": "G"}


@dataclass(frozen=True)
class ObjectiveInputs:
    """Input of an objective.  Q has a row per shape and a column per option.

    stats: of the same linears in the same order, None for rules.  update_weight: c.  seed: for "random".
    """

    shapes: Sequence[LinearShape]
    options: Sequence[LinearPrecision]
    stats: Statistics | None = None
    update_weight: float = 0.0
    seed: int = 0

    def measured(self) -> Statistics:
        """The statistics.  Raises UserError if there are none, or they belong to other linears."""
        if self.stats is None:
            raise UserError("this objective needs statistics; probe first, or choose a rule such as random")
        if self.stats.names != [shape.name for shape in self.shapes]:
            raise UserError(f"statistics of iteration {self.stats.iteration} are of other linears; probe this model")
        return self.stats


@dataclass(frozen=True)
class Objective:
    """A quality objective: inputs -> Q [L, O], any unit; NaN for linears that cannot be judged."""

    compute: Callable[[ObjectiveInputs], Floats]
    needs_stats: bool = True
    needs_operands: bool = False  # updates, and errors of the operands of all three GEMMs


def base_option(options: Sequence[LinearPrecision]) -> int:
    """Index of the option from which differences are taken: fp8 if present, else the first with least FP4."""
    if BASE in options:
        return list(options).index(BASE)
    fp4 = [sum(get_format(getattr(option, gemm)).element_bits <= 4 for gemm in GEMMS) for option in options]
    return fp4.index(min(fp4))


def get_objective(name: str) -> Objective:
    """The objective of that name.  Raises UserError for an unknown one, with the known names."""
    if name not in OBJECTIVES:
        raise UserError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


def quality_loss(objective: str, inputs: ObjectiveInputs) -> tuple[Floats, NDArray[np.bool_]]:
    """Q [L, O] of a named objective, and which linears [L] have statistics that are not finite; their rows are zero.

    Raises UserError for an unknown name, and errors of the objective itself.
    """
    values = get_objective(objective).compute(inputs)
    values = values - values[:, [base_option(inputs.options)]]
    unknown = inputs.stats.not_finite if inputs.stats else ()  # rules ignore statistics
    bad = np.isnan(values.sum(axis=1)) | np.array([shape.name in unknown for shape in inputs.shapes])
    return np.where(bad[:, None], 0.0, values), bad


def _snip(inputs: ObjectiveInputs) -> Floats:
    stats = inputs.measured()
    if not (np.isfinite(stats.loss) and stats.loss > 0):
        raise UserError(f"loss of the probe at iteration {stats.iteration} is {stats.loss}; it must be above 0")
    values = loss_divergence(stats, inputs.options) / stats.loss
    if inputs.update_weight > 0:
        values = values + inputs.update_weight / 2 * weight_divergence(stats, inputs.options)
    return values


def _operand_errors(inputs: ObjectiveInputs, *, relative: bool) -> Floats:
    """[L, O] of the sum over the six operands A of |E_A|_F, or of |E_A|_F / |A|_F."""
    stats = inputs.measured()
    result = np.zeros((len(inputs.shapes), len(inputs.options)))
    for column, option in enumerate(inputs.options):
        for gemm in GEMMS:
            fmt = getattr(option, gemm)
            for role in REDUCTION_DIM[gemm] if get_format(fmt).quantised else ():
                error = stats.column(f"error/{fmt}/{gemm}/{role}")
                size = stats.column(f"norm/{_TENSOR[role]}") if relative else np.ones_like(error)
                result[:, column] += np.sqrt(np.divide(error, size, out=np.zeros_like(error), where=size != 0))
    result[~stats.finite] = np.nan
    return result


def _rule(rank: Callable[[Sequence[LinearShape], int], Floats]) -> Callable[[ObjectiveInputs], Floats]:
    def compute(inputs: ObjectiveInputs) -> Floats:
        in_fprop = [LinearPrecision.uniform(option.fprop) for option in inputs.options]
        lost = efficiency(inputs.shapes, in_fprop, "time")  # share of all FLOPs * bits lost, 0..1 for FP4
        return rank(inputs.shapes, inputs.seed)[:, None] * lost

    return compute


def random_ranks(shapes: Sequence[LinearShape], seed: int) -> Floats:
    """[L] uniform in (0, 1]; depends only on the seed and the name, not on other linears."""
    draws = [np.random.default_rng([seed, zlib.crc32(shape.name.encode())]).random() for shape in shapes]
    return 1.0 - np.array(draws)


def layer_id_ranks(shapes: Sequence[LinearShape], seed: int) -> Floats:
    """[L] distance of the linear's block from the middle of the model: the first and last blocks rank highest.

    Of two blocks at the same distance, the later ranks higher.  Ignores the seed.
    """
    blocks = np.array([shape.block for shape in shapes])
    last = int(blocks.max())
    ranks: Floats = (abs(2 * blocks - last) + np.where(2 * blocks > last, 0.5, 0.0) + 1) / (last + 2)
    return ranks


def layer_type_ranks(shapes: Sequence[LinearShape], seed: int) -> Floats:
    """[L] position of the linear's kind in FIRST_TO_LEAVE; later blocks rank higher in a kind.  Ignores the seed."""
    count = 1 + max(shape.block for shape in shapes)
    if unknown := next((shape.name for shape in shapes if shape.kind not in FIRST_TO_LEAVE), None):
        raise UserError(f"rule layer_type: {unknown} is not a linear of a Llama; choose random or layer_id")
    places = [FIRST_TO_LEAVE.index(shape.kind) + (shape.block + 1) / count for shape in shapes]
    return np.array(places) / len(FIRST_TO_LEAVE)


OBJECTIVES: Mapping[str, Objective] = {
    "snip": Objective(_snip),
    "abs_err": Objective(partial(_operand_errors, relative=False), needs_operands=True),
    "rel_err": Objective(partial(_operand_errors, relative=True), needs_operands=True),
    "random": Objective(_rule(random_ranks), needs_stats=False),
    "layer_id": Objective(_rule(layer_id_ranks), needs_stats=False),
    "layer_type": Objective(_rule(layer_type_ranks), needs_stats=False),
}
