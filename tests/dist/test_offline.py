"""Offline statistics and the extra BF16 forward on several processes."""

from __future__ import annotations

import pytest

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.offline import collect, losses_with_bf16
from tests.dist.helpers.runs import LAYOUTS, mixed_plan, train_run, world_of
from tests.dist.test_layouts import unlike

SMALL = {"num_layers": 2, "vocab_size": 256}  # wide enough that tp cuts no block


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    snip = {"precision": "snip", "snip_start": 90, "train_iters": 3, "preflight": False, "run_dir": str(folder)}
    run_ranks(train_run, 2, {**SMALL, **LAYOUTS["tp2"], **snip})
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def alone(checkpoints, tmp_path_factory):
    """Statistics of one process."""
    return run_ranks(collect, 1, ["--load", str(checkpoints)], tmp_path_factory.mktemp("alone") / "stats.json")[0]


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_statistics_of_a_checkpoint_on_any_layout(layout, checkpoints, alone, tmp_path):
    """Whatever the run's own layout was; rank 0 alone writes."""
    options = [
        word
        for name, value in LAYOUTS[layout].items()
        for word in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
    ]
    words = ["--load", str(checkpoints), *options]
    got = run_ranks(collect, world_of(layout), words, tmp_path / "stats.json")[0]
    assert got.iteration == alone.iteration == 4 and got.loss == pytest.approx(alone.loss, rel=1e-6)
    assert not unlike(got, alone, split=layout == "tp2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stats.json"]


@pytest.mark.parametrize("layout", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2", "pp2 interleaved")), "pp2 x dp2"])
def test_a_forward_in_bf16_changes_nothing(layout, tmp_path):
    plan = mixed_plan(tmp_path / "plan.json")
    options = {**LAYOUTS[layout], "bf16": True, "precision": "plan", "precision_plan": str(plan)}
    without = run_ranks(losses_with_bf16, world_of(layout), options, 0)
    with_it = run_ranks(losses_with_bf16, world_of(layout), options, 2)
    assert [seen for seen, _ in with_it] == [seen for seen, _ in without]
    assert all(plain == with_it[0][1] and len(plain) == 2 for _, plain in with_it), "the same on all ranks"
    assert with_it[0][1][0] != with_it[0][0][2], "and not the loss of the plan"
