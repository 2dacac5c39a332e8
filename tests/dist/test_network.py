"""Two machines with a network between them: a run trains, a cut cable ends it in time, and it goes on bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.helpers import machines
from tests.dist.helpers.machines import Network, wait_until
from tests.dist.helpers.small_run import ITERATIONS, OPTIONS, PACED, ROOT, SmallRun, assert_equal

WHY_NOT = machines.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
NODES = ("node1", "node2")
#: --distributed-timeout-minutes of the run whose cable is cut, in seconds; and what comes on top at most.
LIMIT, SLACK = 12.0, 20.0
PATIENCE = 300.0  # seconds that a whole run may take where cores are shared
STATIC = ("--master-addr", "node1", "--master-port", "29500")


@pytest.fixture
def net(tmp_path: Path):
    with machines.network(tmp_path, *NODES) as made:
        yield made


def start(net: Network, run: SmallRun, number: int) -> subprocess.Popen[bytes]:
    """One machine's agent and process."""
    machine = net.machines[NODES[number]]
    words = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number), *STATIC, str(PACED)),
        *("--config", str(ROOT / "examples/llama_1b/llama_1b.toml"), "--bf16", "--mock-data", *OPTIONS),
        *("--run-dir", str(run.run_dir), "--save", str(run.saves), "--load", str(run.saves), *run.options),
    ]
    env = {**os.environ, **run.variables(), "GLOO_SOCKET_IFNAME": "eth0"}
    log = run.folder / f"{machine.name}.out"
    return machine.start(sys.executable, "-m", "torch.distributed.run", *words, log=log, env=env)


def both(net: Network, run: SmallRun) -> list[subprocess.Popen[bytes]]:
    return [start(net, run, number) for number in (0, 1)]


def trainers(net: Network) -> list[str]:
    """Processes that train, on both machines; their agents are none."""
    lines = [line for name in NODES for line in net.machines[name].processes(PACED.name)]
    return [line for line in lines if "torch.distributed.run" not in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> SmallRun:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = SmallRun(folder / "run")
    run.hurry.touch()
    with machines.network(folder, *NODES) as net:
        assert [agent.wait(PATIENCE) for agent in both(net, run)] == [0, 0], run.log
    return run


def test_two_machines_train(undisturbed: SmallRun):
    assert undisturbed.iteration == undisturbed.saved == ITERATIONS
    assert undisturbed.timeless()[-1]["lm loss"] < undisturbed.timeless()[1]["lm loss"] - 0.1


def test_a_cut_cable_ends_the_run_in_time(net: Network, undisturbed: SmallRun, tmp_path: Path):
    run = SmallRun(tmp_path / "run", ("--save-interval", "5", "--distributed-timeout-minutes", str(LIMIT / 60)))
    agents = both(net, run)
    run.wait_for_iteration(7)
    net.cut("node2")
    wait_until(lambda: not trainers(net), LIMIT + SLACK, "the end of both processes")
    assert all(agent.wait(PATIENCE) != 0 for agent in agents), run.log
    told = [line for line in run.log.splitlines() if line.startswith("error")]
    assert any("rank 1 (process" in line and "on node2)" in line for line in told), run.log
    left = run.saved
    assert left >= 5
    net.mend("node2")
    run.hurry.touch()
    assert [agent.wait(PATIENCE) for agent in both(net, run)] == [0, 0], run.log
    assert f"loaded and verified iteration {left}" in run.log
    assert_equal(run, undisturbed)
