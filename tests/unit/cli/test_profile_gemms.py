"""tools/profile_gemms.py: shapes and shards, the table's unit, and a real run that the planner reads."""

from __future__ import annotations

import json

import pytest

from megatron_snip.cli import profile_gemms
from megatron_snip.cli.profile_gemms import Shard, main, shards, table
from megatron_snip.config import Config, SnipConfig
from megatron_snip.snip.plan.options import read_times

MODEL = [
    "--num-layers", "2", "--hidden-size", "128", "--ffn-hidden-size", "256", "--num-attention-heads", "2",
    "--num-query-groups", "1", "--seq-length", "128",
]  # fmt: skip
SHAPE = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "seq_length": 128}


def test_shards_of_the_model():
    assert {(s.name, s.n, s.k): s.count for s in shards(Config().replace(**SHAPE, num_query_groups=1))} == {
        ("128x128", 128, 128): 4, ("64x128", 64, 128): 4, ("256x128", 256, 128): 4, ("128x256", 128, 256): 2,
    }  # fmt: skip
    cut = shards(Config().replace(**SHAPE, tensor_model_parallel_size=2))
    assert {(s.name, s.n, s.k): s.count for s in cut} == {
        ("128x128", 64, 128): 6, ("128x128", 128, 64): 2, ("256x128", 128, 128): 4, ("128x256", 128, 128): 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match="--hidden-size is missing or 0; give the model's shape"):
        shards(Config().replace(num_layers=1))
    with pytest.raises(ValueError, match="3 does not divide layers.0.self_attn.q_proj 128x128"):
        shards(Config().replace(**SHAPE, tensor_model_parallel_size=3))


def seconds(**by_format):
    return {(fmt, gemm): value for fmt, value in by_format.items() for gemm in ("fprop", "dgrad", "wgrad")}


def test_the_unit_is_what_bf16_takes_for_a_flop_on_average():
    small, large = Shard(8, 4, 8, 4, count=2), Shard(8, 12, 8, 12, count=1)
    measured = {small: seconds(bf16=2.0, fp8=1.0, fp4=9.0), large: seconds(bf16=6.0, fp8=5.0)}
    times, shapes = table(measured, tokens=1)
    per_flop = (2 * 2.0 + 6.0) / (2 * 64 + 192)
    assert times.keys() == {"bf16", "fp8"}, "fp4 did not run everywhere"
    assert times["bf16"]["dgrad"] == pytest.approx(1.0)
    assert times["fp8"]["wgrad"] == pytest.approx(7.0 / 320 / per_flop)
    assert shapes["8x4"]["bf16"]["fprop"] == pytest.approx(2.0 / 64 / per_flop)
    assert shapes["8x12"]["fp8"]["fprop"] == pytest.approx(5.0 / 192 / per_flop) and "fp4" not in shapes["8x4"]
    halves = {Shard(8, 8, 4, 8, 3): seconds(bf16=1.0, fp8=1.0), Shard(8, 8, 8, 4, 1): seconds(bf16=1.0, fp8=3.0)}
    assert table(halves, 1)[1]["8x8"]["fp8"]["fprop"] == pytest.approx((3 * 1.0 + 3.0) / 4)


def test_a_real_run_writes_what_the_planner_reads(tmp_path, capsys):
    path = tmp_path / "times.json"
    words = ["--output", str(path), "--formats", "fp8,fp4", "--repeats", "2", "--warmup", "1", *MODEL]
    assert main(words) == 0
    said = capsys.readouterr()
    assert f"{path}: GEMM times of " in said.out and "fp4 " in said.out and said.err == ""
    times = read_times(SnipConfig(gemm_times=str(path)))
    assert times.times.keys() == {"bf16", "fp8", "fp4"} and "nominal" not in times.hardware
    assert times.shapes.keys() == {"128x128", "64x128", "256x128", "128x256"}
    assert json.loads(path.read_text())["about"]["tokens"] == 128 and times.about["linear_impl"] == "auto"
    times.check(["bf16", "fp8", "fp4"])


def test_gemms_are_measured_one_at_a_time(monkeypatch):
    """Forward alone, then of backward only the product asked for; bf16 is a plain GEMM in any case."""
    seen = []

    def linear(x, w, precision, **more):
        seen.append((str(precision), more["impl"], x.requires_grad, w.requires_grad))
        return x @ w.T

    monkeypatch.setattr(profile_gemms, "quantized_linear", linear)
    shard = Shard(8, 4, 8, 4, 1)
    profile_gemms.measure(shard, 2, ["bf16", "fp8"], "auto", profile_gemms.torch.device("cpu"), repeats=1, warmup=0)
    alone = [(False, False), (True, False), (False, True)]
    assert set(seen) == {(f, how, *grad) for f, how in (("bf16", "emulated"), ("fp8", "auto")) for grad in alone}


def test_without_times_of_bf16_there_is_no_unit(tmp_path, monkeypatch, capsys):
    """As where memory runs out at some shape."""
    monkeypatch.setattr(profile_gemms, "measure", lambda shard, *_: seconds(fp8=1.0))
    assert main(["--output", str(tmp_path / "t.json"), *MODEL]) == 2
    assert "error: bf16, the unit of times, did not run at every shape" in capsys.readouterr().err


def test_what_cannot_run_is_said(tmp_path, capsys):
    words = ["--output", str(tmp_path / "t.json"), "--repeats", "1", *MODEL]
    assert main([*words, "--formats", "fp8, fp9", "--linear-impl", "emulated"]) == 0
    assert "left out: fprop: unknown format 'fp9'" in capsys.readouterr().err
    assert main([*words, "--linear-impl", "scaled_mm"]) == 2
    said = capsys.readouterr().err
    assert "left out: --linear-impl scaled_mm cannot run fp8" in said
    assert "error: none of --formats fp8,fp4 runs here by --linear-impl scaled_mm" in said
    assert main([*words, "--num-lairs", "2"]) == 2
    assert "error: unknown option --num-lairs" in capsys.readouterr().err
    assert main([*words, "--formats", "fp8,fp4/fp4/fp8", "--linear-impl", "emulated"]) == 0
    assert read_times(SnipConfig(gemm_times=str(tmp_path / "t.json"))).times.keys() == {"bf16", "fp8"}
    assert "left out: fprop: unknown format 'fp4/fp4/fp8'" in capsys.readouterr().err
    for option in ("--micro-batch-size", "--tensor-model-parallel-size", "--context-parallel-size"):
        assert main([*words, option, "0"]) == 2 and f"error: {option} is " in capsys.readouterr().err
    assert main([*words, "--repeats", "0"]) == 2 and "--repeats is 0" in capsys.readouterr().err
