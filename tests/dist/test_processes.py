"""What processes hold, and that they begin together or not at all."""

from __future__ import annotations

import pytest

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import LAYOUTS, connections, disagreement, memory_and_timeouts


@pytest.fixture(scope="module")
def held():
    return run_ranks(memory_and_timeouts, 2, LAYOUTS["tp2"])


def test_a_shard_does_not_keep_the_whole_weight_alive(held):
    for result in held:
        assert result["surplus"] and not any(result["surplus"].values())


def test_the_time_out_reaches_every_axis(held):
    for result in held:
        assert result["timeouts"] == {"pp": 180.0, "dp": 180.0, "tp": 180.0}


def test_neighbours_in_a_pipeline_talk_before_its_first_step():
    """As the whole and pair by pair, the last with the first too; NCCL would else connect them in mid-step."""
    assert run_ranks(connections, 3) == [
        [("all", 3), ("send", 1), ("recv", 2)],
        [("all", 3), ("recv", 0), ("send", 2)],
        [("all", 3), ("recv", 1), ("send", 0)],
    ]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("checkpoint", "--load somewhere: rank 0 sees iteration 6, rank 1 4; another run may be writing to it"),
        ("options", "rank 1 has other options than rank 0; start all with the same"),
        ("plan", "rank 1 reads another plan.json than rank 0; share the file"),
        ("nothing", ""),
    ],
)
def test_processes_agree_on_their_start_or_all_refuse(what, said):
    first, second = run_ranks(disagreement, 2, what)
    assert first == second
    assert first.startswith(said) if said else first == ""
