"""tools/show_plan.py: the table, the overview and the comparison."""

from __future__ import annotations

from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan import Plan, SolverRecord
from tools.show_plan import main, table

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
        ["block", "q", "down", "router"],
        ["0", "fp4", "fp4/fp4/fp8", "-"],
        ["10", "fp8", "-", "fp4"],
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
    assert main([str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
