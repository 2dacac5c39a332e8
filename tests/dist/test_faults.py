"""Faults of whole runs under torchrun: killed and stopped processes, restarts, Ctrl-C, full disks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.faults import PROGRAM, train
from tests.dist.helpers.faults import program as forked_program
from tests.dist.helpers.harness import CONTEXT, run_ranks
from tests.dist.helpers.listening import family, listening

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
    pytest.mark.timeout(900),  # each starts torch several times, which takes half a minute on a busy machine
]
RUN = [
    *"--num-layers 2 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 128".split(),
    *"--vocab-size 512 --untie-embeddings-and-output-weights --global-batch-size 4 --mock-data".split(),
    *"--distributed-backend gloo --save-interval 10 --log-interval 100".split(),
]
ONE_NODE = ["--rdzv-backend", "one_node", "--nproc_per_node", "2"]
FOREVER = ["--train-iters", "100000"]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def children(pid: int) -> dict[int, int]:
    """Rank -> process id of the processes that an agent has started."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                words = (stat.parent / "environ").read_bytes().split(b"\0")
                found |= {int(word[5:]): int(stat.parent.name) for word in words if word.startswith(b"RANK=")}
        except OSError:  # it has ended meanwhile
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, what: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never came to: {what}"
        time.sleep(0.05)


def rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def timeless(run: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "iteration-time"} for row in read_metrics(run / "metrics.jsonl")]


@contextmanager
def program(run: Path, options: list[str], agent: list[str] | None, name: str = "log", **more):
    """The program under an agent (none: alone), its output in a file; whatever is left of it is killed."""
    words = [str(PROGRAM), *RUN, "--run-dir", str(run), "--load", str(run / "checkpoints"), *options]
    launch = [] if agent is None else ["-m", "torch.distributed.run", *agent]
    seen: dict[int, int] = {}
    with (run.parent / name).open("ab") as log:
        more = {"stdout": log, "stderr": log, **more}
        process = subprocess.Popen([sys.executable, *launch, *words], env=environment(), **more)
        try:
            yield process
        finally:
            seen |= children(process.pid)
            process.kill()
            process.wait()
            for pid in seen.values():
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


def _last_saved(run: Path) -> str:
    return (run / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip()


def told(run: Path, name: str = "log") -> list[str]:
    return [line for line in (run.parent / name).read_text().splitlines() if line.startswith("error")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of 30 iterations that nothing happened to, on forked ranks."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    run_ranks(train, 2, [*RUN, "--run-dir", str(run), *FOREVER, "--exit-interval", "30"], seconds=400.0)
    assert not (run / "stacks").exists()
    return timeless(run)


def leaves_at_ctrl_c(process: subprocess.Popen, agent: list[str] | None, run: Path) -> None:
    process.send_signal(signal.SIGINT)
    status = process.wait(300)
    assert status == 0 if agent is None else status != 0, "torchrun tells of the signal by its status"
    left_at = read_metrics(run / "metrics.jsonl")[-1]["iteration"]
    assert _last_saved(run) == str(left_at)
    assert "Ctrl-C: the run saves and ends" in (run.parent / "log").read_text()


@pytest.mark.slow
def test_a_restart_continues_bit_for_bit(undisturbed, tmp_path):
    """Rank 1 is killed before the first checkpoint, and again after it; Ctrl-C ends the run."""
    run, launch = tmp_path / "run", [*ONE_NODE, "--max-restarts=3"]
    with program(run, FOREVER, launch) as agent:
        for count in (3, 13):
            wait_for(lambda: rows(run) >= count and children(agent.pid), f"iteration {count}")
            killed = children(agent.pid)[1]
            os.kill(killed, signal.SIGKILL)
            wait_for(lambda: children(agent.pid).get(1, killed) != killed, "a restart")
        wait_for(lambda: rows(run) >= 20, "iteration 20")
        leaves_at_ctrl_c(agent, launch, run)
    made = timeless(run)[:30]
    assert made == undisturbed[: len(made)]
    lines = told(run)
    assert len(lines) == 2 and all("rank 1 (process " in line and "has ended" in line for line in lines), lines


@pytest.mark.slow
def test_two_nodes_restart_together_whoever_failed(undisturbed, tmp_path):
    """The nodes' own counts of restarts differ: on each in turn a process is killed."""
    run = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    node = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    options, node = [*FOREVER, "--exit-interval", "30"], [*node, "--rdzv-id=x", "--max-restarts=3"]
    with program(run, options, node, "first") as first:
        wait_for(lambda: socket.socket().connect_ex(("localhost", port)) == 0, "the rendezvous")
        with program(run, options, node, "second") as second:
            for count, agent in ((12, second), (13, first)):
                wait_for(lambda: rows(run) >= count and children(agent.pid), f"iteration {count}")
                victims = children(agent.pid)
                os.kill(*victims.values(), signal.SIGKILL)
                wait_for(lambda: set(children(agent.pid).values()) - set(victims.values()), "a restart")
            assert first.wait(400) == 0
            assert second.wait(300) == 0
    assert timeless(run) == undisturbed


@pytest.mark.slow
def test_processes_end_with_their_agent(tmp_path):
    run = tmp_path / "run"
    with program(run, FOREVER, ONE_NODE) as agent:
        wait_for(lambda: rows(run) >= 2, "iteration 2")
        ranks = children(agent.pid)
        assert len(ranks) == 2
        agent.kill()
        agent.wait()
        wait_for(lambda: not any(map(alive, ranks.values())), "the end of all processes", 5.0)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """A run whose rank 1 is stopped; it starts again, rank 1 is killed there, and it ends."""
    run, limit = tmp_path_factory.mktemp("disturbed") / "run", 12.0
    seen = SimpleNamespace(run=run, log=run.parent / "log", limit=limit)
    agent_options = [*ONE_NODE, "--max-restarts=1"]
    with program(run, [*FOREVER, "--distributed-timeout-minutes", str(limit / 60)], agent_options) as agent:
        wait_for(lambda: rows(run) >= 12, "iteration 12")
        seen.listening = listening(family(agent.pid))
        seen.stopped = stopped = children(agent.pid)[1]
        os.kill(stopped, signal.SIGSTOP)
        begin = time.monotonic()
        wait_for(lambda: children(agent.pid).get(1, stopped) != stopped, "a restart", 4 * limit)
        seen.took = time.monotonic() - begin
        (seen.line,) = told(run)
        seen.stacks = [(run / f"stacks/rank_{rank:04d}.txt").read_text() for rank in (0, 1)]
        seen.saved, before = _last_saved(run), rows(run)
        wait_for(lambda: rows(run) > before, "an iteration more")
        seen.killed = children(agent.pid)[1]
        os.kill(seen.killed, signal.SIGKILL)
        assert agent.wait(300) == 1
    return seen


def test_a_stopped_process_is_named_in_time(disturbed):
    """In 1.25 times the time-out and what a busy machine adds, though torchrun would wait 30 seconds for rank 1."""
    run, line, limit = disturbed.run, disturbed.line, disturbed.limit
    assert limit * 0.9 < disturbed.took < limit * 1.25 + 5.0
    assert f"rank 1 (process {disturbed.stopped} on {socket.gethostname()}) " in line, line
    assert "is stopped" in line or "no heartbeat" in line, line
    assert f"its last checkpoint is iteration {disturbed.saved}, continue it with --load {run}/checkpoints" in line
    assert all("loop.py" in stack for stack in disturbed.stacks)


def test_a_killed_process_is_named_at_once(disturbed):
    lines = told(disturbed.run)
    assert len(lines) == 2, lines
    where = f"rank 1 (process {disturbed.killed} on {socket.gethostname()})"
    assert f"{where} has ended; its last checkpoint is" in lines[-1]
    text = disturbed.log.read_text()
    assert f"traceback : {lines[-1].partition(': ')[2]}" in text, "torchrun's summary has it too"
    assert "gloo" not in text and len(text.splitlines()) < 90, "what is left is torchrun's own"
    assert "gloo" in "".join(path.read_text() for path in (disturbed.run / "stacks").iterdir())


def test_a_run_on_one_node_listens_on_loopback_alone(disturbed):
    """Started as the documents say, it listens on nothing that another machine can reach."""
    found = disturbed.listening
    assert found, "gloo listens somewhere"
    open_to_others = [where for where in found if not where.startswith(("127.", "::1 ", "::ffff:127."))]
    assert not open_to_others, f"of {found}"


@pytest.mark.slow
def test_a_stopped_process_is_named_and_ends_the_run_in_time(tmp_path):
    """In 1.25 times the time-out and what a busy machine adds, though torchrun would wait 30 seconds for rank 1."""
    run, limit = tmp_path / "run", 24.0
    with program(run, [*FOREVER, "--distributed-timeout-minutes", str(limit / 60)], ONE_NODE) as agent:
        wait_for(lambda: rows(run) >= 12, "iteration 12")
        stopped = children(agent.pid)[1]
        os.kill(stopped, signal.SIGSTOP)
        begin = time.monotonic()
        assert agent.wait(4 * limit) == 1
        took = time.monotonic() - begin
    assert limit * 0.9 < took < limit * 1.25 + 5.0
    (line,) = told(run)
    assert f"rank 1 (process {stopped} on {socket.gethostname()}) " in line, line
    assert "is stopped" in line or "no heartbeat" in line, line
    saved = _last_saved(run)
    assert f"its last checkpoint is iteration {saved}, continue it with --load {run}/checkpoints" in line
    for rank in (0, 1):
        assert "loop.py" in (run / f"stacks/rank_{rank:04d}.txt").read_text()
    assert f"traceback : {line.partition(': ')[2]}" in (tmp_path / "log").read_text(), "torchrun's summary has it too"


@pytest.mark.slow
def test_a_killed_process_is_told_in_one_line(tmp_path):
    run = tmp_path / "run"
    with program(run, FOREVER, ["--rdzv-backend=one_node", "--nproc_per_node=4"]) as agent:
        wait_for(lambda: rows(run) >= 11, "iteration 11")
        killed = children(agent.pid)[2]
        os.kill(killed, signal.SIGKILL)
        assert agent.wait(300) == 1
    (line,) = told(run)
    assert f"rank 2 (process {killed} on {socket.gethostname()}) has ended; its last checkpoint is" in line
    text = (tmp_path / "log").read_text()
    assert "gloo" not in text and len(text.splitlines()) < 90, "what is left is torchrun's own"
    assert "gloo" in "".join(path.read_text() for path in (run / "stacks").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("agent", [ONE_NODE, None], ids=["torchrun", "alone"])
def test_ctrl_c_saves_and_leaves(agent, tmp_path):
    run = tmp_path / "run"
    with program(run, FOREVER, agent) as process:
        wait_for(lambda: rows(run) >= 2, "iteration 2")
        leaves_at_ctrl_c(process, agent, run)
    assert told(run) == []


@contextmanager
def small_disk(folder: Path, size: str):
    """A tmpfs; the test is skipped where nobody may mount one."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_for_metrics_loses_no_row(tmp_path):
    """Checkpoints lie elsewhere; the disk of the run folder is full for a while, and stdout's all the time."""
    with small_disk(tmp_path / "disk", "256k") as disk, open("/dev/full", "w") as full:
        run, save = disk / "run", tmp_path / "saves"
        options = ["--save", str(save), "--load", str(save), "--train-iters", "100000", "--log-interval", "1"]
        with program(run, options, None, stderr=(tmp_path / "err").open("wb"), stdout=full) as process:
            wait_for(lambda: rows(run) >= 3, "iteration 3")
            (disk / "big").write_bytes(b"")
            with pytest.raises(OSError), (disk / "big").open("wb", buffering=0) as big:
                while True:
                    big.write(bytes(4096))
            wait_for(lambda: "metrics.jsonl cannot be written" in (tmp_path / "err").read_text(), "a warning")
            (disk / "big").unlink()
            wait_for(lambda: "is written again" in (tmp_path / "err").read_text(), "rows again")
            process.send_signal(signal.SIGINT)
            process.wait(300)
        found = [row["iteration"] for row in read_metrics(run / "metrics.jsonl")]
    assert found == list(range(1, len(found) + 1))
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(found[-1])


@pytest.mark.parametrize(
    ("option", "how"),
    [
        ("--run-dir", "ro"),
        ("--save", "full"),
        pytest.param("--run-dir", "full", marks=pytest.mark.slow),
        pytest.param("--save", "ro", marks=pytest.mark.slow),
    ],
)
def test_folders_that_cannot_be_written_are_refused_at_the_start(option, how, tmp_path):
    with small_disk(tmp_path / "disk", "16k") as disk:
        if how == "ro":
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        folder = disk / "new/folder"
        options = ["--run-dir", str(tmp_path / "run"), *FOREVER, option, str(folder), "--load", str(tmp_path / "none")]
        process = CONTEXT.Process(target=forked_program, args=([*RUN, *options], str(tmp_path)))
        process.start()
        try:
            process.join(300)
            assert process.exitcode == 2
        finally:
            process.kill()
    (line,) = [line for line in (tmp_path / "err").read_text().splitlines() if line.startswith("error")]
    said = "Read-only file system" if how == "ro" else "No space left on device"
    assert line.startswith(f"error: {option} {folder} cannot be written ({said}: {tmp_path}/disk); ")
    assert not (tmp_path / "run").exists()
