"""tools/show_plan.py: the table, the overview and the comparison."""

from __future__ import annotations

import dataclasses

from megatron_snip.cli.show_plan import main, table
from megatron_snip.config import Config
from megatron_snip.model.llama import LLAMA
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan, SolverRecord
from tests.unit.cli.conftest import TINY

FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("fp8", "fp4", "fp4/fp4/fp8"))


def plan(**changes) -> Plan:
    linears = {
        "layers.0.self_attn.q_proj": FP4,
        "layers.0.mlp.down_proj": MIXED,
        "layers.10.self_attn.q_proj": FP8,
        "layers.10.mlp.router": FP4,
        "lm_head": FP8,
    }
    return Plan(100, {**linears, **changes}, "snip", 0.75, 0.8, SolverRecord("optimal", 0.1, 0.1, 0.0, 0.5))


def test_table():
    lines = table(plan()).splitlines()
    assert [line.split() for line in lines] == [
        ["block", "q", "down"],
        ["0", "fp4", "fp4/fp4/fp8"],
        ["10", "fp8", "-"],
        ["layers.10.mlp.router", "fp4"],
        ["lm_head", "fp8"],
    ]
    assert lines[1].index("fp4/") == lines[0].index("down")


def test_command_line(tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    plan().save(first)
    plan(**{"layers.10.self_attn.q_proj": FP4}).save(second)
    assert main([str(second), "--against", str(first)]) == 0
    shown = capsys.readouterr().out
    assert "80.00% of the linears' FLOPs in FP4 (target 75.00%)" in shown and "20.0% differ" in shown
    assert shown.count("*") == 1 and "fp4*" in shown and "solver: optimal" in shown
    assert main([str(first)]) == 0
    assert "*" not in capsys.readouterr().out
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_target_of_modelled_time_is_shown_as_such(tmp_path, capsys):
    dataclasses.replace(plan(), target=0.5, target_unit="modelled time").save(tmp_path / "a.json")
    assert main([str(tmp_path / "a.json")]) == 0
    assert "80.00% of the linears' FLOPs in FP4 (target 50.00% in modelled time)" in capsys.readouterr().out


def test_moves_between_plans(tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    plan().save(first)
    plan(**{"layers.10.self_attn.q_proj": FP4, "lm_head": FP4, "layers.0.mlp.down_proj": FP8}).save(second)
    assert main([str(second), "--against", str(first)]) == 0
    assert "changed: fp8 -> fp4 2, fp4/fp4/fp8 -> fp8 1" in capsys.readouterr().out


def test_stages(finished_run, tmp_path, capsys):
    """Of the run's model, here cut into two stages.

    A block's FLOPs are 3 x 128 x 256 and 2 x 128 x (128 + 64), its attention's 128 x 128, and so the output layer's.
    """
    names = [shape.name for shape in LLAMA.linear_shapes(Config().replace(**TINY).model)]
    linears = {name: FP4 if name in ("layers.1.mlp.up_proj", "layers.1.mlp.gate_proj") else FP8 for name in names}
    Plan(3, linears).save(tmp_path / "p.json")
    load = ["--load", str(finished_run / "checkpoints")]
    assert main([str(tmp_path / "p.json"), *load, "--pipeline-model-parallel-size", "2"]) == 0
    said = capsys.readouterr().out
    assert "stage 0: 0.00% in FP4, 0.262 of the model's time in BF16" in said and "stage 1: 44.44% in FP4" in said
    assert main([str(tmp_path / "p.json"), *load]) == 0
    assert "stage 0: 22.22% in FP4" in capsys.readouterr().out
    plan().save(tmp_path / "other.json")
    for words, complaint in (
        (load, "plan of iteration 100 names no such linear"),
        (["--pipeline-model-parallel-size", "2"], "--num-layers is missing or 0; give the model's shape with --load"),
        ([*load, "--pipeline-model-parallel-size", "3"], "--num-layers by pipeline parallel: 2 is not a multiple of 3"),
        (["--agains", "x"], "unknown option --agains"),
    ):
        assert main([str(tmp_path / "other.json"), *words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {complaint}")
