"""Jobs of a real SLURM, by the project's own sbatch and launch scripts, on two nodes with a process each."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.dist.helpers.machines import wait_until
from tests.dist.helpers.small_run import ITERATIONS, assert_equal
from tests.slurm import cluster as slurm
from tests.slurm.cluster import Cluster, Job
from tests.slurm.jobs import LEAD, Run

WHY_NOT = slurm.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory) -> Run:
    run = Run(tmp_path_factory.mktemp("runs") / "undisturbed", cluster=cluster)
    run.hurry.touch()
    job = run.submit()
    assert job.wait_for("COMPLETED", "FAILED", "REQUEUED", seconds=240) == "COMPLETED", run.log
    return run


def test_a_job_to_its_end(undisturbed: Run):
    rows = undisturbed.timeless()
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS + 1))
    assert undisturbed.saved == ITERATIONS
    assert len({row["snip/plan_hash"] for row in rows[1:]} - {""}) == 4
    assert not (undisturbed.saves / "lock.json").exists()


def preempt(cluster: Cluster, run: Run) -> None:
    """A job that is worth more takes the nodes and gives them back; the run comes back and goes on to its end."""
    job = run.submit()
    run.wait_for_iteration(7)
    nodes = job.show()["NodeList"]
    short = cluster.submit(
        "--partition=high", f"--nodelist={nodes}", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    short.wait_for("COMPLETED")
    left = run.iteration
    assert 7 <= run.saved == left < ITERATIONS, run.log
    go_on(run, job, left)


def go_on(run: Run, job: Job, left: int) -> None:
    """The job has been requeued once; let it go on from an iteration to its end."""
    run.hurry.touch()
    assert job.wait_for("COMPLETED", "FAILED", seconds=240) == "COMPLETED", run.log
    assert job.show()["Restarts"] == "1"
    assert f"loaded and verified iteration {left}" in run.log


def test_a_preempted_job_saves_and_comes_back(cluster: Cluster, undisturbed: Run, tmp_path: Path):
    """SLURM sends SIGTERM to its processes."""
    run = Run(tmp_path / "run", cluster=cluster)
    preempt(cluster, run)
    assert_equal(run, undisturbed)


def test_a_preempted_job_gets_its_own_signal(cluster: Cluster, undisturbed: Run, tmp_path: Path):
    """SIGUSR1 to the script, where the site asks for it."""
    cluster.reconfigure("SlurmctldParameters=preempt_send_user_signal")
    run = Run(tmp_path / "run", cluster=cluster)
    preempt(cluster, run)
    assert "asked to stop" in run.log
    assert_equal(run, undisturbed)


def test_a_job_that_runs_out_of_time_comes_back(cluster: Cluster, undisturbed: Run, tmp_path: Path):
    run = Run(tmp_path / "run", pace=2.0, cluster=cluster)
    job = run.submit()
    run.wait_for_iteration(4)
    end = datetime.now() + timedelta(seconds=LEAD + 5)
    cluster.run("scontrol", "update", f"JobId={job.number}", f"EndTime={end:%FT%T}")
    job.wait_for("PENDING")
    assert "asked to stop" in run.log and "back to the queue" in run.log
    assert 4 <= run.saved == run.iteration < ITERATIONS, run.log
    go_on(run, job, run.saved)
    assert_equal(run, undisturbed)


def test_a_job_that_loses_a_node_goes_on_with_those_left(cluster: Cluster, undisturbed: Run, tmp_path: Path):
    """The one with rank 0 and the lock, so that another host has to find out that nobody holds it."""
    run = Run(tmp_path / "run", ("--save-interval", "5"), cluster=cluster)
    job = run.submit()
    run.wait_for_iteration(12)
    lost = job.show()["BatchHost"]
    cluster.power_cut(lost)
    job.wait_for("PENDING")
    assert (run.saves / "lock.json").exists()
    left = run.saved
    go_on(run, job, left)
    assert left >= 10 and job.show()["BatchHost"] != lost
    assert_equal(run, undisturbed)
    cluster.power_on(lost)
    cluster.wait_for_nodes()


def test_a_cancelled_job_saves_and_leaves_no_process(cluster: Cluster, undisturbed: Run, tmp_path: Path):
    run = Run(tmp_path / "run", cluster=cluster)
    job = run.submit()
    run.wait_for_iteration(7)
    assert cluster.processes("paced.py")
    cluster.run("scancel", job.number)
    cluster.wait_for_nodes()
    assert job.state == "CANCELLED" and job.show()["Restarts"] == "0"
    assert cluster.processes("paced.py") == []
    assert 7 <= run.saved == run.iteration < ITERATIONS, run.log
    run.hurry.touch()
    assert run.submit().wait_for("COMPLETED", "FAILED") == "COMPLETED", run.log
    assert_equal(run, undisturbed)


def test_the_second_job_of_a_folder_is_refused(cluster: Cluster, undisturbed: Run, tmp_path: Path):
    run = Run(tmp_path / "run", pace=1.0, cluster=cluster)
    array = run.submit("--array=1-2")
    tasks = [Job(cluster, f"{array.number}_{task}") for task in (1, 2)]
    wait_until(lambda: "FAILED" in [task.state for task in tasks], 240, "a refusal")
    run.hurry.touch()
    states = [task.wait_for("COMPLETED", "FAILED") for task in tasks]
    assert sorted(states) == ["COMPLETED", "FAILED"], run.log
    errors = [line for line in run.log.splitlines() if line.startswith("error")]
    assert len(errors) == 1, errors
    assert f"{run.saves} belongs to run" in errors[0] and "on node" in errors[0]
    assert_equal(run, undisturbed)
