"""A small run of the whole program under torchrun, on as many machines and in as many starts as a test wants."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.machines import wait_until

ROOT = Path(__file__).resolve().parents[3]
PACED = Path(__file__).with_name("paced.py")
ITERATIONS = 36
#: Over examples/llama_1b/llama_1b.toml.
OPTIONS = (
    "--distributed-backend gloo --distributed-timeout-minutes 1 --snip-solve-timeout 10 "
    "--num-layers 2 --hidden-size 128 --kv-channels 64 --ffn-hidden-size 128 --num-attention-heads 2 --num-query-groups 2 --vocab-size 512 --seq-length 128 "
    "--max-position-embeddings 128 --global-batch-size 4 --lr-warmup-iters 4 --snip-start 3 --snip-interval 10 "
    f"--snip-apply-lag 2 --snip-probe-tokens 1 --log-interval 5 --eval-iters 1 --train-iters {ITERATIONS}"
).split()
TIMES = (
    "iteration-time", "throughput", "snip/probe_seconds", "snip/wait_seconds", "snip/apply_seconds",
    "snip/solver_seconds", "snip/trial_seconds",
)  # fmt: skip


@dataclass
class SmallRun:
    """A run in a folder of its own; `hurry.touch()` lets it go at its own speed.

    pace: seconds that an iteration takes at least, until then.
    """

    folder: Path
    options: tuple[str, ...] = ()
    pace: float = 0.25

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.run_dir, self.saves, self.hurry = (self.folder / name for name in ("run", "saves", "hurry"))

    def variables(self) -> dict[str, str]:
        """What its processes need in their environment."""
        return {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PACE_UNTIL": str(self.hurry),
            "PACE_SECONDS": str(self.pace),
        }  # fmt: skip

    @property
    def log(self) -> str:
        """What its processes said."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    @property
    def iteration(self) -> int:
        """The last one in the metrics, 0 before."""
        path = self.run_dir / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.is_file() else []
        return int(json.loads(rows[-1])["iteration"]) if rows else 0

    @property
    def saved(self) -> int:
        """The iteration that the tracker names, 0 without one."""
        path = self.saves / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.is_file() else 0

    def wait_for_iteration(self, iteration: int, seconds: float = 200.0) -> None:
        """Until it has trained so far."""
        wait_until(lambda: self.iteration >= iteration, seconds, f"iteration {iteration}")

    def timeless(self) -> list[dict]:
        """The metrics without what a clock wrote."""
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]

    def plans(self) -> dict[str, dict]:
        """Its plans, without what a clock wrote."""
        plans = {path.name: json.loads(path.read_text()) for path in (self.run_dir / "plans").iterdir()}
        for plan in plans.values():
            plan.get("solver", {}).pop("seconds", None)
        return plans


def assert_equal(run: SmallRun, other: SmallRun) -> None:
    """Both came to their end, and but for the clock their metrics and plans are the same, bit for bit."""
    assert run.iteration == run.saved == ITERATIONS
    assert run.timeless() == other.timeless()
    assert run.plans() == other.plans() and run.plans()
