"""Statistics made of the few numbers that a test is about; everything else is 0."""

from __future__ import annotations

from typing import Any

from megatron_snip.snip.linear_probe import OPERANDS
from megatron_snip.snip.stats import LinearStats, ProbeStats


def linear_stats(token: dict[str, float], update: float, own: dict[str, float], **fields: Any) -> LinearStats:
    """``token`` and ``own`` by format; fields replace the zeros."""
    operands = {f"{fmt}/{operand}": 0.0 for fmt in token for operand in OPERANDS}
    rest = {
        "dgrad_error_sq": dict.fromkeys(token, 0.0),
        "dgrad_signal_sq": 1.0,
        "norm_sq": dict.fromkeys(("X", "W", "Y", "G", "dX", "dW"), 1.0),
        "error_sq": {key: token[key.split("/")[0]] + 1e-3 for key in operands},
        "underflow": dict(operands),
        "saturated": dict(operands),
        "noise_update_sq": 0.0,
        "residual_noise_sq": 1.0,
        "sampled_square_sum": dict(token),
        "forward_update_sq": 0.0,
        "fprop_update_sq": dict.fromkeys(token, 0.0),
    }
    return LinearStats(8, 4, token, update, own, **{**rest, **fields})


def probe_stats(iteration: int, loss: float, tokens: int, linears: dict[str, LinearStats]) -> ProbeStats:
    return ProbeStats(iteration, loss, tokens, linears, {"backward_noise": 1.0, "forward_noise": 1.0})
