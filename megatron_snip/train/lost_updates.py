"""How much of AdamW's update reaches the weights (--log-edq-interval): optim/edq and optim/lost in metrics.

    u     the update that AdamW wants, from its moments after the step; of BF16 weights, the BF16 number u of step.py
    d     what the weights changed by, low parts included
    edq   <d, u> / |u|^2: 1 if nothing is lost        Collage's effective descent quality <d, u> / |u|, relative to |u|
    lost  share of the elements with u != 0 that did not move

Each is over all weights, over each block and over each kind of parameter.
Source: Collage, arXiv 2405.03637, which measures d of the sum; its released code measures the high part alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_snip.mesh import Mesh
from megatron_snip.parallel.data import is_copy
from megatron_snip.parallel.tags import Tags
from megatron_snip.quant.adamw.step import Scalars, update

#: Elements that are measured at once.
_CHUNK = 1 << 22


class LostUpdates:
    """The sums of one step.  Every rank makes one, adds all its parameters, and calls `metrics`."""

    def __init__(self, tags: dict[str, Tags], mesh: Mesh) -> None:
        self.tags, self.mesh = tags, mesh
        self._sums: dict[str, Tensor] = {}  # by parameter: <d, u>, |u|^2, elements that did not move, those with u != 0

    def add(self, name: str, before: list[Tensor], after: list[Tensor], m: Tensor, v: Tensor, s: Scalars) -> None:
        """Count a parameter's local shard [...], or nothing if another rank counts the same one.

        before, after: the weight and, if there is one, its low part.  m, v: after the step.
        """
        tags, mesh = self.tags[name], self.mesh
        counts = mesh.replicate.is_first and (mesh.tp.is_first or not tags.replicated) and not is_copy(tags, mesh)
        if counts and before[0].numel():
            flat = [one.reshape(-1) for one in (*before, *after, m, v)]
            self._sums[name] = sum(_sums(part, s) for part in zip(*(one.split(_CHUNK) for one in flat), strict=True))  # type: ignore[assignment]

    def metrics(self) -> dict[str, float]:
        """optim/edq and optim/lost of all ranks' weights.  Every rank must call it."""
        mine = {name: found.tolist() for name, found in self._sums.items()}
        totals: dict[str, list[float]] = {}
        for name, found in ((name, found) for one in self.mesh.gathered(mine) for name, found in sorted(one.items())):
            for group in ("", *(f"/{group}" for group in groups(name))):
                totals[group] = [a + b for a, b in zip(totals.get(group, [0.0] * 4), found, strict=True)]
        rows: dict[str, float] = {}
        for group, (product, square, still, wanted) in sorted(totals.items()):
            if wanted:
                rows |= {f"optim/edq{group}": product / square, f"optim/lost{group}": still / wanted}
        return rows


def groups(name: str) -> Iterator[str]:
    """The block and the kind of a parameter: block_03 and up_proj of layers.3.mlp.up_proj.weight."""
    if (block := re.match(r"layers\.(\d+)\.", name)) is not None:
        yield f"block_{int(block[1]):02d}"
    yield name.split(".")[-2]


def _sums(part: tuple[Tensor, ...], s: Scalars) -> Tensor:
    """The four sums of a chunk, float64 [4]: of the weight's parts before and after, m and v."""
    *weights, m, v = (one.float() for one in part)
    before, after = weights[: len(weights) // 2], weights[len(weights) // 2 :]
    u = update(before[0], m, v, s, rounds=part[0].dtype is torch.bfloat16)
    d = sum((b - a for a, b in zip(before, after, strict=True)), torch.zeros_like(u))
    wanted = u != 0
    u, d = u.double(), d.double()
    return torch.stack([(d * u).sum(), (u * u).sum(), (wanted & (d == 0)).sum(), wanted.sum()])
