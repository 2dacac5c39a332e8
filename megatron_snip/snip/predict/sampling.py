"""How well a probe's tokens determine its predictions: standard errors, and the shares of single tokens.

    dL(l, o)        = T/2 * sum_t s_t^2               s_t as in divergence.py
    standard error  = T/2 * sqrt(sum_t s_t^4)         of independent tokens
    top token       = max_t s_t^2 / sum_t s_t^2

The second moment replaces the variance, which it exceeds by dL^2 / T.  A token that is hard for one linear is hard for
others too, so a plan's error is taken as the sum of its linears' errors, which is an upper bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure.statistics import Floats, Statistics
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import by_format, loss_divergence

#: --snip-probe-tokens auto: least and most tokens, and the sufficient error of the plan's cost, as a share of it.
LEAST_TOKENS, MOST_TOKENS, GOOD_ERROR = 8192, 65536, 0.1


def batches_of(snip: SnipConfig, tokens: int) -> int:
    """Number of batches of ``tokens`` each for --snip-probe-tokens; the maximum under auto."""
    wanted = MOST_TOKENS if snip.snip_probe_tokens == "auto" else snip.snip_probe_tokens
    return -(-wanted // tokens)


def standard_error(stats: Statistics, options: Sequence[LinearPrecision]) -> Floats:
    """Standard error [L, O] of ``loss_divergence`` in nats.  Raises UserError if it was not measured."""
    return stats.tokens / 2 * np.sqrt(by_format(stats, "spread", [option.fprop for option in options]))


def top_token(stats: Statistics, options: Sequence[LinearPrecision]) -> Floats:
    """Largest share [L, O] of a loss divergence from one token; 0 for no divergence.  Raises UserError as above."""
    formats = [option.fprop for option in options]
    whole, top = by_format(stats, "token", formats), by_format(stats, "top_token", formats)
    return np.divide(top, whole, out=np.where(np.isnan(whole), np.nan, 0.0), where=whole > 0)


def cost_error(stats: Statistics, options: Sequence[LinearPrecision], request: SolveRequest) -> float | None:
    """Standard error of the plan's loss divergence, as a share of it; None without a plan or a divergence.

    The plan is for the target in total, without constraints per stage.  The result is the same on every rank.
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
    """Whether the plan's cost is known well enough, or there is no cost."""
    error = cost_error(stats, options, request)
    return error is None or error <= GOOD_ERROR
