"""Runs without a float32 master: they go on bit for bit, and --optimizer-precision may change between runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_snip.checkpoint.manifest import check
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.cli.convert_checkpoint import export_hf
from megatron_snip.parallel.tensor import Region, VocabParallelEmbedding
from megatron_snip.quant.adamw.expansion import split
from megatron_snip.train.bf16_adamw import LOW_PARTS
from megatron_snip.train.run_state import go_back

WEIGHT = "layers.0.mlp.up_proj.weight"


@pytest.fixture
def train(train_here):
    """`train_here` in BF16 at a learning rate that moves few BF16 numbers."""

    def run(precision: str = "fp32", **options: object) -> list[dict]:
        return train_here(bf16=True, optimizer_precision=precision, **{"lr": 1e-4, **options})

    return run


def losses(rows: list[dict]) -> list[float]:
    return [row["lm loss"] for row in rows]


def tensors_of(saves: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, as it is stored."""
    manifest = check(saves, iteration)
    found = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in manifest.tensors.items()}
    load_tensors(saves, iteration, found)
    return found


# in the background a save takes the same tensors, of which collage-plus has most
@pytest.mark.parametrize(
    ("precision", "saving"),
    [
        *(pytest.param(precision, {}, id=precision) for precision in LOW_PARTS),
        *(
            pytest.param(
                precision,
                {"async_save": True},
                id=f"{precision}-async",
                marks=[] if precision == "collage-plus" else [pytest.mark.slow],
            )
            for precision in LOW_PARTS
        ),
    ],
)
def test_a_resume_is_bit_for_bit(precision, saving, train, tmp_path):
    whole = train(precision, train_iters=5, run_dir=str(tmp_path / "whole"), **saving)
    train(precision, train_iters=3, **saving)
    rows = train(precision, train_iters=5, load=str(tmp_path / "run/checkpoints"), **saving)
    assert losses(rows) == losses(whole)
    one, other = (tensors_of(tmp_path / run / "checkpoints", 5) for run in ("whole", "run"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    low = {f"model.{WEIGHT}.low": "weight.low", f"optim.{WEIGHT}.exp_avg_sq.low": "exp_avg_sq.low"}
    assert {name for name in low if name in one} == {name for name in low if low[name] in LOW_PARTS[precision]}
    assert all(tensor.dtype == torch.bfloat16 for tensor in one.values())
    assert all(one[name].any() for name in low if name in one)


@pytest.mark.parametrize("before", ["fp32", "collage-light", "collage-plus", "bf16-stochastic"])
def test_the_precision_may_change_on_resume(before, train, tmp_path, caplog):
    first = tmp_path / "first/checkpoints"
    same = train(before, train_iters=3, save_interval=2, run_dir=str(tmp_path / "first"))
    shutil.rmtree(first / "iter_0000003")
    for after in ("fp32", "collage-light", "collage-plus", "bf16"):
        caplog.clear()
        run = tmp_path / after
        rows = train(
            after, train_iters=3, load=str(first), ckpt_step=2, run_dir=str(run), save=str(run / "checkpoints")
        )
        assert losses(rows)[-1] == losses(same)[-1], f"{after}: forward multiplies by the same BF16 numbers"
        said = [r.getMessage() for r in caplog.records if "optimizer_precision" in r.getMessage()]
        assert len(said) == (before != after) and (not said or f"optimizer_precision: {before} -> {after}" in said[0])


def test_there_and_back_loses_what_16_bits_cannot_hold(train, tmp_path):
    train(train_iters=2)
    start = tmp_path / "run/checkpoints"
    before = tensors_of(start, 2)
    there = {name: torch.empty_like(t, dtype=torch.bfloat16) for name, t in before.items()}
    for name in [f"model.{WEIGHT}", f"optim.{WEIGHT}.exp_avg_sq"]:
        there[f"{name}.low"] = torch.empty_like(there[name])
    load_tensors(start, 2, there)
    for name in (f"model.{WEIGHT}", f"optim.{WEIGHT}.exp_avg_sq"):
        back = there[name].float() + there[f"{name}.low"].float()
        assert ((back - before[name]).abs() <= 2.0**-16 * before[name].abs()).all() and not back.equal(before[name])


@pytest.mark.parametrize("option", ["finetune", "no_load_optim"])
def test_the_weights_alone_are_taken_with_their_low_parts(option, train, tmp_path):
    first = tmp_path / "first/checkpoints"
    train("collage-plus", train_iters=2, run_dir=str(tmp_path / "first"))
    train(
        "collage-plus", train_iters=3, load=str(first), lr=0.0, save=str(tmp_path / "run/checkpoints"), **{option: True}
    )
    before, after = tensors_of(first, 2), tensors_of(tmp_path / "run/checkpoints", 3)
    for name in (f"model.{WEIGHT}", f"model.{WEIGHT}.low"):
        assert torch.equal(before[name], after[name])
    assert not torch.equal(before[f"optim.{WEIGHT}.exp_avg"], after[f"optim.{WEIGHT}.exp_avg"])


def test_an_export_has_the_sum_and_an_import_splits_it(train, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    train("collage-light", train_iters=3)
    saves = tmp_path / "run/checkpoints"
    saved = tensors_of(saves, 3)
    for dtype in ("float32", None):
        folder = tmp_path / f"hf-{dtype}"
        export_hf(str(saves), None, folder, dtype=dtype, dry_run=False)
        exported = safetensors.load_file(folder / "model.safetensors")
        assert len(exported) == len([name for name in saved if name.startswith("model.") and not name.endswith(".low")])
        sum_ = saved[f"model.{WEIGHT}"].float() + saved[f"model.{WEIGHT}.low"].float()
        assert torch.equal(exported[f"model.{WEIGHT}"].float(), sum_ if dtype else sum_.bfloat16().float())
    options = {"run_dir": str(tmp_path / "anew"), "load": str(tmp_path / "hf-float32"), "lr": 0.0, "train_iters": 1}
    train("collage-light", **options)
    again = tensors_of(tmp_path / "anew/checkpoints", 1)
    assert torch.equal(again[f"model.{WEIGHT}"].float() + again[f"model.{WEIGHT}.low"].float(), sum_)


def test_the_drawn_weights_are_those_of_float32(train, tmp_path):
    """And stay so as long as updates are 0."""
    rows = {}
    for precision in ("fp32", "collage-light"):
        rows[precision] = train(precision, train_iters=2, lr=0.0, run_dir=str(tmp_path / precision))
    master, ours = (tensors_of(tmp_path / name / "checkpoints", 2) for name in rows)
    drawn = master[f"model.{WEIGHT}"]
    whole = ours[f"model.{WEIGHT}"].float() + ours[f"model.{WEIGHT}.low"].float()
    assert torch.equal(ours[f"model.{WEIGHT}"], drawn.bfloat16())
    assert ((whole - drawn).abs() <= 2.0**-16 * drawn.abs()).all()
    assert losses(rows["fp32"]) == losses(rows["collage-light"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"bf16": False},
            "--optimizer-precision collage-light stores weights in BF16, but this run computes in float32",
        ),
        ({"optimizer_impl": "apex"}, "--optimizer-impl apex needs float32 weights"),
    ],
)
def test_what_cannot_be_is_refused(options, said, train_here):
    with pytest.raises(ValueError, match=said):
        train_here(**{"bf16": True, "optimizer_precision": "collage-light", **options})


def test_the_guard_goes_back_to_a_checkpoint_of_another_precision(train, tmp_path):
    """One of before a change of --optimizer-precision; a run knows both folders."""
    train(train_iters=2)
    saves = tmp_path / "run/checkpoints"
    value = tensors_of(saves, 2)[f"model.{WEIGHT}"]
    parts = {f"model.{WEIGHT}": torch.empty_like(value, dtype=torch.bfloat16)}
    parts[f"model.{WEIGHT}.low"] = torch.empty_like(parts[f"model.{WEIGHT}"])
    go_back(SimpleNamespace(tensors=lambda: parts, stages={}), saves, 2)
    assert all(torch.equal(part, other) for part, other in zip(parts.values(), split(value), strict=True))


def test_snip_plans_with_the_weight_divergence(train_here):
    rows = train_here(
        bf16=True, optimizer_precision="collage-plus", lr=1e-3, precision="snip", snip_start=2, snip_interval=2,
        snip_apply_lag=0, snip_weight=1.0, snip_trials=2, snip_trial_tokens=256, snip_probe_tokens=1,
    )  # fmt: skip
    assert rows[1]["snip/weight_divergence/block_00"] > 0 and "snip/achieved" in rows[1]


def test_gradients_of_a_frequent_token_are_added_in_float32(lone_mesh):
    """torch's own on CPUs stops growing where a gradient is less than half an ulp of the sum."""
    tokens, draw = torch.zeros(1, 4000, dtype=torch.int64), torch.Generator().manual_seed(0)
    region, weight = Region(lone_mesh.tp, False), torch.zeros(8, 4, dtype=torch.bfloat16)
    table = VocabParallelEmbedding(weight, region, lone_mesh.device_mesh, torch.bfloat16)
    grad = (torch.rand(1, 4000, 4, generator=draw) + 0.5).bfloat16()
    table(tokens).backward(grad)
    assert table.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(table.weight.grad[0].float(), grad.float().sum((0, 1)), rtol=2**-8, atol=0)
    assert not table.weight.grad[1:].any()
