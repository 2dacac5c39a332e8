"""What errors of q, k and v do to the loss, seen at the attention's output.

    s[t] = <(G_o W_o)_t, A(q + dq, k, v)_t - A(q, k, v)_t>      one number a query token; for k and v alike

A is the attention, G_o W_o the gradient of its output O [T, A D].  At the outputs of q, k and v themselves it would
not do: the softmax bends within errors as large as FP4's and forgets what all keys have in common, and an error of one
key or value is felt by the losses of many queries, which are independent of each other.  Source: docs/numerics.md.
T tokens, A query and G key/value heads of this process, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: By the end of their names: linears whose outputs the attention reads, and the one that reads the attention's output.
READ, READER = ("q_proj", "k_proj", "v_proj"), "o_proj"

#: q [T, A D], k [T, G D] and v [T, G D] of whole sequences -> [T, A D]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Shown:
    """One linear's output [T, N], its error in each format [T, N], and where its token sums go."""

    output: Tensor
    errors: Mapping[str, Tensor]
    token_sums: Mapping[str, list[Tensor]]


class AttentionProbe:
    """Collects one block's gradient and outputs as its linears' backward passes show them, o_proj's first."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        # by the global row of a microbatch's first token
        self._read: dict[int, tuple[Tensor, Tensor]] = {}
        self._shown: dict[int, dict[str, _Shown]] = {}

    def reader(self, row0: int, x: Tensor, grad: Tensor) -> None:
        """What o_proj reads, the attention's output [T, A D], and its gradient G_o W_o [T, A D]."""
        self._read[row0] = x, grad

    def output(
        self,
        row0: int,
        kind: str,
        output: Tensor,
        errors: Mapping[str, Tensor],
        token_sums: Mapping[str, list[Tensor]],
    ) -> None:
        """q_proj's, k_proj's or v_proj's output [T, N] and its errors; with the third, token sums are added."""
        shown = self._shown.setdefault(row0, {})
        shown[kind] = _Shown(output, errors, token_sums)
        if len(shown) < len(READ):
            return
        del self._shown[row0]
        (before, grad), plain = self._read.pop(row0), [shown[kind].output for kind in READ]
        for place, kind in enumerate(READ):
            for fmt, error in shown[kind].errors.items():
                if kind == "v_proj":  # in which the attention is linear: no difference of nearly equal numbers
                    change = self.attend(*_replaced(plain, place, error))
                else:
                    change = self.attend(*_replaced(plain, place, plain[place] + error)).sub_(before)
                # products are rounded to the compute dtype, which a sum over thousands of them does not show
                shown[kind].token_sums[fmt].append(change.mul_(grad).sum(dim=1, dtype=torch.float32))


def _replaced(tensors: Sequence[Tensor], place: int, by: Tensor) -> list[Tensor]:
    return [*tensors[:place], by, *tensors[place + 1 :]]
