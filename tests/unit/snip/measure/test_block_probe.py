"""Errors of q, k and v at the attention's output, against their definition in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.snip.attention_probe import READ, AttentionProbe
from tests.unit.snip.test_probes import FORMATS, SEQUENCE, parts, probed, q, seen

__all__ = ["parts", "probed", "seen"]  # fixtures
HEAD_DIM = 64


def turned(x: Tensor) -> Tensor:
    """RoPE of x [T, heads * D], one sequence, pair (i, i + D/2) by the angle t * 10000^(-2i/D)."""
    x = x.unflatten(1, (-1, HEAD_DIM))
    first, second = x.chunk(2, dim=2)
    angle = torch.outer(torch.arange(len(x)).double(), 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2).flatten(1)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one sequence with one head of keys: [T, A D], [T, D], [T, D] -> [T, A D]."""
    out = []
    for head in turned(query).split(HEAD_DIM, dim=1):
        scores = head @ turned(key).T / HEAD_DIM**0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        out.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=1) @ value)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("fmt", FORMATS)
def test_token_square_sum_is_its_definition(fmt, probed, seen):
    for block in ("layers.0.self_attn", "layers.1.self_attn"):
        expected = dict.fromkeys(READ, 0.0)
        for microbatch, reader in enumerate(seen[f"{block}.o_proj"]):
            grad = reader.g.double() @ reader.w.detach().double()
            plain, changed = [], []
            for kind in READ:
                x, w, *_ = seen[f"{block}.{kind}"][microbatch]
                assert len(x) == SEQUENCE
                plain.append(x.double() @ w.detach().double().T)
                changed.append(q(x, fmt, "input", 1) @ q(w, fmt, "weight", 1).T)
            before = attention(*plain)
            for i, kind in enumerate(READ):
                after = attention(*plain[:i], changed[i], *plain[i + 1 :])
                expected[kind] += float(((after - before) * grad).sum(dim=1).square().sum())
        for kind in READ:
            found = probed[0].linears[f"{block}.{kind}"].token_square_sum[fmt]
            assert found > 0 and found == pytest.approx(expected[kind], rel=1e-2), (block, kind)


def shown(attend, row0s: list[int], errors: dict[str, Tensor], order=READ) -> dict[str, list[Tensor]]:
    """Token sums of some microbatches, all of them begun before the first one is done."""
    generator = torch.Generator().manual_seed(0)
    probe, sums = AttentionProbe(attend), {kind: {"fp4": []} for kind in READ}
    tensors = {row0: torch.randn(4, 8, 16, generator=generator) for row0 in row0s}
    for row0 in row0s:
        probe.reader(row0, attend(*tensors[row0][:3]), tensors[row0][3])
    for kind in order:
        for row0 in row0s:
            output = tensors[row0][READ.index(kind)]
            probe.output(row0, kind, output, {"fp4": errors[kind]}, sums[kind])
    return {kind: found["fp4"] for kind, found in sums.items()}


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_what_all_keys_have_in_common_does_nothing():
    """As attention without positions has it; a common error of queries or values does something."""
    common = torch.randn(1, 16, generator=torch.Generator().manual_seed(1)).expand(8, 16)
    found = shown(attend, [0], dict.fromkeys(READ, common))
    sizes = {kind: float(sums[0].abs().max()) for kind, sums in found.items()}
    assert sizes["k_proj"] < 1e-5 and min(sizes["q_proj"], sizes["v_proj"]) > 1e-2


def test_order_and_microbatches_in_flight_do_not_matter():
    errors = {kind: torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i, kind in enumerate(READ)}
    one, other = shown(attend, [0, 8, 16], errors), shown(attend, [0, 8, 16], errors, order=READ[::-1])
    for kind in READ:
        assert len(one[kind]) == 3
        for a, b in zip(one[kind], other[kind], strict=True):
            torch.testing.assert_close(a, b)
    assert not torch.allclose(one["q_proj"][0], one["q_proj"][1])
