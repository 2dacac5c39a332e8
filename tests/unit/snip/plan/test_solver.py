"""The solver's process: the same answer as in this one, and every way in which a child can go wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_snip.snip.plan import solver
from megatron_snip.snip.plan.ilp import InfeasibleTarget
from megatron_snip.snip.plan.program import Limit
from megatron_snip.snip.plan.solver import BackgroundSolver, SolveRequest, SolverFailed

ROOT = Path(__file__).resolve().parents[4]
#: A child that takes the request as the real one does, and then works for a minute.
SLOW = (
    "import time; from megatron_snip.snip.plan import solver; "
    "solver._answer = lambda line: time.sleep(60); print('ready', flush=True); solver.main()"
)


def request(**changes) -> SolveRequest:
    rng = np.random.default_rng(0)
    quality = rng.lognormal(0, 2, (28, 2)) * [0, 1]
    shares = np.full((28, 1), 1 / 28) * [0, 1]
    values = {"quality_loss": quality, "efficiency": shares, "target": 0.75}
    return SolveRequest(**{**values, **changes})


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def assert_reaped(pid: int) -> None:
    """Neither running nor a zombie: the process id is no child of ours any more."""
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def wait_for_end(pid: int, seconds: float = 20.0) -> None:
    """Until a process that is not ours is gone; whoever adopted it may not have reaped it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} is still there")


def test_same_solution_as_in_this_process():
    wanted = request(stage=np.arange(28) // 7, fixed=np.where(np.arange(28) == 3, 0, -1))
    background = BackgroundSolver(wanted)
    found, here = background.result(), wanted.solve()
    assert np.array_equal(found.choice, here.choice) and found.choice.dtype == here.choice.dtype
    assert (found.objective, found.bound, found.gap, found.status) == (
        here.objective,
        here.bound,
        here.gap,
        here.status,
    )
    assert background.result() is found and background.done()
    assert_reaped(background.pid)


def test_every_constraint_reaches_the_child():
    """And its answer brings churn and makespan back."""
    wanted = request(
        target=0.5,
        stage=np.arange(28) // 14,
        time=1.0 - request().efficiency,
        ties=np.where(np.arange(28) < 2, 0, -1),
        fixed=np.where(np.arange(28) == 3, 0, -1),
        reserved=np.array([False, False]),
        current=np.zeros(28, np.int64),
        churn=0.25,
        limits=(Limit("wgrad in FP4", request().efficiency * (np.arange(28) < 14)[:, None], 0.2),),
    )
    free = dataclasses.replace(wanted, limits=()).solve()
    here = wanted.solve()
    with BackgroundSolver(wanted) as background:
        found = background.result()
    assert here.churn == 0.25 * found.choice.sum() > 0 and here.makespan is not None
    assert (found.churn, found.makespan, found.objective) == (here.churn, here.makespan, here.objective)
    assert np.array_equal(found.choice, here.choice) and not np.array_equal(found.choice, free.choice)
    copy = SolveRequest.from_dict(json.loads(json.dumps(wanted.to_dict())))
    assert copy.to_dict() == wanted.to_dict() and copy.reserved.dtype == bool


def test_request_survives_json_bit_for_bit():
    first = request(stage=np.arange(28) // 7, target=0.1 + 0.2)
    second = SolveRequest.from_dict(json.loads(json.dumps(first.to_dict())))
    assert second.quality_loss.tobytes() == first.quality_loss.tobytes()
    assert second.to_dict() == first.to_dict() and second.stage is not None and second.ties is None
    with pytest.raises(ValueError, match="target"):
        SolveRequest.from_dict({k: v for k, v in first.to_dict().items() if k != "target"})
    with pytest.raises(ValueError, match="extra"):
        SolveRequest.from_dict({**first.to_dict(), "extra": 1})


def test_infeasible_and_bad_input_come_back_as_themselves():
    with BackgroundSolver(request(target=1.5)) as background:
        with pytest.raises(InfeasibleTarget, match=r"1\.5 is out of reach") as caught:
            background.result()
        assert caught.value.reachable == pytest.approx(1.0)
    quality = request().quality_loss.copy()
    quality[4, 1] = np.nan
    bad = request(quality_loss=quality)
    with BackgroundSolver(bad) as background, pytest.raises(ValueError, match="row 4"):
        background.result()


def test_killed_child():
    background = BackgroundSolver(request(), command=python(SLOW))
    assert not background.done()
    os.kill(background.pid, signal.SIGKILL)
    with pytest.raises(SolverFailed, match="signal 9"):
        background.result()
    assert_reaped(background.pid)


@pytest.mark.parametrize("reads", [True, False])
def test_hanging_child_is_ended_in_time(reads):
    """Also one that never reads its request, which is larger than a pipe holds."""
    code = SLOW if reads else "import time; time.sleep(60)"
    large = request(quality_loss=np.random.default_rng(0).random((4000, 8)), efficiency=np.ones((4000, 8)))
    begin = time.monotonic()
    background = BackgroundSolver(large, command=python(code))
    with pytest.raises(SolverFailed, match=r"0\.3 seconds"):
        background.result(timeout=0.3)
    assert time.monotonic() - begin < 10
    assert_reaped(background.pid)
    assert background.done()


def test_deadline_holds_without_a_timeout(monkeypatch):
    monkeypatch.setattr(solver, "GRACE_SECONDS", 0.2)
    background = BackgroundSolver(request(time_limit=0.1), command=python("import time; time.sleep(60)"))
    with pytest.raises(SolverFailed, match="no answer within"):
        background.result()
    assert_reaped(background.pid)


@pytest.mark.parametrize(
    "code",
    [
        "print('no json')",
        "pass",
        "print('[1]')",
        'print(\'{"kind": "solution", "choice": [0, 1]}\')',
        'print(\'{"kind": "surprise"}\')',
    ],
)
def test_garbage_answer(code):
    background = BackgroundSolver(request(), command=python(code))
    with pytest.raises(SolverFailed, match="cannot be read"):
        background.result()
    assert_reaped(background.pid)


def test_crash_shows_the_last_line_of_stderr():
    background = BackgroundSolver(request(), command=python("raise RuntimeError('out of luck')"))
    with pytest.raises(SolverFailed, match=r"exit status 1.*out of luck"):
        background.result()
    with pytest.raises(SolverFailed, match="did not start"):
        BackgroundSolver(request(), command=["/no/such/program"])


def test_lines_before_the_answer_are_ignored():
    code = "print('HiGHS says hello', flush=True); from megatron_snip.snip.plan import solver; solver.main()"
    with BackgroundSolver(request(), command=python(code)) as background:
        assert background.result().status == "optimal"


def test_cancel_reaps_and_repeats():
    background = BackgroundSolver(request(), command=python(SLOW))
    background.cancel()
    assert_reaped(background.pid)
    background.cancel()
    with pytest.raises(SolverFailed, match="cancelled"):
        background.result()


def started_slow_child() -> subprocess.Popen:
    child = subprocess.Popen([*python(SLOW), str(os.getpid())], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    return child


def test_child_ends_when_stdin_closes():
    child = started_slow_child()
    child.stdin.write(json.dumps(request().to_dict()).encode() + b"\n")
    child.stdin.flush()
    time.sleep(0.1)
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(20) == 3
    child.stdout.close()


def test_child_has_an_alarm_of_its_own():
    code = SLOW.replace("print(", "solver.GRACE_SECONDS = 1; print(")
    child = subprocess.Popen(
        [*python(code), str(os.getpid())], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    child.stdin.write(json.dumps(request(time_limit=0.0).to_dict()).encode() + b"\n")
    child.stdin.flush()
    assert child.wait(20) == -signal.SIGALRM
    child.stdin.close()


@pytest.mark.parametrize("inherited", [False, True])
def test_child_ends_when_its_parent_is_killed(inherited):
    """``inherited``: a process forked from the parent lives on and holds the child's stdin open."""
    code = (
        "import os, sys, time; from megatron_snip.snip.plan.solver import BackgroundSolver, SolveRequest\n"
        f"request = SolveRequest([[0, 1]], [[0, 1]], 1.0); command = {python(SLOW)!r}\n"
        "background = BackgroundSolver(request, command=command); background._writer.join()\n"
        "holder = os.fork() if sys.argv[1] == 'True' else -1\n"
        "if holder: print(background.pid, holder, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([*python(code), str(inherited)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid, holder = map(int, parent.stdout.readline().split())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    try:
        wait_for_end(pid)
    finally:
        parent.stdout.close()
        if holder > 0:
            os.kill(holder, signal.SIGKILL)


def test_child_imports_no_torch():
    code = "import sys, megatron_snip.snip.plan.solver; sys.exit('torch' in sys.modules)"
    assert subprocess.run(python(code), cwd=ROOT).returncode == 0


def test_a_full_disk_loses_no_plan():
    """No file can grow, here nor in the child, and the answer comes all the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with BackgroundSolver(request()) as background:
            found = background.result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.choice.tolist() == request().solve().choice.tolist()
