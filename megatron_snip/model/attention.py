"""Causal grouped-query attention with rotary positions.  Source: arXiv 2305.13245, 2104.09864.

Shapes: B sequences, S tokens, H hidden, A query heads, G key/value heads, D channels per head.  Under tp, the local A
and G are a tp-th of the whole.  Under context parallelism, S is this rank's cp-th of a sequence, but keys and values
are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_snip.model.build import Build
from megatron_snip.model.recompute import run_again
from megatron_snip.model.rotary import rotate
from megatron_snip.parallel.context_parallel import causal_attention, gather_sequences, pieces, triangles
from megatron_snip.parallel.tensor import linears_of_one_input
from megatron_snip.quant import StepContext
from megatron_snip.quant.linears.matmul import float32_is_faster

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        m = build.model
        self.region, self.head_dim, self.recompute = build.region, m.head_dim, build.recompute.of_part("core_attn")
        self.cp, self.pieces = build.mesh.cp, pieces(m.seq_length, build.mesh.cp)
        self.triangles = triangles(self.pieces, build.device)
        # computed here, because torch.compile cannot trace it
        self.in_float32 = float32_is_faster(torch.empty(0, dtype=build.dtype, device=build.device))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            build.linear(f"{prefix}.{name}") for name in ATTENTION_LINEARS
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, context: StepContext | Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        q, k, v = linears_of_one_input([self.q_proj, self.k_proj, self.v_proj], x, context)
        if self.cp.size > 1:  # k and v in one all-gather
            k, v = gather_sequences(torch.cat([k, v], dim=-1), self.cp).chunk(2, dim=-1)
        if self.recompute:
            y = run_again(self.attend, q, k, v, cos, sin, mask, region=self.region)
        else:
            y = self.attend(q, k, v, cos, sin, mask)
        out: Tensor = self.o_proj(y, context)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, S, A D] -> [B, S, A D], with whole sequences of k and v [B, cp S, G D], cos and sin [cp S, D].

        mask [B, 1, S, S]: the keys that each query sees; None: all up to the query.
        """
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        q, k = self.queries_and_keys(q, k)
        k, dtype = rotate(k, cos, sin), q.dtype
        # backward of one chunk would copy its gradient
        chunks = [q] if len(self.pieces) == 1 else q.chunk(len(self.pieces), dim=2)
        parts = [
            rotate(part, cos[..., piece, :], sin[..., piece, :])
            for part, piece in zip(chunks, self.pieces, strict=True)
        ]
        if self.in_float32:
            k, v, parts = k.float(), v.float(), [part.float() for part in parts]
        ys = [
            causal_attention(part, k, v, piece.start, triangle, mask)
            for part, piece, triangle in zip(parts, self.pieces, self.triangles, strict=True)
        ]
        return (ys[0] if len(ys) == 1 else torch.cat(ys, dim=2)).transpose(1, 2).flatten(2).to(dtype)

    def queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, A, S, D] and k [B, G, S, D] before rotation; subclasses may transform them."""
        return q, k
