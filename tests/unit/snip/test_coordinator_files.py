"""The coordinator and files that cannot be written."""

from __future__ import annotations

import json

import pytest

from megatron_snip.snip import coordinator as module
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.plan_file import Plan
from tests.unit.snip.test_coordinator import make, precisions, run

__all__ = ["make"]  # a fixture


def test_a_full_disk_does_not_end_the_run(make, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_atomic", full)
    one = make()
    seen = run(one, range(1, 5))
    assert seen[4]["snip/plan_hash"] and precisions(one).count("fp4") == 2
    assert caplog.text.count("No space left on device") == 2
    assert one.reason is None
    monkeypatch.undo()
    one.close()
    assert [len(list((one.run_dir / kind).iterdir())) for kind in ("stats", "plans")] == [1, 1], "written once it can"


def test_a_checkpoint_holds_the_files_that_could_not_be_written(make, monkeypatch):
    """Else a run that is killed before it can try again, and goes on from there, would never have them."""
    with monkeypatch.context() as full:
        full.setattr(module, "write_atomic", lambda *_: [][0])
        killed = make()
        run(killed, range(1, 5))
        state = json.loads(json.dumps(killed.state()))
    again = make()
    again.load_state(state)
    assert Statistics.load(again.run_dir / "stats/iter_0000003.json").iteration == 3
    assert Plan.load(again.run_dir / "plans/iter_0000004.json").hash == killed.plan.hash
    assert again.state()["unwritten"] == {}


@pytest.mark.parametrize("damaged", [{"pending": {"due": 9}}, {"predictions": {"due": 9}}, {"history": 9}])
def test_a_state_that_cannot_be_read_changes_nothing(damaged, make):
    """Neither files of the run folder nor what is in force."""
    one = make()
    run(one, range(1, 5))
    before, plan = one.state(), Plan.uniform(one.plan.linears, "fp4").to_dict()
    state = {**before, "plan": plan, "unwritten": {"plans/iter_0000009.json": "{}"}, **damaged}
    with pytest.raises((KeyError, TypeError)):
        one.load_state(state)
    assert one.state() == before and not (one.run_dir / "plans/iter_0000009.json").exists()
    assert precisions(one).count("fp4") == 2


def test_a_disk_that_stays_full_is_the_end_at_last(make, monkeypatch):
    monkeypatch.setattr(module, "write_atomic", lambda *_: [][0])
    monkeypatch.setattr(module, "FILES_KEPT", 2)
    one = make()
    run(one, range(1, 5))
    assert "could not be written" in str(one.reason)
