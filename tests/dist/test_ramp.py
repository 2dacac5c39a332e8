"""A batch that grows, on several processes: the same losses on every layout, and a resume inside the ramp."""

from __future__ import annotations

import pytest

from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS, train_run, world_of

OPTIONS = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256,
    "global_batch_size": 8, "rampup_batch_size": (4, 2, 12), "train_iters": 0, "train_samples": 40,
    "lr_warmup_iters": 0, "lr_warmup_samples": 8,
    "eval_interval": 3, "eval_iters": 2, "preflight": False,
}  # fmt: skip


def rows(folder, layout: str, **more) -> list[dict]:
    """The metrics of a run."""
    options = {**OPTIONS, **LAYOUTS.get(layout, {}), "run_dir": str(folder), **more}
    run_ranks(train_run, world_of(layout) if layout else 1, options)
    return read_metrics(folder / "metrics.jsonl")


def told(row: dict) -> tuple:
    return tuple(row.get(name) for name in ("iteration", "batch-size", "consumed-samples", "learning-rate"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return rows(tmp_path_factory.mktemp("alone") / "run", "")


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout", ["pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pp2 interleaved", "pp2 x dp2"))]
)
def test_layouts_agree(layout, alone, tmp_path):
    whole = rows(tmp_path / "whole", layout)
    assert [row["batch-size"] for row in alone[1:]] == [4, 4, 6, 8, 8, 8] and len(whole) == len(alone)
    for one, other in zip(alone, whole, strict=True):
        assert told(one) == told(other)
        for name in ("lm loss", "lm loss validation", "grad-norm"):
            assert other.get(name) == (one.get(name) and pytest.approx(one[name], rel=1e-4))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2 interleaved", "pp2 x dp2"])
def test_a_resume_inside_the_ramp_goes_on_bit_for_bit(layout, tmp_path):
    whole = rows(tmp_path / "whole", layout)
    rows(tmp_path / "run", layout, exit_interval=2)
    again = rows(tmp_path / "run", layout, load=str(tmp_path / "run/checkpoints"))
    assert [{**row, "iteration-time": 0} for row in again] == [{**row, "iteration-time": 0} for row in whole]
