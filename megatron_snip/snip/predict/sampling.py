"""How well a probe's tokens determine what it predicts: standard errors, and the shares of single tokens.

    dL(l, o)        = T/2 * sum_t s_t^2               s_t as in divergence.py
    standard error  = T/2 * sqrt(sum_t s_t^4)         of independent tokens
    top token       = max_t s_t^2 / sum_t s_t^2

The second moment stands for the variance, which it exceeds by dL^2 / T.  A token that is hard for one linear is hard
for others too, so errors of linears are added up as if they were one: a plan's error is at most their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import by_format, loss_divergence

Floats = NDArray[np.float64]

#: --snip-probe-tokens auto: least and most tokens, and the error of the plan's cost, as a share of it, that will do.
LEAST_TOKENS, MOST_TOKENS, GOOD_ERROR = 8192, 65536, 0.1


def batches_of(snip: SnipConfig, tokens: int) -> int:
    """Batches of so many tokens that have --snip-probe-tokens; under auto, as many as it may come to."""
    wanted = MOST_TOKENS if snip.snip_probe_tokens == "auto" else snip.snip_probe_tokens
    return -(-wanted // tokens)


def standard_error(stats: Statistics, options: Sequence[LinearPrecision]) -> Floats:
    """Standard error [L, O] of ``loss_divergence`` in nats.  UserError if it was not measured."""
    return stats.tokens / 2 * np.sqrt(by_format(stats, "spread", [option.fprop for option in options]))


def top_token(stats: Statistics, options: Sequence[LinearPrecision]) -> Floats:
    """Share [L, O] of a loss divergence that comes from one token; 0 where nothing is lost.  UserError as above."""
    formats = [option.fprop for option in options]
    whole, top = by_format(stats, "token", formats), by_format(stats, "top_token", formats)
    return np.divide(top, whole, out=np.where(np.isnan(whole), np.nan, 0.0), where=whole > 0)


def cost_error(stats: Statistics, options: Sequence[LinearPrecision], request: SolveRequest) -> float | None:
    """Standard error of the plan's loss divergence, as a share of it; None where there is no plan or no divergence.

    The plan is one for the target, whatever the stages, the same on every rank.
    """
    try:
        whole = dataclasses.replace(request, stage=None, time=None)
        choice = whole.solve().choice
    except UserError:
        return None
    rows = np.arange(len(choice))
    cost = float(np.nansum(loss_divergence(stats, options)[rows, choice]))
    return float(np.nansum(standard_error(stats, options)[rows, choice])) / cost if cost > 0 else None


def suffices(stats: Statistics, options: Sequence[LinearPrecision], request: SolveRequest) -> bool:
    """Whether the plan's cost is known well enough, or nothing is to be known."""
    error = cost_error(stats, options, request)
    return error is None or error <= GOOD_ERROR
