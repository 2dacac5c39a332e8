"""The check of casts before training: silent where kernels are right, one error that names what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_snip.config import Config
from megatron_snip.formats import format_names, get_format
from megatron_snip.quant import LinearPrecision
from megatron_snip.quant.kernels import op
from megatron_snip.quant.linears import linear
from megatron_snip.quant.linears.by_gemm import ByGemm
from megatron_snip.quant.linears.emulated import Emulated
from megatron_snip.quant.linears.scaled_mm import Hopper
from megatron_snip.train import loop
from megatron_snip.train.check_casts import check_casts, check_casts_of

CPU = torch.device("cpu")
PRECISIONS = [LinearPrecision.uniform(name) for name in format_names() if get_format(name).quantised]


def test_right_kernels_are_logged_once(caplog):
    with caplog.at_level("INFO", "megatron_snip"):
        check_casts([*PRECISIONS, LinearPrecision.parse("bf16")], "auto", CPU)
    (line,) = caplog.messages
    assert "casts of fp4, " in line and ", fp8, " in line and "mxfp8, " in line and "bf16" not in line


def test_every_form_of_a_linear_on_hopper_is_cast(monkeypatch):
    monkeypatch.setattr(Hopper, "unfit_device", lambda self, device: None)
    monkeypatch.setitem(linear.LINEAR_IMPLS, "built_in", ByGemm(Hopper(), Emulated()))
    seen, run = [], op.run
    monkeypatch.setattr(op, "run", lambda x, forms, *how: seen.append((forms, x.dtype, how[3])) or run(x, forms, *how))
    check_casts([LinearPrecision.uniform("fp8"), LinearPrecision.parse("fp8/fp4/fp8")], "built_in", CPU)
    told = [
        (" ".join(f"{form.fmt.name}{form.dim}" for form in forms), forms[0].role, dtype, up is not None)
        for forms, dtype, up in seen
    ]
    assert ("fp81 fp80", "weight", torch.float32, False) in told  # the pair that a compiler once got wrong
    assert ("fp81 fp80", "input", torch.bfloat16, False) in told
    assert ("fp81 fp80", "input", torch.bfloat16, True) in told
    assert ("fp41 fp80", "grad_output", torch.bfloat16, False) in told
    assert {form.output for forms, *_ in seen for form in forms} == {"operand"} and len(told) == len(set(told)) == 6


@pytest.mark.parametrize(("part", "what"), [("data", "codes"), ("scales", "scales")])
def test_wrong_bits_end_the_run_before_it_begins_and_a_few_warn(part, what, monkeypatch, caplog):
    def wrong(x, forms, *how):
        made = run(x, forms, *how)
        if forms[-1].role == "weight" and forms[-1].output == "codes":
            getattr(made[-1], part).view(torch.uint8)[:rows, 1] ^= 1
        return made

    run, rows = op.run, 16
    monkeypatch.setattr(op, "run", wrong)
    parts = SimpleNamespace(
        linears={"one": SimpleNamespace(precision=LinearPrecision.parse("mxfp8"))}, coordinator=None, final=None
    )
    if part == "data":  # 16 of 512 * 512
        with caplog.at_level("WARNING", "megatron_snip"):
            check_casts_of(parts, "auto", CPU)
        assert f"differ from the specification in 0.0% of the {what} of the weight in mxfp8" in caplog.text
        rows = 512
    with pytest.raises(
        ValueError, match=rf"differ .* in 0\.\d% of the {what} of the weight in mxfp8; .* another version"
    ):
        check_casts_of(parts, "auto", CPU)


def test_formats_of_many_precisions_are_checked_one_by_one(caplog):
    options = [LinearPrecision.parse(words) for words in ("fp8/fp4/bf16", "bf16/mxfp8/fp4", "fp8")]
    parts = SimpleNamespace(
        linears={"one": SimpleNamespace(precision=LinearPrecision.parse("bf16/bf16/mxfp4"))},
        coordinator=SimpleNamespace(options=options),
        final=SimpleNamespace(of=lambda precision: LinearPrecision.parse("nvfp4/bf16/bf16")),
    )
    with caplog.at_level("INFO", "megatron_snip"):
        check_casts_of(parts, "auto", CPU)
    assert "casts of fp4, fp8, mxfp4, mxfp8, nvfp4 checked" in caplog.text


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_run_on_a_gpu_begins_with_it(kind, monkeypatch):
    class Reached(Exception):
        """Instead of what comes next."""

    def reached(*given):
        raise Reached(*given)

    config, device = Config(), torch.device(kind)
    pipeline = SimpleNamespace(device=device)
    parts = SimpleNamespace(stepper=SimpleNamespace(pipeline=pipeline))
    run = SimpleNamespace(config=config, parts=parts, iteration=0, _warn_about_unreachable=lambda: None)
    monkeypatch.setattr(loop, "check_casts_of", reached)
    monkeypatch.setattr(loop, "preflight", reached)
    with pytest.raises(Reached) as info:
        loop.Trainer.run(run)
    assert info.value.args == ((parts, "auto", device) if kind == "cuda" else (config, parts))
