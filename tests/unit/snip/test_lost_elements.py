"""Shares of elements that a cast loses at both ends, against counts from the formats' definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_snip.quant import RoundingKey, name_stream
from tests.unit.snip.test_probes import ITERATION, SEED, probed, q, seen

__all__ = ["probed", "seen"]  # fixtures
ROW, COLUMN, SQUARE = (1, 32), (32, 1), (128, 128)


@pytest.fixture(scope="module")
def parts(snip_parts):
    return snip_parts(snip_options="fp8,fp4,mxfp4")


def blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x [R,C] -> [blocks, elements of one block]."""
    rows, columns = block
    return x.detach().unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).movedim(2, 1).reshape(-1, rows * columns)


def in_mxfp4(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Magnitudes in units of their block's power of two, which brings the largest into [4, 8)."""
    size = blocks(x, block).abs()
    return size / torch.exp2(size.amax(dim=1, keepdim=True).log2().floor() - 2)


def share(hits: Tensor, of: Tensor) -> float:
    return int(hits.sum()) / int((of != 0).sum())


@pytest.mark.parametrize(("gemm", "block"), [("fprop", ROW), ("dgrad", COLUMN)])
def test_mxfp4_weights_beyond_the_midpoint_above_6_are_saturated(gemm, block, probed, seen):
    for name, linear in probed[0].linears.items():
        size = in_mxfp4(seen[name][0].w, block)
        expected = share(size >= 7, size)
        assert 0 < expected < 0.2, name
        assert linear.saturated[f"mxfp4/{gemm}/weight"] == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize(("gemm", "block"), [("dgrad", ROW), ("wgrad", COLUMN)])
def test_mxfp4_gradients_saturate_whatever_their_rounding(gemm, block, probed, seen):
    for name, linear in probed[0].linears.items():
        size = torch.cat([in_mxfp4(m.g, block) for m in seen[name]])
        expected = share(size >= 7, size)
        assert 0 < expected < 0.2, name
        assert linear.saturated[f"mxfp4/{gemm}/grad_output"] == pytest.approx(expected, rel=1e-9), name


def test_weights_of_a_quarter_or_less_underflow(probed, seen):
    """Half the least value 0.5 of E2M1 and below; fp4 scales a block by amax / 6."""
    for name, linear in probed[0].linears.items():
        w = seen[name][0].w
        tile = blocks(w, SQUARE).abs()
        expected = share(tile * 6 <= tile.amax(dim=1, keepdim=True) / 4, w)
        assert expected > 0, name
        for gemm in ("fprop", "dgrad"):
            assert linear.underflow[f"fp4/{gemm}/weight"] == pytest.approx(expected, rel=1e-9), name
        for gemm, block in (("fprop", ROW), ("dgrad", COLUMN)):
            expected = share(in_mxfp4(w, block) <= 0.25, w)
            assert expected > 0 and linear.underflow[f"mxfp4/{gemm}/weight"] == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize(("gemm", "dim"), [("dgrad", 1), ("wgrad", 0)])
def test_gradients_that_are_drawn_to_zero_underflow(gemm, dim, probed, seen):
    for name, linear in probed[0].linears.items():
        lost = total = 0
        for m in seen[name]:
            key = RoundingKey(SEED, ITERATION, name_stream(name), row0=m.row0).for_operand(gemm, "grad_output")
            lost += int(((q(m.g, "fp4", "grad_output", dim, key) == 0) & (m.g != 0)).sum())
            total += int((m.g != 0).sum())
        assert lost > 0 and linear.underflow[f"fp4/{gemm}/grad_output"] == pytest.approx(lost / total, abs=1e-5), name
