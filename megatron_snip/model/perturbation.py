"""What a probe may change in a forward and backward pass: noise after the last block, or labels of the model's own.

All of it is a function of (seed, iteration, draw, sample), never of generator state: a pass leaves no trace in
training's random numbers, and processes that hold the same activations draw the same noise.
Shapes: B sequences, S tokens, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.parallel.tensor import Region
from megatron_snip.runtime import seed_of

Kind = Literal["backward_noise", "forward_noise", "sampled_labels"]
KINDS: tuple[Kind, ...] = ("backward_noise", "forward_noise", "sampled_labels")


@dataclass(frozen=True)
class Perturbation:
    """One perturbed pass.

    "backward_noise": the loss is <noise, residual stream after the last block>, so the gradient there is the
    noise itself, of standard deviation ``scale``.  "forward_noise": that stream plus noise of ``scale``.
    "sampled_labels": the loss of labels drawn from the model's own distribution.
    draw: which of several draws.  Raises ValueError for an unknown kind.
    """

    kind: Kind
    scale: float = 0.0
    draw: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"perturbation {self.kind!r} is unknown; known: {', '.join(KINDS)}")


@dataclass(frozen=True)
class Draws:
    """The random numbers of one perturbed pass over a microbatch."""

    perturbation: Perturbation
    seed: int
    iteration: int
    sample_index: Tensor  # [B], on the CPU: global numbers of the sequences

    def _each(self, make: Callable[[torch.Generator], Tensor], device: torch.device) -> Tensor:
        """One tensor a sequence, stacked: [B, ...]."""
        p, out = self.perturbation, []
        for sample in self.sample_index.tolist():
            seed = seed_of(self.seed, p.kind, self.iteration, p.draw, sample)
            out.append(make(torch.Generator(device).manual_seed(seed)))
        return torch.stack(out)

    def noise(self, like: Tensor, region: Region) -> Tensor:
        """Gaussian noise for the residual stream `like` [B, S/tp or S, H], the same values on any layout."""
        axis = region.axis
        parts = axis.size if region.sequence_parallel else 1
        shape = (like.shape[1] * parts, like.shape[2])
        whole = self._each(lambda g: torch.randn(shape, generator=g, device=like.device), like.device)
        return self.perturbation.scale * whole.chunk(parts, dim=1)[axis.rank if parts > 1 else 0]

    @torch.no_grad()
    def labels(self, logits: Tensor, region: Region) -> Tensor:
        """Labels [B, S] drawn from softmax(logits [B, S, V/tp]), by the largest of logits plus Gumbel noise."""
        axis, (_, s, v) = region.axis, logits.shape

        def gumbel(generator: torch.Generator) -> Tensor:
            uniform = torch.rand((s, v * axis.size), generator=generator, device=logits.device)
            mine = uniform[:, axis.rank * v : (axis.rank + 1) * v].double()
            return -(-mine.clamp(min=2.0**-25).log()).log()

        best, column = (logits.double() + self._each(gumbel, logits.device)).max(dim=-1)
        column = column + axis.rank * v
        if axis.size > 1:
            top = best.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=axis.group)
            column = torch.where(best == top, column, torch.full_like(column, -1))
            dist.all_reduce(column, op=dist.ReduceOp.MAX, group=axis.group)
        return column
