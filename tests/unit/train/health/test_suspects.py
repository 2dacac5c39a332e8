"""Whom two different results point to."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.train.health.rerun import Found, LocalResult, bits_sum, suspects, told

NAMES = [(0, "embed"), (0, "q"), (1, "q"), (1, "head")]


def result(share: bytes = b"0", sums=(1, 2), pp: int = 0, square: bytes = b"s") -> LocalResult:
    names = [one for one in NAMES if one[0] == pp]
    return LocalResult(share, square, tuple((*name, value) for name, value in zip(names, sums, strict=True)))


def found(**second) -> dict[tuple[int, int, int], Found]:
    """pp2 x dp2 x tp2, all equal but for `second` of places p<pp><dp><tp>."""
    out = {}
    for pp in (0, 1):
        for dp in (0, 1):
            for tp in (0, 1):
                other = second.get(f"p{pp}{dp}{tp}", {})
                out[pp, dp, tp] = Found("h", pp, dp, tp, result(pp=pp), result(pp=pp, **other), (0.0, 0, 0))
    return out


@pytest.mark.parametrize(
    ("second", "places", "what"),
    [
        ({}, [], ""),
        ({"p110": {"share": b"1"}}, [(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)], "the loss"),
        # the nearest to the loss, of whichever replica
        ({"p001": {"sums": (9, 9)}, "p000": {"sums": (9, 2)}}, [(0, 0, 1), (0, 1, 1)], "the gradient of q"),
        ({"p001": {"sums": (9, 9)}, "p100": {"sums": (9, 2)}}, [(1, 0, 0), (1, 1, 0)], "the gradient of q"),
        ({"p101": {"square": b"t"}}, [(1, 0, 1)], "the gradient norm"),
    ],
)
def test_suspects(second, places, what):
    everyone = found(**second)
    order = list(everyone)
    assert suspects(list(everyone.values())) == ([order.index(place) for place in places], what)


def test_a_tied_embedding_points_to_both_its_stages():
    """And to one of them where another gradient of it differs too, which is nearer to the loss."""

    def of(pp: int, embedding: int, block: int) -> Found:
        first, second = (
            LocalResult(b"0", b"s", ((0, "embed", one), (pp, "q", other)))
            for one, other in ((1, 2), (embedding, block))
        )
        return Found("h", pp, 0, 0, first, second, (0.0, 0, 0))

    assert suspects([of(0, 9, 2), of(1, 9, 2)]) == ([0, 1], "the gradient of embed")
    assert suspects([of(0, 9, 9), of(1, 9, 2)]) == ([0], "the gradient of q")
    assert suspects([of(0, 9, 9), of(1, 9, 9)]) == ([1], "the gradient of q")


def test_they_are_told_with_their_hosts():
    everyone = list(found().values())
    assert (
        told([3], everyone) == "rank 3 (host h)" and told([0, 1], everyone) == "one of rank 0 (host h), rank 1 (host h)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_bit_shows_in_the_sum_and_nan_equals_itself(dtype):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1, 1] = float("nan")
    assert bits_sum(x) == bits_sum(x.clone()) == bits_sum(x.t().contiguous())
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}[dtype]
    for place in (0, 8, 34):
        y = x.clone()
        y.view(whole).view(-1)[place] ^= 1
        assert bits_sum(y) != bits_sum(x)
