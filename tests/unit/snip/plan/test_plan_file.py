"""Plan files: round trip, every error with its field, names, churn, share."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.plan_file import UNSOLVED, Plan, SolverRecord, build_plan
from megatron_snip.snip.plan.solver import SolveRequest
from tests.unit.snip.plan.plan_edits import edits, wrong_linears

FP4, FP8 = LinearPrecision.uniform("fp4"), LinearPrecision.uniform("fp8")
MIXED = LinearPrecision("fp4", "fp4", "fp8")


def plan(**changes) -> Plan:
    values = {
        "iteration": 100,
        "linears": {"layers.1.mlp.up_proj": FP4, "layers.0.self_attn.q_proj": MIXED},
        "objective": "snip",
        "target": 0.75,
        "achieved": 0.8,
        "solver": SolverRecord("optimal", 0.1 + 0.2, 0.3, 1e-5, 0.25),
    }
    return Plan(**{**values, **changes})


def test_round_trip(tmp_path):
    path = tmp_path / "plans" / "iter_0000100.json"
    plan().save(path)
    assert Plan.load(path) == plan()
    assert list(Plan.load(path).linears) == list(plan().linears)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no part of the atomic write stays
    before = tmp_path / "before.json"
    before.hardlink_to(path)
    plan(iteration=200).save(path)
    assert Plan.load(path).iteration == 200
    assert Plan.load(before).iteration == 100  # replaced, not written over


def test_file_is_the_documented_object(tmp_path):
    plan().save(tmp_path / "p.json")
    values = json.loads((tmp_path / "p.json").read_text())
    assert list(values) == [
        "version", "iteration", "objective", "target", "achieved", "linears", "solver", "hash", "gemm_times",
        "target_unit", "trial",
    ]  # fmt: skip
    assert values["linears"]["layers.0.self_attn.q_proj"] == {"fprop": "fp4", "dgrad": "fp4", "wgrad": "fp8"}
    assert set(values["solver"]) == {"status", "objective", "bound", "gap", "seconds"}


def test_hash_is_of_iteration_and_linears_only():
    text = (
        '{"iteration":100,"linears":{"layers.0.self_attn.q_proj":["fp4","fp4","fp8"],'
        '"layers.1.mlp.up_proj":["fp4","fp4","fp4"]}}'
    )
    assert plan().hash == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert plan(objective="random", target=0.1, solver=UNSOLVED).hash == plan().hash
    assert plan(linears=dict(reversed(plan().linears.items()))).hash == plan().hash
    assert plan(iteration=101).hash != plan().hash
    assert plan(linears={**plan().linears, "layers.1.mlp.up_proj": FP8}).hash != plan().hash


EDITS = {name: (values, said) for name, values, said in edits(plan())}
WRONG_LINEARS = {name: (values, said) for name, values, said in wrong_linears(plan())}


@pytest.mark.parametrize("edit", EDITS)
def test_errors_name_file_field_and_way_out(tmp_path, edit):
    values, said = EDITS[edit]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {said}")) as caught:
        Plan.load(path)
    assert "make a new plan" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("edit", WRONG_LINEARS)
def test_a_plan_of_another_model_is_whole_and_yet_refused(tmp_path, edit):
    values, said = WRONG_LINEARS[edit]
    path = tmp_path / "other.json"
    path.write_text(json.dumps(values))
    other = Plan.load(path)
    with pytest.raises(ValueError, match=re.escape(f"{path}: field linears: plan of iteration 100 ")) as caught:
        other.check_names(plan().linears, str(path))
    assert said in str(caught.value) and str(caught.value).endswith("; give a plan of this model, or this plan's model")


def test_a_plan_says_whose_gemm_times_it_counts_with(tmp_path):
    plan(gemm_times="a card").save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json").gemm_times == "a card"
    assert plan().gemm_times == "nominal"


def test_a_plan_says_what_its_target_counts(tmp_path):
    plan(target_unit="modelled time").save(tmp_path / "p.json")
    loaded = Plan.load(tmp_path / "p.json")
    assert loaded.target_unit == "modelled time" and loaded.asked == "75.00% in modelled time"
    assert loaded.hash == plan().hash
    assert plan().target_unit == "FP4 share" and plan().asked == "75.00%"
    with pytest.raises(ValueError, match="target_unit is 'joules', but must be one of FP4 share, modelled time; use a"):
        Plan.from_dict({**plan().to_dict(), "target_unit": "joules"})


@pytest.mark.parametrize("content", [b"", b'{"version": 1,', b"[]", b"\xff\xfe", None])
def test_unreadable_files(tmp_path, content):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.json: .*make a new plan"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"version": 4, "columns": []}', "this is a statistics file, not a plan; use a plan that"),
        ('{"objective": "snip", "plans": {}, "frontier": []}', "this is a table of plans, not a plan; use a plan that"),
    ],
)
def test_files_that_lie_beside_a_plan(tmp_path, content, said):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=f"x.json: {said}"):
        Plan.load(tmp_path / "x.json")


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    plan().save(path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        plan(iteration=7).save(path)
    assert Plan.load(path).iteration == 100 and len(list(tmp_path.iterdir())) == 1


def test_check_names():
    names = list(plan().linears)
    plan().check_names(reversed(names))
    with pytest.raises(ValueError, match=r"plan of iteration 100 names no such linear: layers\.1\.mlp\.up_proj"):
        plan().check_names(names[1:])
    with pytest.raises(ValueError, match=r"leaves out linears: a, b, c, d, e, f, g, h and 2 more"):
        plan().check_names([*names, *"abcdefghij"])


def test_uniform_churn_and_share():
    shapes = [LinearShape("a", 4, 4), LinearShape("b", 4, 12)]
    fp4, fp8 = Plan.uniform("ab", FP4), Plan.uniform("ab", "fp8")
    assert fp4.linears == {"a": FP4, "b": FP4} and fp4.churn(fp8) == 1 and fp4.churn(fp4) == 0
    half = Plan(0, {"a": FP4, "b": MIXED})
    assert half.churn(fp4) == half.churn(fp8) / 2 == 0.5
    assert half.fp4_share(shapes) == pytest.approx((1 + 3 * 2 / 3) / 4)
    for option, share in (("fp4", 1), ("fp8", 0), ("bf16", 0), ("fp4/fp4/fp8", 2 / 3)):
        one = Plan.uniform("ab", option)
        assert one.target == one.achieved == pytest.approx(share) == pytest.approx(one.fp4_share(shapes))
    assert Plan.uniform("ab", "fp4/fp4/fp8").linears["b"] == MIXED
    with pytest.raises(ValueError, match="leaves out"):
        half.fp4_share([*shapes, LinearShape("c", 1, 1)])
    assert Plan(0, {}).churn(Plan(1, {})) == 0


def test_build_plan_from_a_solution():
    shapes = [LinearShape("a", 4, 4), LinearShape("b", 4, 12)]
    solution = SolveRequest([[0, 1], [0, 2]], [[0, 0.25], [0, 0.75]], 0.5).solve()
    built = build_plan(solution, shapes, [FP8, FP4], iteration=5, objective="snip", target=0.5)
    assert built.linears == {"a": FP8, "b": FP4} and built.achieved == 0.75 and built.iteration == 5
    assert built.solver.objective == 2 and built.solver.status == solution.status
    assert Plan.from_dict(json.loads(json.dumps(built.to_dict()))) == built
    assert built.target_unit == "FP4 share"
    timed = build_plan(solution, shapes, [FP8, FP4], iteration=5, objective="snip", target=0.5, measure="time")
    assert timed.target_unit == "modelled time" and timed.achieved == 0.75
    with pytest.raises(ValueError, match="2 linears, the model 1"):
        build_plan(solution, shapes[:1], [FP8, FP4], iteration=5, objective="snip", target=0.5)
