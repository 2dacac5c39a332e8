"""The coordinator at the end of a run: the late switch, and the probe where the rate begins to decay."""

from __future__ import annotations

import json

from megatron_snip.snip.plan.final import Final
from megatron_snip.snip.plan.plan_file import Plan
from tests.unit.snip.test_coordinator import NAMES, FakeProbe, make, precisions, run

__all__ = ["make"]
MIXED = ["bf16/fp8/fp8", "bf16/fp8/fp8", "bf16/fp4/fp4", "bf16/fp4/fp4"]


def test_the_switch_is_a_plan(make, tmp_path, caplog):
    """From its iteration on fprop is in BF16; log, metrics, history and the run folder show it as a plan."""
    one = make(final=Final.parse("bf16/plan/plan", 6))
    with caplog.at_level("INFO"):
        seen = run(one, range(1, 11))
    assert precisions(one) == MIXED and one.probe.asked == [3], "after it fprop's errors are nothing to weigh"
    assert seen[6]["snip/final_precision"] == "bf16/plan/plan" and "iteration 6: the last iterations run" in caplog.text
    assert [i for i, metrics in seen.items() if "snip/achieved" in metrics] == [4, 6]
    assert seen[5]["snip/plan_hash"] != seen[6]["snip/plan_hash"] == seen[10]["snip/plan_hash"]
    assert seen[6]["snip/achieved"] == 1 / 3 and seen[6]["snip/predicted_loss_divergence"] == 0
    plan = Plan.load(tmp_path / "plans/iter_0000006.json")
    assert plan.hash == seen[6]["snip/plan_hash"] and [made["iteration"] for made in one.history] == [4, 6]


def test_a_plan_that_comes_later_is_switched_too(make):
    one = make(final=Final.parse("plan/plan/bf16", 5))
    seen = run(one, range(1, 10))
    assert one.probe.asked == [3, 7], "fprop is still to be planned"
    assert set(precisions(one)) == {"fp8/fp8/bf16", "fp4/fp4/bf16"}
    assert [i for i in seen if "snip/final_precision" in seen[i]] == [5, 6, 7, 8, 9]
    assert seen[8]["snip/achieved"] == 1 / 3


def test_a_plan_that_is_due_with_the_switch(make):
    one = make(final=Final.parse("fp8/plan/plan", 4), last=20)
    seen = run(one, [3])
    assert one.probe.asked == [], "its plan would come with the switch"
    seen |= run(make(final=Final.parse("plan/plan/bf16", 4)), [3, 4])
    assert seen[4]["snip/plans_made"] == 1, "one change, not two"


def test_without_a_plan_the_warm_up_is_switched(make):
    one = make(final=Final.parse("bf16/plan/plan", 2), snip_warmup_precision="fp8")
    run(one, [1, 2])
    assert set(precisions(one)) == {"bf16/fp8/fp8"} and one.plan is not None
    other = make(final=Final.parse("bf16/plan/plan", 2))
    assert run(other, [1, 2])[2]["snip/plan_hash"] == "" and not other.history, "BF16 already"


def test_a_resume_across_the_switch(make):
    """Saved before it, at it and after it: the same precisions, hashes and history."""
    whole = make(final=Final.parse("bf16/plan/plan", 6))
    run(whole, range(1, 6))
    saved = {}
    for i in range(6, 9):
        saved[i] = json.loads(json.dumps(whole.state()))
        run(whole, [i])
    for i, state in saved.items():
        again = make(final=Final.parse("bf16/plan/plan", 6))
        again.load_state(state)
        seen = run(again, range(i, 9))
        assert precisions(again) == precisions(whole) and again.history == whole.history
        assert seen[8]["snip/plan_hash"] == whole.plan.hash and ("snip/achieved" in seen[i]) == (i == 6)


def test_an_option_that_comes_late_holds_at_once(make):
    before = make()
    run(before, range(1, 9))
    again = make(final=Final.parse("bf16/plan/plan", 6))
    again.load_state(json.loads(json.dumps(before.state())))
    assert run(again, [9])[9]["snip/final_precision"] and precisions(again) == MIXED


def test_one_more_probe_where_the_rate_begins_to_decay(make):
    one = make(decay=9, last=30, snip_interval=8)
    seen = run(one, range(1, 14))
    assert one.probe.asked == [3, 9, 11] and [i for i in seen if "snip/achieved" in seen[i]] == [4, 10, 12]
    early = make(decay=2)
    run(early, range(1, 5))
    assert early.probe.asked == [3], "not before --snip-start"
    probe = FakeProbe()
    under_way = make(probe, decay=5, snip_apply_lag=3)
    seen = run(under_way, range(1, 9))
    assert probe.asked == [3, 5, 7] and [i for i in seen if "snip/achieved" in seen[i]] == [], "the newest counts"
    assert run(under_way, [9, 10])[10]["snip/achieved"] == 0.5 and len(precisions(under_way)) == len(NAMES)
