"""What the coordinator tells: divergences by block and kind, the plan in numbers, what is predicted for it."""

from __future__ import annotations

import json
import math

import pytest

from tests.unit.snip.test_coordinator import NAMES, FakeProbe, make, run

__all__ = ["make"]  # a fixture


def test_what_metrics_tell(make):
    seen = run(make(), range(1, 9))
    begun, applied, again = seen[3], seen[4], seen[8]
    assert begun["snip/non_finite_linears"] == 0 and begun["snip/probe_seconds"] >= 0
    assert applied["snip/achieved"] == applied["snip/target"] == 0.5 and applied["snip/solve_failed"] == 0
    assert (applied["snip/churn"], applied["snip/plans_made"]) == (1.0, 1)
    assert (again["snip/churn"], again["snip/plans_made"]) == (0.0, 2)
    for name in ("snip/objective", "snip/gap", "snip/solver_seconds", "snip/wait_seconds", "snip/apply_seconds"):
        assert math.isfinite(applied[name]), name
    assert seen[5].keys() == {"snip/plan_hash"}
    json.dumps(seen, allow_nan=False)


GROUPS = ("block_00", "block_01", "gate", "down")


def divergences(metrics: dict, kind: str) -> list[float]:
    return [metrics[f"snip/{kind}_divergence/{group}"] for group in GROUPS]


def test_divergences_by_block_and_by_kind(make):
    """Sums over the costliest option of linears worth 4, 3 | 2, 1; no key a linear."""
    begun = run(make(), [3])[3]
    assert divergences(begun, "loss") == pytest.approx([8 / 2 * 7.0, 8 / 2 * 3.0, 8 / 2 * 6.0, 8 / 2 * 4.0])
    assert divergences(begun, "weight") == pytest.approx([0.7 / 4, 0.3 / 4, 0.6 / 4, 0.4 / 4])
    named = {key for key in begun if "_divergence" in key}
    assert named == {f"snip/{kind}_divergence/{group}" for kind in ("loss", "weight") for group in GROUPS}
    assert not any(name in key for key in begun for name in NAMES)


def test_linears_that_are_not_finite_are_left_out_of_the_sums(make):
    begun = run(make(FakeProbe((4.0, 3.0, math.nan, math.nan))), [3])[3]
    assert begun["snip/non_finite_linears"] == 2
    assert divergences(begun, "loss") == pytest.approx([28.0, 0.0, 16.0, 12.0])
    assert divergences(begun, "weight") == pytest.approx([0.7 / 4, 0.0, 0.4 / 4, 0.3 / 4])
    json.dumps(begun, allow_nan=False)


def test_updates_are_measured_if_they_have_a_weight(make):
    """Without them nothing is said of the weight divergence."""
    for weight, kinds in ((1.0, {"loss", "weight"}), (0.0, {"loss"})):
        seen = run(make(snip_weight=weight), [3, 4])
        assert {key.split("/")[1].split("_")[0] for key in seen[3] if "_divergence/" in key} == kinds
        predicted = {key for key in seen[4] if key.startswith("snip/predicted")}
        assert predicted == {f"snip/predicted_{kind}_divergence" for kind in kinds} and not seen[4]["snip/solve_failed"]


def test_what_is_predicted_for_the_precisions_in_force(make):
    one = make(snip_warmup_precision="fp8")
    seen = run(one, range(1, 5))
    assert not any("predicted" in key for i in (1, 2) for key in seen[i]), "nothing was measured yet"
    assert one.predicted_metrics() == {key: seen[4][key] for key in seen[4] if "predicted" in key}
    assert seen[4]["snip/predicted_loss_divergence"] == pytest.approx(8 / 2 * (0.04 + 0.03 + 2.0 + 1.0))
    assert seen[4]["snip/predicted_weight_divergence"] == pytest.approx((0.004 + 0.003 + 0.2 + 0.1) / 4)
    assert seen[4]["snip/bound"] <= seen[4]["snip/objective"]
    other = make()
    other.load_state(json.loads(json.dumps(one.state())))
    assert other.predicted_metrics() == one.predicted_metrics(), "a resumed run logs the same"
    before = make(snip_warmup_precision="fp8")
    run(before, [3])
    assert before.predicted_metrics()["snip/predicted_loss_divergence"] == pytest.approx(4 * 0.1), "no plan: warm-up"


def test_predictions_are_left_out_where_nothing_was_measured(make):
    one = make(snip_objective="layer_id")
    assert not any("predicted" in key for key in run(one, range(1, 5))[4])
    other = make()
    other.load_state(one.state())
    assert other.predicted_metrics() == {} and other.plan == one.plan
