"""The quickstart's model learns, and as well under SNIP as in BF16."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.dist.harness import run_ranks
from tests.validation.quickstart_runs import make_data, validation_losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """{precision: [first, last] validation loss of each seed}; two runs at a time, one thread each."""
    folder = tmp_path_factory.mktemp("quickstart")
    data = make_data(folder / "data")
    runs = [(precision, seed) for seed in SEEDS for precision in ("bf16", "snip")]

    def one(run):
        precision, seed = run
        target = folder / f"{precision}-{seed}"
        return run_ranks(validation_losses, 1, data, target, precision, seed, seconds=600.0)[0]

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(runs, pool.map(one, runs), strict=True))
    return {p: np.array([found[p, seed] for seed in SEEDS]) for p in ("bf16", "snip")}


def test_validation_loss_falls_by_two_and_a_half_nats(losses):
    for precision, values in losses.items():
        falls = values[:, 0] - values[:, -1]
        print(f"\n{precision}: validation loss falls by {falls.round(3)} nats")
        assert falls.mean() > 2.5


def test_snip_ends_where_bf16_ends(losses):
    differences = losses["snip"][:, -1] - losses["bf16"][:, -1]
    print(f"\nSNIP - BF16 at the end: {differences.round(4)}, mean {differences.mean():.4f} nats")
    assert differences.mean() <= 0.05
