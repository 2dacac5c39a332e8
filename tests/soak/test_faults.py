"""Seeded faults: nothing lost beyond the last checkpoint, nothing silent, no other bit."""

from __future__ import annotations

import random

import pytest

from tests.soak import run
from tests.soak.faults import FAULTS
from tests.soak.forked import careless, forked
from tests.soak.run import OPTIONS, draw_faults

#: Without an agent, a rank's death is a node's here, and a hang is as long as the time-out (test_faults.py has one).
KINDS = [kind for kind in FAULTS if kind not in ("agent", "node", "hang")]
SOME = ["rank", "pause", "bit", "second run"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kinds", "faults", "each", "options"),
    [
        (SOME, 4, 4, {"train_iters": 16, "tensor_model_parallel_size": 1}),  # test_resume.py kills tp2 x pp2
        pytest.param(KINDS, 30, 6, {}, marks=pytest.mark.slow),
    ],
    ids=["some", "every kind"],
)
def test_faults_lose_nothing(tmp_path, monkeypatch, kinds, faults, each, options):
    # a preflight at every start, and trials of 8192 tokens, would take most of the time
    monkeypatch.setattr(run, "OPTIONS", {**OPTIONS, "preflight": False, "snip_trial_tokens": 256, **options})
    report = run.soak(forked, tmp_path / "soak", faults=faults, seed=2, each=each, kinds=kinds)
    assert report.good, report.to_markdown()
    assert len(report.outcomes) == faults and {outcome.kind for outcome in report.outcomes} == set(kinds)
    assert any(outcome.resumed for outcome in report.outcomes)
    assert (tmp_path / "soak/report.md").read_text().startswith("| fault | times |")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_instrument_sees_what_it_looks_for(tmp_path, monkeypatch):
    """A shard of another iteration, which a loader without checks takes for this one."""
    # saved at once, so that there are two checkpoints when the fault falls
    monkeypatch.setattr(run, "OPTIONS", {**OPTIONS, "train_iters": 14, "async_save": False, "snip_trial_tokens": 256})
    report = run.soak(careless, tmp_path / "soak", faults=1, seed=5, each=1, kinds=["shard"])
    (outcome,) = report.outcomes
    assert outcome.silent and not report.good
    assert report.differences, "and the run went on from other weights"


def test_faults_are_drawn_by_the_seed():
    one, same, other = (draw_faults(random.Random(seed), KINDS, 40) for seed in (1, 1, 2))
    assert one == same != other
    assert [fault.iteration for fault in one] == sorted(fault.iteration for fault in one)
