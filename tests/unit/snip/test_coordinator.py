"""The coordinator with a made-up probe: when it plans, and that whatever fails keeps the plan in force."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_snip.config import SnipConfig
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip import coordinator as module
from megatron_snip.snip.coordinator import Coordinator
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan import pending
from megatron_snip.snip.plan.options import read_choices
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.solver import BackgroundSolver, SolverFailed
from tests.unit.snip.made_up import statistics, without_updates

NAMES = [f"layers.{i}.mlp.{kind}_proj" for i in range(2) for kind in ("gate", "down")]
SHAPES = [LinearShape(name, 128, 128, block=i // 2, kind=("gate", "down")[i % 2]) for i, name in enumerate(NAMES)]
OLD = Plan.uniform(NAMES, "fp8", iteration=1)


class FakeProbe:
    """Statistics by name, worth more with each linear; what is called is counted."""

    device, tokens, seen = torch.device("cpu"), 8, 8

    def __init__(self, worth=(4.0, 3.0, 2.0, 1.0), loss: float = 2.0) -> None:
        self.worth, self.loss = worth, loss
        self.asked, self.batches = [], []

    def run(self, run_pass, zero_grad, iteration: int, batches: int, *, updates: bool, enough=None) -> Statistics:
        self.asked.append(iteration)
        self.batches.append(batches)
        token = {"fp4": self.worth, "fp8": [worth / 100 for worth in self.worth]}
        own = {"fp4": [worth / 10 for worth in self.worth], "fp8": [worth / 1000 for worth in self.worth]}
        found = statistics(SHAPES, token, [1.0] * 4, own, iteration=iteration, loss=self.loss, tokens=self.tokens)
        return found if updates else without_updates(found)


@pytest.fixture
def make(lone_mesh, tmp_path):
    """Call it with SNIP options: a coordinator over four linears of one size, closed at the end."""
    made = []

    def coordinator(
        probe: FakeProbe | None = None, *, options=("fp8", "fp4"), last=None, final=None, decay=None, **snip
    ) -> Coordinator:
        snip = {
            "snip_target": 0.5,
            "snip_interval": 4,
            "snip_start": 3,
            "snip_apply_lag": 1,
            "snip_weight": 1.0,
            "snip_granularity": "linear",
            **snip,
        }
        config = SnipConfig(**{"snip_options": ",".join(options), **snip})
        linears = {name: SimpleNamespace(precision=LinearPrecision.uniform("bf16"), observer=None) for name in NAMES}
        made.append(
            Coordinator(
                config,
                SHAPES,
                read_choices(config, SHAPES),
                probe or FakeProbe(),
                linears,
                lone_mesh,
                tmp_path,
                seed=1,
                last_iteration=last,
                final=final,
                decay=decay,
            )
        )
        return made[-1]

    yield coordinator
    for one in made:
        one.close()


def nothing():
    raise AssertionError("the fake probe calls nothing")


def run(one: Coordinator, iterations) -> dict[int, dict]:
    return {i: one.before_step(i, nothing, nothing) for i in iterations}


def precisions(one: Coordinator) -> list[str]:
    return [str(one.linears[name].precision) for name in NAMES]


def with_plan_in_force(one: Coordinator) -> Coordinator:
    history = [{"iteration": 1, "hash": OLD.hash, "achieved": 0.0, "changed": {}}]
    one.load_state({**one.state(), "plan": OLD.to_dict(), "history": history})
    return one


def test_probe_then_solve_then_swap(make, tmp_path):
    one = make()
    seen = run(one, range(1, 13))
    assert one.probe.asked == [3, 7, 11]
    assert [i for i, metrics in seen.items() if "snip/achieved" in metrics] == [4, 8, 12]
    assert precisions(one) == ["fp8", "fp8", "fp4", "fp4"], "the costly half stays in FP8"
    assert {seen[i]["snip/plan_hash"] for i in (1, 2, 3)} == {""}
    hashes = [seen[i]["snip/plan_hash"] for i in range(4, 13)]
    assert hashes == [h for plan in one.history for h in [plan["hash"]] * 4][: len(hashes)] and len(set(hashes)) == 3
    plan = Plan.load(tmp_path / "plans/iter_0000008.json")
    assert plan.iteration == 8 and plan.hash == seen[8]["snip/plan_hash"] and plan.linears == one.plan.linears
    assert sorted(p.name for p in (tmp_path / "stats").iterdir()) == [f"iter_{i:07d}.json" for i in (3, 7, 11)]
    assert Statistics.load(tmp_path / "stats/iter_0000003.json").names == NAMES
    assert one.history[0]["changed"] == {name: str(precision) for name, precision in plan.linears.items()}
    assert [made["changed"] for made in one.history[1:]] == [{}, {}], "the same statistics, the same plan"


@pytest.mark.parametrize(("lag", "applied"), [(0, [3, 7]), (1, [4, 8]), (2, [5, 9])])
def test_lag(lag, applied, make):
    one = make(snip_apply_lag=lag)
    seen = run(one, range(1, 11))
    assert one.probe.asked == [3, 7]
    assert [i for i, metrics in seen.items() if "snip/achieved" in metrics] == applied
    assert [plan["iteration"] for plan in one.history] == applied


def test_no_probe_for_a_plan_that_would_come_too_late(make):
    one = make(last=8, snip_apply_lag=2)
    run(one, range(1, 9))
    assert one.probe.asked == [3] and one.pending is None
    other = make(last=9, snip_apply_lag=2)
    run(other, range(1, 10))
    assert other.probe.asked == [3, 7]


@pytest.mark.parametrize(("tokens", "batches"), [(1, [1, 1, 1]), (8, [1, 1, 1]), (9, [2, 2, 1]), (50, [7, 5, 1])])
def test_a_probe_takes_whole_batches_until_there_are_enough_tokens(tokens, batches, make):
    """8 a batch; none beyond the last of the run."""
    one = make(last=11, snip_probe_tokens=tokens, snip_apply_lag=0)
    run(one, range(1, 12))
    assert (one.probe.asked, one.probe.batches) == ([3, 7, 11], batches)


def child(monkeypatch, code: str) -> None:
    """Put other Python code in the solver's place."""

    def start(request):
        return BackgroundSolver(request, command=[sys.executable, "-c", code])

    monkeypatch.setattr(module, "BackgroundSolver", start)


def assert_kept(one: Coordinator, metrics: dict, *reasons: str, applied_before: int = 1) -> None:
    """The failed solve is told, and nothing has changed."""
    assert metrics["snip/solve_failed"] == 1 and "snip/achieved" not in metrics
    assert all(reason in metrics["snip/solve_error"] for reason in reasons), metrics["snip/solve_error"]
    assert one.plan == OLD and precisions(one) == ["fp8"] * 4 and len(one.history) == applied_before
    assert metrics["snip/plan_hash"] == OLD.hash and one.pending is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('no licence')", "no licence"),
        ("print('gibberish')", "gibberish"),
        ("import time; time.sleep(60)", "gave no answer within 0.3 seconds"),
    ],
    ids=["fails", "answers nonsense", "times out"],
)
def test_a_solve_that_goes_wrong(code, reason, make, monkeypatch, caplog, tmp_path):
    child(monkeypatch, code)
    one = with_plan_in_force(make(snip_solve_timeout=0.3 if "sleep" in code else 60.0))
    seen = run(one, range(3, 6))
    assert_kept(one, seen[4], reason)
    (line,) = caplog.messages
    assert line.startswith("iteration 4: no new plan, keeping the current one: ") and reason in line
    assert not (tmp_path / "plans").exists() and "snip/solve_failed" not in seen[5]


@pytest.mark.parametrize("again", [False, True])
def test_a_solver_that_is_killed(again, make, monkeypatch, caplog):
    real, undisturbed = BackgroundSolver, run(with_plan_in_force(make()), [3, 4])[4]
    child(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    one = with_plan_in_force(make())
    run(one, [3])
    if again:
        assert_kept(one, run(one, [4])[4], "killed by signal 9")
    else:
        monkeypatch.setattr(module, "BackgroundSolver", real)
        assert run(one, [4])[4]["snip/plan_hash"] == undisturbed["snip/plan_hash"] != ""
    assert "killed by signal 9); solving again" in caplog.messages[0]


def test_a_second_solve_has_the_time_that_is_left(make, monkeypatch):
    """The other processes wait for both, and --snip-solve-timeout is checked against the time for which they do."""
    child(monkeypatch, "import os, time; time.sleep(0.7); os.kill(os.getpid(), 9)")
    one, waited, result = with_plan_in_force(make(snip_solve_timeout=30.0)), [], BackgroundSolver.result
    monkeypatch.setattr(BackgroundSolver, "result", lambda self, s: waited.append(s) or result(self, s))
    run(one, [3, 4])
    assert len(waited) == 2 and waited[0] == 30.0 and 0.0 < waited[1] < 29.5


@pytest.mark.parametrize("kind", [SolverFailed, OSError, RuntimeError])
def test_a_solver_that_cannot_start(kind, make, monkeypatch):
    """Whatever it lacks: a process, a disk, a thread."""

    def start(request):
        raise kind("no memory for a process")

    monkeypatch.setattr(module, "BackgroundSolver", start)
    one = with_plan_in_force(make())
    assert_kept(one, run(one, [3, 4])[4], "the solver's process did not start")


def test_a_target_that_cannot_be_met(make):
    one = with_plan_in_force(make(FakeProbe((math.nan, 1.0, 1.0, 1.0)), snip_target=1.0))
    assert_kept(one, run(one, [3, 4])[4], "0.75")


def test_an_objective_that_cannot_be_computed(make, caplog):
    one = with_plan_in_force(make(FakeProbe(loss=math.nan)))
    assert_kept(one, run(one, [3])[3], "the objective cannot be computed", "loss of the probe", "nan")
    assert run(one, [4])[4].keys() == {"snip/plan_hash"}
    assert "iteration 3: no new plan" in caplog.messages[0]


def test_after_a_failure_the_next_plan_is_made(make, monkeypatch):
    one = with_plan_in_force(make())
    with monkeypatch.context() as patch:
        child(patch, "raise SystemExit('no')")
        run(one, range(3, 7))
    assert run(one, [7, 8])[8]["snip/solve_failed"] == 0 and precisions(one) == ["fp8", "fp8", "fp4", "fp4"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_linear_whose_statistics_are_not_finite_is_held_at_the_base(bad, make, caplog):
    """The last one would be the first to go to FP4."""
    one = make(FakeProbe((4.0, 3.0, 2.0, bad)))
    seen = run(one, [3, 4])
    assert precisions(one) == ["fp8", "fp4", "fp4", "fp8"]
    assert seen[3]["snip/non_finite_linears"] == 1
    assert seen[4]["snip/achieved"] == 0.5
    assert f"held at the base option, as statistics are not finite: {NAMES[3]}" in caplog.messages[0]


def test_rules_need_no_probe(make, tmp_path):
    one = make(snip_objective="layer_id", snip_target=0.5)
    seen = run(one, [3, 4])
    assert one.probe.asked == [] and seen[4]["snip/achieved"] == 0.5 and not (tmp_path / "stats").exists()


def test_bf16_among_the_options_counts_time(make):
    one = make(options=("bf16", "fp8"), snip_target=0.4)
    run(one, [3, 4])
    assert sorted(precisions(one)) == ["bf16", "fp8", "fp8", "fp8"], "FP8 saves 2/3 of what FP4 does: 3/4 * 2/3 = 0.5"


def test_a_stage_target_holds_in_every_stage(make):
    one = make(snip_stage_constraint="each")
    one.shapes = [dataclasses.replace(shape, stage=shape.block) for shape in SHAPES]
    run(one, [3, 4])
    assert precisions(one) == ["fp8", "fp4", "fp8", "fp4"]


def on_two_stages(one: Coordinator) -> Coordinator:
    one.shapes = [dataclasses.replace(shape, stage=shape.block) for shape in SHAPES]
    return one


def test_a_makespan_levels_the_stages(make):
    """Without it the cheap half goes to FP4, and the first stage waits for nothing."""
    one = on_two_stages(make(snip_stage_constraint="makespan"))
    seen = run(one, [3, 4])
    assert precisions(one) == ["fp8", "fp4", "fp8", "fp4"]
    times = [seen[4][f"snip/stage_{s}/modelled_time"] for s in (0, 1)]
    assert times == pytest.approx([3 / 16, 3 / 16]) and seen[4]["snip/modelled_time"] == pytest.approx(3 / 8)
    assert [seen[4][f"snip/stage_{s}/achieved"] for s in (0, 1)] == pytest.approx([0.5, 0.5])
    assert seen[4]["snip/gemm_times"] == "nominal" == one.plan.gemm_times
    free = on_two_stages(make(snip_stage_constraint="none"))
    assert run(free, [3, 4])[4]["snip/stage_1/achieved"] == 1.0 and precisions(free) == ["fp8", "fp8", "fp4", "fp4"]


def test_churn_keeps_what_is_hardly_worse(make):
    """After the first plan the middle two change places in worth, a little; changing them would cost more."""
    for churn, wanted in ((0.0, ["fp8", "fp4", "fp8", "fp4"]), (1e-3, ["fp8", "fp4", "fp8", "fp4"]), (10.0, None)):
        one = make(snip_churn=churn)
        run(one, [3, 4])
        assert precisions(one) == ["fp8", "fp8", "fp4", "fp4"], "no plan in force: nothing to keep"
        one.probe.worth = (4.0, 2.0, 2.5, 1.0)
        seen = run(one, [7, 8])
        assert precisions(one) == (wanted or ["fp8", "fp8", "fp4", "fp4"]), churn
        assert seen[8]["snip/churn"] == (0.5 if wanted else 0.0)


def test_fixed_linears_keep_their_precision(make, caplog):
    """Also one whose statistics are not finite; bf16 is no option for the others, and the target counts FP4."""
    fix = "layers.0.mlp.gate_proj=bf16,layers.1.*.down_proj=fp8"
    one = make(FakeProbe((math.nan, 3.0, math.nan, 1.0)), snip_fix=fix, snip_target=0.25)
    run(one, [3, 4])
    assert precisions(one) == ["bf16", "fp4", "fp8", "fp8"] and one.choices.measure == "fp4"
    assert caplog.messages[0].endswith("statistics are not finite: layers.1.mlp.gate_proj")


def test_gemm_granularity_plans_each_gemm(make):
    one = make(snip_granularity="gemm", snip_target=0.5)
    seen = run(one, [3, 4])
    assert len(one.options) == 8 and seen[4]["snip/achieved"] == 0.5
    assert any("/" in precision for precision in precisions(one)), "dgrad and wgrad before fprop"


def test_a_solve_in_flight_survives_a_checkpoint(make):
    """Its matrices go along: the restarted run solves them, not new ones."""
    one = make(snip_apply_lag=3)
    run(one, range(1, 5))
    saved = json.loads(json.dumps(one.state()))
    run(one, range(5, 7))
    other = make(FakeProbe((1.0, 2.0, 3.0, 4.0)), snip_apply_lag=3)
    other.load_state(saved)
    assert other.pending.due == 6 and other.plan is None
    seen = run(other, range(5, 7))
    assert other.probe.asked == [] and seen[6]["snip/plan_hash"] == one.plan.hash
    assert other.plan.linears == one.plan.linears and other.history == one.history


def test_a_solve_in_flight_keeps_its_options_when_a_resume_changes_them(make):
    """The matrices' columns mean the options they were made with."""
    first = make(snip_apply_lag=2)
    run(first, range(1, 5))
    state = json.loads(json.dumps(first.state()))
    run(first, [5])
    again = make(options=("fp4", "fp8"), snip_apply_lag=2, snip_target=0.25, snip_objective="abs_err")
    again.load_state(state)
    run(again, [5])
    assert again.plan.to_dict() | {"solver": 0} == first.plan.to_dict() | {"solver": 0}
    assert precisions(again) == precisions(first)


def test_whatever_the_solver_raises_is_answered(make, monkeypatch):
    """Rank 0 must answer: the others wait for it in a broadcast."""
    one = with_plan_in_force(make())
    monkeypatch.setattr(pending, "build_plan", lambda *args, **more: [][0])
    seen = run(one, range(3, 5))
    assert_kept(one, seen[4], "list index out of range")


def test_a_plan_in_force_survives_a_checkpoint(make):
    one = make()
    run(one, range(1, 7))
    saved = json.loads(json.dumps(one.state()))
    assert saved["pending"] is None
    other = make()
    other.load_state(saved)
    assert precisions(other) == precisions(one) and other.plan == one.plan and other.history == one.history
    assert run(other, [6])[6]["snip/plan_hash"] == one.plan.hash


def test_a_checkpoint_of_another_model_is_refused(make):
    one = make()
    with pytest.raises(ValueError, match=f"leaves out linears: {NAMES[0]}"):
        one.load_state({**one.state(), "plan": Plan.uniform(NAMES[1:], "fp4").to_dict()})


@pytest.mark.parametrize("other", [1, -1])
def test_a_plan_whose_hash_differs_on_another_process_is_not_applied(other, make, monkeypatch):
    """The other process's number is larger, or smaller."""
    one = with_plan_in_force(make())
    run(one, [3])

    def reduce(pair, op, group):
        theirs = pair[0] + other
        pair.copy_(torch.maximum(pair, torch.stack([theirs, -theirs])))

    monkeypatch.setattr(module.dist, "all_reduce", reduce)
    assert_kept(one, run(one, [4])[4], "the plan's hash differs between ranks")


def test_closing_ends_the_solver(make, monkeypatch):
    child(monkeypatch, "import time; time.sleep(60)")
    run(one := make(), [3])
    pid = one._solver.pid
    one.close()
    one.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
