"""Shares of elements that a cast loses at both ends, against counts from the formats' definitions."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_snip.quant import RoundingKey, fake_quantize, name_stream
from megatron_snip.snip.measure.linear_probe import LinearProbe, Shown

ITERATION, SEED, SAMPLES = 3, 3, 2
ROW, COLUMN = (1, 32), (32, 1)


class Seen(NamedTuple):
    """What a probe saw of one microbatch of one linear: w [N,K], g [T,N], and its first row."""

    w: Tensor
    g: Tensor
    row0: int


@pytest.fixture(scope="module")
def measured(snip_parts) -> dict[str, tuple[dict[str, float], list[Seen]]]:
    """Per linear its statistics by column, and the microbatches that they are of.

    Another pass's gradients differ by rounding, and some, such as q's of a first token, are nothing but rounding.
    """
    parts = snip_parts(snip_options="fp8,fp4,mxfp4_floor")
    shown: dict[str, list[Seen]] = {name: [] for name in parts.linears}
    measure = LinearProbe.measure

    def recorded(self: LinearProbe, operands) -> Shown:
        microbatch = Seen(operands.w.clone(), operands.grad_output.clone(), operands.call.key.row0)
        shown[self.shape.name].append(microbatch)
        return measure(self, operands)

    run_pass = parts.stepper.pass_runner(parts.train_loader.batch((ITERATION - 1) * SAMPLES), ITERATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearProbe, "measure", recorded)
        stats = parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, ITERATION)
    assert all(len(microbatches) == 2 for microbatches in shown.values())
    rows = (dict(zip(stats.columns, row, strict=True)) for row in stats.values.tolist())
    return {name: (row, shown[name]) for name, row in zip(stats.names, rows, strict=True)}


def blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x [R,C] -> [blocks, elements of one block]."""
    rows, columns = block
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).movedim(2, 1).reshape(-1, rows * columns)


def in_mxfp4(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Magnitudes in units of their block's power of two, which brings the largest into [4, 8)."""
    size = blocks(x, block).abs()
    return size / torch.exp2(size.amax(dim=1, keepdim=True).clamp(min=1e-30).log2().floor() - 2)


def share(hits: Tensor, of: Tensor) -> float:
    return int(hits.sum()) / int((of != 0).sum())


@pytest.mark.parametrize(("gemm", "block"), [("fprop", ROW), ("dgrad", COLUMN)])
def test_mxfp4_weights_beyond_the_midpoint_above_6_are_saturated(gemm, block, measured):
    for name, (linear, microbatches) in measured.items():
        size = in_mxfp4(microbatches[0].w, block)
        expected = share(size >= 7, size)
        assert 0 < expected < 0.2, name
        assert linear[f"saturated/mxfp4_floor/{gemm}/weight"] == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize(("gemm", "block"), [("dgrad", ROW), ("wgrad", COLUMN)])
def test_mxfp4_gradients_saturate_whatever_their_rounding(gemm, block, measured):
    for name, (linear, microbatches) in measured.items():
        size = torch.cat([in_mxfp4(m.g, block) for m in microbatches])
        expected = share(size >= 7, size)
        assert 0 < expected < 0.2, name
        assert linear[f"saturated/mxfp4_floor/{gemm}/grad_output"] == pytest.approx(expected, rel=1e-9), name


def test_weights_of_a_quarter_or_less_underflow(measured):
    """Half the least value 0.5 of E2M1 and below; fp4 scales a block by amax / 6."""
    for name, (linear, microbatches) in measured.items():
        w = microbatches[0].w
        tile = blocks(w, (min(128, w.shape[0]), 128)).abs()
        expected = share(tile * 6 <= tile.amax(dim=1, keepdim=True) / 4, w)
        assert expected > 0, name
        for gemm in ("fprop", "dgrad"):
            assert linear[f"underflow/fp4/{gemm}/weight"] == pytest.approx(expected, rel=1e-9), name
        for gemm, block in (("fprop", ROW), ("dgrad", COLUMN)):
            expected = share(in_mxfp4(w, block) <= 0.25, w)
            assert expected > 0 and linear[f"underflow/mxfp4_floor/{gemm}/weight"] == pytest.approx(
                expected, rel=1e-9
            ), name


@pytest.mark.parametrize(("gemm", "dim"), [("dgrad", 1), ("wgrad", 0)])
def test_gradients_that_are_drawn_to_zero_underflow(gemm, dim, measured):
    for name, (linear, microbatches) in measured.items():
        lost = total = 0
        for m in microbatches:
            key = RoundingKey(SEED, ITERATION, name_stream(name), row0=m.row0).for_operand("grad_output")
            lost += int(((fake_quantize(m.g, "fp4", role="grad_output", dim=dim, key=key) == 0) & (m.g != 0)).sum())
            total += int((m.g != 0).sum())
        assert lost > 0 and linear[f"underflow/fp4/{gemm}/grad_output"] == pytest.approx(lost / total, rel=1e-9), name
