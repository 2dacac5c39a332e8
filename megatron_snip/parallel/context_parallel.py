"""Context parallelism: each cp rank holds a shard of every sequence's tokens.

A sequence of S tokens is cut into 2 cp pieces.  Rank r holds pieces r and 2 cp - 1 - r in that order, so that all ranks
spend the same time in causal attention.  Everything else works on local tokens.  Attention all-gathers keys and values,
which are small with grouped queries.
Source: Megatron-LM's get_batch_on_this_cp_rank; arXiv 2407.21783, section 3.3.2, which also gathers.
Shapes: B sequences, S tokens, s = S/cp local tokens, A query and G key/value heads, D channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.mesh import Axis
from megatron_snip.quant.casts.rounding import Rows
from megatron_snip.quant.linears.collectives import all_gather, reduce_scatter


def rows_of(seq_length: int, axis: Axis) -> Rows | None:
    """Position of this rank's rows in whole sequences; None without context parallelism."""
    if axis.size == 1:
        return None
    piece = seq_length // (2 * axis.size)
    return Rows(piece, seq_length, axis.rank * piece, (2 * axis.size - 1 - axis.rank) * piece)


def pieces(seq_length: int, axis: Axis) -> list[slice]:
    """Positions of this rank's tokens in a sequence, in their local order."""
    rows = rows_of(seq_length, axis)
    if rows is None:
        return [slice(0, seq_length)]
    return [slice(begin, begin + rows.piece) for begin in (rows.first, rows.second)]


def own_tokens(x: Tensor, axis: Axis) -> Tensor:
    """This rank's shard [..., s] of whole sequences [..., S]."""
    parts = [x[..., piece] for piece in pieces(x.shape[-1], axis)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def gather_sequences(x: Tensor, axis: Axis) -> Tensor:
    """All-gather [B, s, C] of each rank -> [B, S, C] in order; the gradient is reduce-scattered."""
    whole: Tensor = _Gather.apply(x, axis) if axis.size > 1 else x
    return whole


def causal_attention(q: Tensor, k: Tensor, v: Tensor, begin: int, triangle: Any, mask: Tensor | None = None) -> Tensor:
    """Attention of queries [B, A, P, D] at positions from ``begin`` on -> [B, A, P, D]; k, v [B, G, S, D] are whole.

    triangle: from `triangles`, for this piece.  mask [B, 1, S, S]: the keys that each query sees; None: all up to it.
    """
    grouped, end = q.shape[1] != k.shape[1], begin + q.shape[2]
    if mask is not None:
        mask = mask[:, :, begin:end, :end]
    elif begin == 0:  # a causal square needs no mask
        return F.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], is_causal=True, enable_gqa=grouped)
    else:
        mask = triangle
    return F.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], attn_mask=mask, enable_gqa=grouped)


def triangles(pieces: Sequence[slice], device: torch.device) -> list[Any]:
    """Masks of the pieces for `causal_attention`; None where it needs none.

    Computed once, because torch.compile cannot trace it.
    """
    return [lower_right(piece.stop - piece.start, piece.stop, device) if piece.start else None for piece in pieces]


def lower_right(queries: int, keys: int, device: torch.device) -> Any:
    """Causal mask of the last queries over all keys.  Only CPUs, which have no kernel for it, materialise the mask."""
    if device.type == "cpu":
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, which takes a second

    return causal_lower_right(queries, keys)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        parts = x.new_empty((axis.size, *x.shape))
        all_gather(parts.flatten(0, 1), x.contiguous(), group=axis.group)
        pieces = parts.unflatten(2, (2, -1))  # [cp, B, 2, piece, C]
        ordered = torch.cat([pieces[:, :, 0], pieces[:, :, 1].flip(0)])  # [2 cp, B, piece, C]
        return ordered.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        first, second = grads[0].unflatten(1, (2 * axis.size, -1)).transpose(0, 1).chunk(2)
        parts = torch.stack([first, second.flip(0)], dim=2).flatten(2, 3)  # [cp, B, s, C]
        own = parts.new_empty(parts.shape[1:])
        reduce_scatter(own, parts.flatten(0, 1), group=axis.group)
        return own, None
