"""What the probe passes measured: one LinearStats per linear, and their JSON file.

Source: docs/numerics.md, "Loss divergence" and "Weight divergence".  T is the tokens of the whole global batch and
G = dL/dY contains 1/T.  All values are sums over the batch, the data-parallel ranks and the tensor shards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.snip.jsonfile import (
    JsonFileError,
    check_fields,
    check_version,
    is_count,
    is_number,
    is_numbers,
    is_object,
    read_json,
    write_atomic,
)

VERSION = 1
_FIELDS = {
    "version": is_count,
    "iteration": is_count,
    "loss": is_number,
    "tokens": is_count,
    "linears": is_object,
}


@dataclass(frozen=True)
class LinearStats:
    """One linear, by format name.

    token_square_sum[f] = sum_t (sum_n G[t,n] dY_f[t,n])^2 with dY_f = Q_f(X) Q_f(W)^T - X W^T, nats^2;
    update_norm_sq = |u(g)|_F^2, the optimiser's update without noise;
    own_sq[f] = |u(g + E_w) - u(g)|_F^2 with E_w = Q_f(G)^T Q_f(X) - G^T X, wgrad's own error.
    Formats that change nothing (bf16) have no entry.
    """

    token_square_sum: dict[str, float]
    update_norm_sq: float
    own_sq: dict[str, float]


@dataclass(frozen=True)
class ProbeStats:
    """Statistics of all linears from the probe before ``iteration``: loss in nats, tokens = T."""

    iteration: int
    loss: float
    tokens: int
    linears: dict[str, LinearStats]

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
            check_fields(values, _FIELDS, "")
            linears = {name: _linear(name, entry) for name, entry in values["linears"].items()}
        except JsonFileError as error:
            raise ValueError(f"{path}: {error}; collect the statistics anew") from None
        return cls(values["iteration"], float(values["loss"]), values["tokens"], linears)


def _linear(name: str, entry: Any) -> LinearStats:
    where = f"linears[{name!r}]"
    checks = {"token_square_sum": is_numbers, "update_norm_sq": is_number, "own_sq": is_numbers}
    check_fields(entry, checks, f"{where}.")
    return LinearStats(
        {fmt: float(v) for fmt, v in entry["token_square_sum"].items()},
        float(entry["update_norm_sq"]),
        {fmt: float(v) for fmt, v in entry["own_sq"].items()},
    )
