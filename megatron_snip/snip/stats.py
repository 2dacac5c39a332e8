"""What the probe passes measured: one LinearStats per linear, and their JSON file.

Source: docs/numerics.md, "Loss divergence" and "Weight divergence".  T is the tokens of the whole global batch and
G = dL/dY contains 1/T.  All values are sums over the batch, the data-parallel ranks and the tensor shards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.snip.jsonfile import (
    JsonFileError,
    check_fields,
    check_version,
    is_count,
    is_number,
    is_number_or_null,
    is_numbers,
    is_numbers_or_null,
    is_object,
    read_json,
    write_atomic,
)

VERSION = 3
_FIELDS = {
    "version": is_count,
    "iteration": is_count,
    "loss": is_number,
    "tokens": is_count,
    "linears": is_object,
}


@dataclass(frozen=True)
class LinearStats:
    """One linear of the whole model, weight [out_features, in_features].

    Dicts are by format name f, or by "f/gemm/role" for a quantised operand A of a GEMM.

    token_square_sum[f] = sum_t (sum_n G[t,n] dY_f[t,n])^2 with dY_f = Q_f(X) Q_f(W)^T - X W^T, nats^2; of q, k, v with
    the attention's output, its gradient and what dY_f does to it;
    update_norm_sq = |u(g)|_F^2, the optimiser's update without noise;
    own_sq[f] = |u(g + E_w) - u(g)|_F^2 with E_w = Q_f(G)^T Q_f(X) - G^T X, wgrad's own error;
    dgrad_error_sq[f] = |E_d|_F^2 with E_d = Q_f(G) Q_f(W) - G W, dgrad_signal_sq = |G W|_F^2, both in the residual
    stream's size where the input comes from a norm;
    norm_sq = |A|_F^2 of X, W, Y, G, dX, dW; error_sq = |Q_f(A) - A|_F^2 of the operands; underflow and saturated =
    shares of an operand's nonzero elements that became 0 or were beyond the largest value.
    From passes that not every objective asks for, else empty or None:
    noise_update_sq = |u(g + D) - u(g)|_F^2, D the gradient of backward noise, and residual_noise_sq = |D|_F^2 in the
    residual stream before the norm that the linear's block half reads;
    sampled_square_sum[f]: as token_square_sum, with G from labels that the model drew itself;
    forward_update_sq: as noise_update_sq, for noise after the last block in forward;
    fprop_update_sq[f] = |u(g_f) - u(g)|_F^2, g_f the gradient with the fprop of every linear that is finite in f; one f
    is measured.
    Formats that change nothing (bf16) have no entry.
    """

    out_features: int
    in_features: int
    token_square_sum: dict[str, float]
    update_norm_sq: float
    own_sq: dict[str, float]
    dgrad_error_sq: dict[str, float]
    dgrad_signal_sq: float
    norm_sq: dict[str, float]
    error_sq: dict[str, float]
    underflow: dict[str, float]
    saturated: dict[str, float]
    noise_update_sq: float | None = None
    residual_noise_sq: float | None = None
    sampled_square_sum: dict[str, float] | None = None
    forward_update_sq: float | None = None
    fprop_update_sq: dict[str, float] | None = None

    @property
    def is_finite(self) -> bool:
        """Whether every number is, but for fprop_update_sq, which other linears' errors are in."""
        own = {key: value for key, value in vars(self).items() if key != "fprop_update_sq"}
        return all(math.isfinite(value) for value in _numbers(own))


def _numbers(values: Mapping[str, Any]) -> list[float]:
    out: list[float] = []
    for value in values.values():
        if isinstance(value, dict):
            out += value.values()
        elif value is not None:
            out.append(value)
    return out


@dataclass(frozen=True)
class ProbeStats:
    """Statistics of all linears from the probe before ``iteration``: loss in nats, tokens = T.

    noise_sq: by pass ("backward_noise", "forward_noise"), the squared norm of the noise that it put after the last
    block.
    """

    iteration: int
    loss: float
    tokens: int
    linears: dict[str, LinearStats]
    noise_sq: dict[str, float]

    def has(self, what: str) -> bool:
        """Whether the pass "backward_noise", "forward_noise" or "quantised_fprop" was made."""
        made = any(linear.fprop_update_sq is not None for linear in self.linears.values())
        return made if what == "quantised_fprop" else what in self.noise_sq

    def save(self, path: str | Path) -> None:
        """Write JSON, whole or not at all.  NaN and Infinity are kept: they are findings."""
        linears = {name: vars(stats) for name, stats in self.linears.items()}
        write_atomic(path, json.dumps({"version": VERSION, **vars(self), "linears": linears}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ProbeStats:
        """Read ``save``'s file.  Raises ValueError naming the file and the field for anything else."""
        values = read_json(path, "statistics", "collect them anew")
        try:
            check_version(values, VERSION)
            check_fields(values, {**_FIELDS, "noise_sq": is_numbers}, "")
            linears = {name: _linear(name, entry) for name, entry in values["linears"].items()}
        except JsonFileError as error:
            raise ValueError(f"{path}: {error}; collect the statistics anew") from None
        return cls(values["iteration"], float(values["loss"]), values["tokens"], linears, _floats(values["noise_sq"]))


_NUMBERS = ("token_square_sum", "own_sq", "dgrad_error_sq", "norm_sq", "error_sq", "underflow", "saturated")
_NUMBER = ("update_norm_sq", "dgrad_signal_sq")
_OPTIONAL = {
    "noise_update_sq": is_number_or_null,
    "residual_noise_sq": is_number_or_null,
    "sampled_square_sum": is_numbers_or_null,
    "forward_update_sq": is_number_or_null,
    "fprop_update_sq": is_numbers_or_null,
}
_COUNTS = ("out_features", "in_features")


def _linear(name: str, entry: Any) -> LinearStats:
    checks = {**dict.fromkeys(_COUNTS, is_count)}
    checks |= {**dict.fromkeys(_NUMBERS, is_numbers), **dict.fromkeys(_NUMBER, is_number), **_OPTIONAL}
    check_fields(entry, checks, f"linears[{name!r}].")
    counts = {field: entry[field] for field in _COUNTS}
    return LinearStats(**counts, **{field: _floats(entry[field]) for field in checks if field not in counts})


def _floats(value: Any) -> Any:
    """Numbers as floats, whatever JSON made of them."""
    if isinstance(value, dict):
        return {key: float(v) for key, v in value.items()}
    return None if value is None else float(value)
