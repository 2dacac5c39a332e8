"""What can be done to a run under way, and when: the faults of tests/soak/run.py."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_snip.checkpoint.manifest import Damaged, check, folder_of, iterations, tracked_iteration

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_llama.py"
#: Seconds that a run may take to come to a place, or past a fault.
PATIENCE = 180.0


class Launched(Protocol):
    """A run under way."""

    def ranks(self) -> list[int]:
        """Process ids of the ranks that are alive."""

    def agent(self) -> int | None:
        """Process id of what started them and waits for them; None where nobody does."""

    def alive(self) -> bool:
        """Whether the run goes on."""

    def end(self) -> None:
        """Kill whatever is left of it, and reap it."""


#: Starts a run with options, its output going to a file.
Launch = Callable[[Mapping[str, Any], Path], Launched]


@dataclass(frozen=True)
class Fault:
    """One fault: what, at which place, from which iteration on; ``share`` and ``seed`` draw the rest."""

    kind: str
    place: str
    iteration: int
    share: float
    seed: int


class Round:
    """A run that is started again and again until it has reached its last iteration."""

    def __init__(self, launch: Launch, run_dir: Path, options: Mapping[str, Any]) -> None:
        self.run_dir, self.saves, self.log = run_dir, run_dir / "checkpoints", run_dir.with_suffix(".log")
        self.options = {**options, "run_dir": str(run_dir), "load": str(self.saves)}
        self.launch, self.run = launch, launch(self.options, self.log)

    def iteration(self) -> int:
        """Iterations that the metrics tell of."""
        try:
            return (self.run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:  # not there yet, or put aside just now by a run that begins anew
            return 0

    def log_size(self) -> int:
        """Bytes of all that the run has said."""
        return self.log.stat().st_size if self.log.is_file() else 0

    def log_since(self, size: int) -> str:
        """What the run has said since its log had a size."""
        return self.log.read_bytes()[size:].decode(errors="replace")

    def start_again(self) -> None:
        """End what is left and start anew."""
        self.run.end()
        self.run = self.launch(self.options, self.log)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds; the run is started again if it ends.  TimeoutError after ``PATIENCE``."""
        end, starts = time.monotonic() + PATIENCE, 0
        while not condition():
            if not self.run.alive() and not condition():
                starts += 1
                if starts > 3:
                    raise TimeoutError(f"the run ended {starts} times before {what}; see {self.log}")
                self.start_again()
            if time.monotonic() > end:
                raise TimeoutError(f"the run did not come to {what} within {PATIENCE:.0f} s; see {self.log}")
            time.sleep(0.002)

    def run_until(self, fault: Fault) -> None:
        """To the fault's place; a fault "in the restart" falls some time after the ranks are there."""
        last = int(self.options["train_iters"])
        i = min(fault.iteration, last - 1)
        there: dict[str, Callable[[], bool]] = {
            "anywhere": lambda: self.iteration() >= i,
            "probe": lambda: self.iteration() >= i - 1,
            "solve": lambda: (self.run_dir / f"stats/iter_{i:07d}.json").is_file(),
            "broadcast": lambda: self.iteration() >= i - 1,
            "save": lambda: bool(list(self.saves.glob("*.writing-*"))) or self.iteration() >= last - 1,
        }
        if fault.place == "restart":
            self.wait(there["anywhere"], f"iteration {i}")
            self.start_again()
            self.wait(lambda: bool(self.run.ranks()), "a restart")
            time.sleep(fault.share * 4.0)
            return
        self.wait(there[fault.place], f"{fault.place} at iteration {i}")
        time.sleep(fault.share * 0.02)

    def go_on_past(self, iteration: int) -> None:
        """To the iteration after a fault, or to the end of the run."""
        last = int(self.options["train_iters"])
        if iteration < last - 1:
            self.wait(lambda: self.iteration() > iteration, f"iteration {iteration + 1}")
        else:
            done = folder_of(self.saves, last) / "manifest.json"
            self.wait(lambda: done.is_file() and not self.run.alive(), "its end")

    def end(self) -> None:
        """End the run, whatever it does."""
        self.run.end()


def newest_whole(saves: Path, *, leave_out: bool = False) -> int:
    """The newest checkpoint that a run may go on from, 0 if there is none; leave_out: the one before it."""
    found = []
    tracked = tracked_iteration(saves)
    for iteration in iterations(saves):
        with contextlib.suppress(Damaged):
            if tracked is not None and iteration <= tracked:
                check(saves, iteration)
                found.append(iteration)
    return found[leave_out] if len(found) > leave_out else 0


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what lets it fall, where it can, whether it damages the newest checkpoint.

    ``fall`` returns a pattern of what the run must say of it; empty where a process's end says it.  ends: the run must
    say it though it ends.
    """

    fall: Callable[[Round, Fault], str]
    places: tuple[str, ...] = ("anywhere", "probe", "solve", "broadcast", "save", "restart")
    damages: bool = False
    ends: bool = False


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _one_rank(round_: Round, fault: Fault) -> list[int]:
    ranks = round_.run.ranks()
    return ranks[int(fault.share * len(ranks)) :][:1]


def kill_rank(round_: Round, fault: Fault) -> str:
    """kill -9 of one rank: a device that failed, or the system short of memory."""
    _send(_one_rank(round_, fault), signal.SIGKILL)
    return ""


def kill_all(round_: Round, fault: Fault) -> str:
    """kill -9 of every process of the run at once: a node that failed."""
    agent = round_.run.agent()
    _send([*([agent] if agent else []), *round_.run.ranks()], signal.SIGKILL)
    return ""


def kill_agent(round_: Round, fault: Fault) -> str:
    """kill -9 of what started the ranks: they must not go on alone."""
    ranks, agent = round_.run.ranks(), round_.run.agent()
    _send([agent] if agent else ranks, signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while left := set(ranks) & set(round_.run.ranks()):
        if time.monotonic() > end:
            raise TimeoutError(f"processes {sorted(left)} go on without their agent")
        time.sleep(0.01)
    return ""


def kill_solver(round_: Round, fault: Fault) -> str:
    """kill -9 of the solver's process, if one is at work: its request is solved again when its plan is due."""
    solvers = [pid for rank in round_.run.ranks() for pid in children_of(rank) if "snip.plan.solver" in command_of(pid)]
    _send(solvers, signal.SIGSTOP)  # none may end by itself between the look and the kill
    at_work = [pid for pid in solvers if _stands_still(pid)]
    _send(solvers, signal.SIGKILL)
    due = min(round_.iteration() + 1 + round_.options["snip_apply_lag"], round_.options["train_iters"])
    round_.wait(lambda: round_.iteration() >= due, f"iteration {due}, by which the plan holds")
    return "killed by signal 9.*solving again" if at_work else ""


def _stands_still(pid: int) -> bool:
    """Whether SIGSTOP found a process at work: one that has answered and gives its memory back stops no more."""
    end = time.monotonic() + 5.0
    while (state := stat_of(pid)[0]) not in "TZX" and time.monotonic() < end:
        time.sleep(0.001)
    return state == "T"


def pause(round_: Round, fault: Fault) -> str:
    """A rank that stands still for a moment: the others wait."""
    ranks = _one_rank(round_, fault)
    _send(ranks, signal.SIGSTOP)
    time.sleep(1.0)
    _send(ranks, signal.SIGCONT)
    return ""


def hang(round_: Round, fault: Fault) -> str:
    """A rank that stands still for good: the others end within the time-out, and the last line names it."""
    stopped = _one_rank(round_, fault)
    _send(stopped, signal.SIGSTOP)
    end = time.monotonic() + PATIENCE
    while round_.run.alive():
        if time.monotonic() > end:
            raise TimeoutError(f"the run goes on beside the stopped process {stopped}")
        time.sleep(0.05)
    _send(stopped, signal.SIGKILL)
    return rf"error.*\(process {stopped[0]} on .*(its last checkpoint is|it has no checkpoint yet)" if stopped else ""


def terminate(round_: Round, fault: Fault) -> str:
    """SIGTERM: save and leave, as before a preemption."""
    agent = round_.run.agent()
    _send([agent] if agent else round_.run.ranks(), signal.SIGTERM)
    return ""


def flip_bit(round_: Round, fault: Fault) -> str:
    """One bit of the newest checkpoint is another, found when the run starts again."""
    round_.run.end()
    random_, newest = random.Random(fault.seed), newest_whole(round_.saves)
    if not newest_whole(round_.saves, leave_out=True):
        return ""  # nothing to fall back on: the damage would be told, and the run would not start
    files = [path for path in sorted(folder_of(round_.saves, newest).iterdir()) if path.is_file()]
    path = random_.choices(files, [path.stat().st_size for path in files])[0]
    content = bytearray(path.read_bytes())
    at = random_.randrange(8 * len(content))
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)
    return f"skipped .*iter_{newest:07d}"


def swap_shard(round_: Round, fault: Fault) -> str:
    """A shard of the checkpoint before lies in the newest one's place: same name, same size."""
    round_.run.end()
    newest, before = newest_whole(round_.saves), newest_whole(round_.saves, leave_out=True)
    if not before:
        return ""
    shards = sorted(path.name for path in folder_of(round_.saves, newest).glob("*.distcp"))
    name = random.Random(fault.seed).choice(shards)
    shutil.copy(folder_of(round_.saves, before) / name, folder_of(round_.saves, newest) / name)
    return f"skipped .*iter_{newest:07d}"


def full_disk(round_: Round, fault: Fault) -> str:
    """No process can write to any file for a while: a disk that is full.  The run goes on."""
    ranks, begin = round_.run.ranks(), round_.iteration()
    _limit_files(ranks, 0)
    time.sleep(2.0 * fault.share)
    met = round_.iteration() > begin  # something was to be written meanwhile
    _limit_files(ranks, resource.RLIM_INFINITY)
    return "failed|not written|cannot be written" if met else ""


def _limit_files(pids: Sequence[int], size: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def second_run(round_: Round, fault: Fault) -> str:
    """Somebody starts another run on the same folder: it is refused, the first goes on."""
    other = round_.launch({**round_.options, "run_dir": f"{round_.run_dir}.second", "load": None,
                           "save": str(round_.saves)}, round_.log)  # fmt: skip
    end = time.monotonic() + PATIENCE
    while other.alive() and time.monotonic() < end:
        time.sleep(0.05)
    other.end()
    return "which is still running|already holds checkpoints"


FAULTS: Mapping[str, Kind] = {
    "rank": Kind(kill_rank),
    "node": Kind(kill_all),
    "agent": Kind(kill_agent),
    "solver": Kind(kill_solver, places=("solve",)),
    "pause": Kind(pause, places=("anywhere", "probe", "broadcast", "save")),
    "hang": Kind(hang, places=("anywhere", "probe", "save"), ends=True),
    "terminate": Kind(terminate, places=("anywhere", "probe", "solve", "save")),
    "bit": Kind(flip_bit, places=("anywhere",), damages=True),
    "shard": Kind(swap_shard, places=("anywhere",), damages=True),
    "disk": Kind(full_disk, places=("anywhere",)),
    "second run": Kind(second_run, places=("anywhere",)),
}


def _probes(options: Mapping[str, Any]) -> list[int]:
    """Iterations before which the run probes."""
    start, every, lag = (int(options[f"snip_{name}"]) for name in ("start", "interval", "apply_lag"))
    return list(range(start, int(options["train_iters"]) - lag + 1, every))


def _nearest(values: Sequence[int], to: int) -> int:
    return min(values, key=lambda value: abs(value - to))


#: The iteration of a place near a drawn one.
PLACES: Mapping[str, Callable[[int, Mapping[str, Any]], int]] = {
    "anywhere": lambda i, options: i,
    "restart": lambda i, options: i,
    "save": lambda i, options: i,
    "probe": lambda i, options: _nearest(_probes(options), i),
    "solve": lambda i, options: _nearest(_probes(options), i),
    "broadcast": lambda i, options: _nearest([p + int(options["snip_apply_lag"]) for p in _probes(options)], i),
}


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children that are alive."""
    pids = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [child for child in pids if (stat := stat_of(child))[1] == pid and stat[0] not in "ZX"]


def stat_of(pid: int) -> tuple[str, int]:
    """The letter that the kernel gives a process's state, X if it is gone, and its parent's id."""
    with contextlib.suppress(OSError, ValueError):
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, int(parent)
    return "X", 0


def command_of(pid: int) -> str:
    """A process's command line; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


class Torchrun:
    """A run under torchrun on this machine."""

    def __init__(self, options: Mapping[str, Any], log: Path) -> None:
        world = int(options["tensor_model_parallel_size"]) * int(options["pipeline_model_parallel_size"])
        agent = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=one_node", f"--nproc_per_node={world}"]
        words = ["env", "OMP_NUM_THREADS=1", *agent, str(PROGRAM)]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            words += [] if value is None or value is False else [flag] if value is True else [flag, str(value)]
        self._known: set[int] = set()
        log.parent.mkdir(parents=True, exist_ok=True)
        # Through a pipe, since a limit on the size of files would end what the run says, too.
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._reader = subprocess.Popen(["tee", "-a", str(log)], stdin=self._process.stdout, stdout=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def ranks(self) -> list[int]:
        """Ranks stay known when their agent is gone."""
        found = [pid for pid in children_of(self._process.pid) if PROGRAM.name in command_of(pid)]
        self._known.update(found)
        return sorted(pid for pid in self._known if PROGRAM.name in command_of(pid))

    def agent(self) -> int | None:
        """torchrun's process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether torchrun is there."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill torchrun and ranks."""
        _send([self._process.pid, *self.ranks()], signal.SIGKILL)
        self._process.wait()
        end = time.monotonic() + 10.0
        while self.ranks() and time.monotonic() < end:
            time.sleep(0.01)
        self._reader.wait()


def torchrun(options: Mapping[str, Any], log: Path) -> Launched:
    """Start a run as users do."""
    return Torchrun(options, log)
