"""Formats that fprop casts alike share casts, products and attentions in a probe; their statistics do not change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_snip.formats import format as format_module
from megatron_snip.formats import get_format, register
from megatron_snip.quant import LinearPrecision, LinearShape, Operands, RoundingKey
from megatron_snip.quant.linears.operands import LinearCall
from megatron_snip.snip.measure import linear_probe
from megatron_snip.snip.measure.block_probe import BlockProbe
from megatron_snip.snip.measure.linear_probe import LinearProbe
from megatron_snip.snip.measure.statistics import Statistics
from tests.unit.snip.measure.test_probe import ITERATION, batch_of


@pytest.fixture(scope="module")
def parts(snip_parts):
    return snip_parts()


@pytest.mark.parametrize(
    ("formats", "weights"),
    [
        (("nvfp4_plain", "nvfp4"), 2),
        (("fp8", "fp8_hybrid"), 1),
        (("mxfp4", "mxfp4_tetrajet"), 1),
        (("mxfp8", "mxfp8_dequantized", "mxfp8_e5m2"), None),
    ],
)
@pytest.mark.parametrize("updates", [False, True])
def test_formats_that_fprop_casts_alike_share_casts_and_errors(formats, weights, updates, parts, monkeypatch):
    """Their statistics are those of a probe of each alone, bit for bit."""
    prober, batch = parts.coordinator.probe, batch_of(parts)
    run_pass, casts, attentions = parts.stepper.pass_runner(batch, ITERATION), [], []
    plain, judge = LinearProbe._cast, BlockProbe._behind_attention
    monkeypatch.setattr(LinearProbe, "_cast", lambda *how: casts.append(how[2:]) or plain(*how))
    monkeypatch.setattr(BlockProbe, "_behind_attention", lambda *how: attentions.append(how) or judge(*how))

    def found(*formats: str) -> Statistics:
        casts.clear(), attentions.clear()
        monkeypatch.setattr(prober, "formats", sorted(formats))
        return prober.run(run_pass, parts.optimizer.zero_grad, ITERATION, updates=updates)

    together = found(*formats)
    if weights is not None:
        of = [sum(cast[:2] == ("fprop", role) for cast in casts) for role in ("input", "weight")]
        assert of[1] == weights * of[0] and len(attentions) == weights * 3 * of[0] // 7
    for fmt in formats:
        alone = found(fmt)
        columns = [name for name in alone.columns if fmt in name.split("/")]
        assert f"token/{fmt}" in columns
        for column in columns:
            assert np.array_equal(alone.column(column), together.column(column)), column


def test_groups_of_formats_that_fprop_casts_alike():
    formats = ["fp4", "nvfp4_plain", "mxfp8", "nvfp4", "mxfp8_dequantized", "fp8", "fp8_e5m2"]
    assert linear_probe._casting_alike(formats) == [
        [["fp4"]], [["nvfp4_plain"], ["nvfp4"]], [["mxfp8", "mxfp8_dequantized"]], [["fp8"]], [["fp8_e5m2"]],
    ]  # fmt: skip


@pytest.fixture
def nearest() -> Iterator[str]:
    """NVFP4 that rounds gradients to nearest: fprop casts it like nvfp4_plain."""
    yield register(replace(get_format("nvfp4_plain"), name="nearest", stochastic_roles=frozenset())).name
    del format_module._FORMATS["nearest"]


@pytest.mark.parametrize("cut", [("input", "weight"), ("weight", "grad_output"), ("input",)])
@pytest.mark.parametrize("updates", [False, True])
def test_the_number_of_reductions_over_tp_is_known(updates, cut, nearest, lone_mesh):
    """A rank that fails makes up for those that it skipped."""
    made: list[None] = []
    formats, shape = [nearest, "nvfp4_plain", "nvfp4", "fp8"], LinearShape("up_proj", 32, 96, kind="up")
    probe = LinearProbe(shape, formats, lone_mesh, 0, torch.device("cpu"), updates=updates)
    reduce = dict.fromkeys(cut, lambda amax: made.append(amax) or amax)
    call = LinearCall(LinearPrecision.uniform("bf16"), RoundingKey(1, 2, 3))._replace(reduce_amax=reduce)
    probe.measure(Operands(torch.randn(64, 96), torch.randn(32, 96), torch.randn(64, 32), call))
    assert len(made) == probe.collectives(cut) > 0
