"""Errors of q, k and v at the attention's output, against their definition in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.mesh import Axis
from megatron_snip.quant import LinearCall, LinearPrecision, LinearShape, Operands, RoundingKey
from megatron_snip.snip.measure.block_probe import BlockProbe, Failure
from megatron_snip.snip.measure.linear_probe import Shown, Sums
from tests.unit.snip.measure.test_probe import FORMATS, SEQUENCE, parts, probed, q, seen

__all__ = ["parts", "probed", "seen"]  # fixtures
HEAD_DIM = 64
READ = ("q", "k", "v")


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
                x, w, *_ = seen[f"{block}.{kind}_proj"][microbatch]
                assert len(x) == SEQUENCE
                plain.append(x.double() @ w.detach().double().T)
                changed.append(q(x, fmt, "input", 1) @ q(w, fmt, "weight", 1).T)
            before = attention(*plain)
            for i, kind in enumerate(READ):
                after = attention(*plain[:i], changed[i], *plain[i + 1 :])
                expected[kind] += float(((after - before) * grad).sum(dim=1).square().sum())
        for kind in READ:
            found = probed[0].column(f"token/{fmt}")[probed[0].names.index(f"{block}.{kind}_proj")]
            assert found > 0 and found == pytest.approx(expected[kind], rel=1e-2), (block, kind)


class Made:
    """A LinearProbe that shows what it is told to, by the microbatch's first row."""

    formats, device = ["fp4"], torch.device("cpu")

    def __init__(self, kind: str) -> None:
        self.shape, self.sums, self.shows = LinearShape(kind, 16, 16, kind=kind), Sums(), {}
        self.weight_error = {"fp4": torch.zeros(1)}

    def measure(self, operands: Operands) -> Shown:
        return self.shows[operands.call.key.row0]

    def collectives(self, cut) -> int:
        return 0


def attend(query: Tensor, key: Tensor, value: Tensor, row0: int = 0) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def made_block(row0s: list[int], errors: dict[str, Tensor]) -> tuple[BlockProbe, dict[str, Made]]:
    """A block of q, k, v, o and up, with operands drawn for each microbatch; errors [8, 16] of q, k and v."""
    generator = torch.Generator().manual_seed(0)
    probes = {kind: Made(kind) for kind in (*READ, "o", "up")}
    for row0 in row0s:
        tensors = torch.randn(4, 8, 16, generator=generator)
        for kind, output in zip(READ, tensors, strict=False):
            probes[kind].shows[row0] = Shown({}, output, {"fp4": errors[kind]})
        sums = {"fp4": torch.randn(8, generator=generator)}
        probes["o"].shows[row0] = Shown(sums, read=attend(*tensors[:3]), read_grad=tensors[3])
        probes["up"].shows[row0] = Shown({"fp4": torch.full((8,), float(row0 + 1))})
    return BlockProbe(probes, attend, Axis(1, 0, None), Failure()), probes


def see(block: BlockProbe, kind: str, row0: int) -> None:
    x = torch.zeros(8, 16)
    call = LinearCall(LinearPrecision.uniform("bf16"), RoundingKey(1, 1, 0, row0=row0))
    block.see(kind, Operands(x, x, x, call))


def sums_of(probes: dict[str, Made]) -> dict[str, float]:
    return {kind: float(probe.sums.read(["token/fp4"])) for kind, probe in probes.items()}


def test_what_all_keys_have_in_common_does_nothing():
    """As attention without positions has it; a common error of queries or values does something."""
    common = torch.randn(1, 16, generator=torch.Generator().manual_seed(1)).expand(8, 16)
    block, probes = made_block([0], dict.fromkeys(READ, common))
    for kind in ("up", "o", "v", "k", "q"):
        see(block, kind, 0)
    sizes = sums_of(probes)
    assert sizes["k"] < 1e-9 and min(sizes["q"], sizes["v"]) > 1e-3


def test_order_and_microbatches_in_flight_do_not_matter():
    errors = {kind: torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i, kind in enumerate(READ)}
    found = []
    for order in (("up", "o", "q", "k", "v"), ("o", "v", "k", "q", "up")):
        block, probes = made_block([0, 8, 16], errors)
        for kind in order:
            for row0 in (0, 8, 16):  # all of them begun before the first one is done
                see(block, kind, row0)
        found.append(sums_of(probes))
    assert found[0] == pytest.approx(found[1], rel=1e-6) and found[0]["q"] > 0
    assert found[0]["up"] == 8 * (1**2 + 9**2 + 17**2)
    apart = []
    for row0 in (0, 8, 16):
        block, probes = made_block([0, 8, 16], errors)
        for kind in ("up", "o", "q", "k", "v"):
            see(block, kind, row0)
        apart.append(sums_of(probes)["q"])
    assert sum(apart) == pytest.approx(found[0]["q"], rel=1e-6) and len(set(apart)) == 3


def test_a_failure_is_noted_once_and_frees_what_was_measured():
    errors = {kind: torch.ones(8, 16) for kind in READ}
    block, probes = made_block([0], errors)
    block.failure.probes = list(probes.values())
    del probes["o"].shows[0]
    for kind in ("up", "o", "q", "k", "v"):
        see(block, kind, 0)
    assert block.failure.text == "KeyError: 0" and not any(probe.weight_error for probe in probes.values())
    assert sums_of(probes) == dict.fromkeys(probes, 0.0)
    block.failure.note(RuntimeError("another"))
    assert block.failure.text == "KeyError: 0"
