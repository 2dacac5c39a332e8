"""Everything that only a GPU can tell, in ten minutes: one command for the first contact and for every GPU after it.

    python benchmarks/gpu.py --output gpu-h200         # the first GPU of this machine
    python benchmarks/gpu.py --rehearse --output try   # every step on a CPU, small, to find typos

OUTPUT/gpu.json and gpu.md are written anew after each step, and while the long ones run.  A step that fails, crashes or
hangs is told of, and the next one begins in a new process, since CUDA does not outlive every failure.  A step that
would begin after --minutes is left out.  The exit status is 1 if a step failed or bits differed.

A rehearsal runs Triton's interpreter, the emulation in place of the tensor cores, and training on a CPU: its times mean
nothing, but every line of these files has run.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

ROOT = Path(__file__).resolve().parents[1]
#: Steps in their order: the module of each, and after how many seconds it ends what it does, if it goes on so long.
STEPS: dict[str, tuple[str, float]] = {
    "ceilings": ("gpu_casts", 40.0),
    "bits": ("gpu_casts", 150.0),
    "products": ("gpu_linears", 60.0),
    "resume": ("gpu_training", 100.0),
    "casts": ("gpu_casts", 80.0),
    "linears": ("gpu_linears", 120.0),
    "training": ("gpu_training", 250.0),
    "profile": ("gpu_training", 100.0),
    "tilings": ("gpu_casts", 120.0),
}
#: Seconds after that until the process is ended, which then hangs.
GRACE = 45.0
UNFINISHED = "the step did not end: it crashed or hung, or is running"


@dataclass
class Table:
    """What a step found: rows of text, and ``bad``, what is wrong with it."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def to_markdown(self) -> str:
        """The table under its title, what is wrong first."""
        lines = [f"## {self.title}", "", *(f"- **{text}**" for text in self.bad), *(f"- {text}" for text in self.notes)]
        lines += ["", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""])


def _show(text: str) -> None:
    print(text, flush=True)


@dataclass
class Contact:
    """Where the steps run; ``tell`` shows a line at once, ``keep`` writes what a step has found so far."""

    rehearse: bool
    folder: Path
    end: float
    tell: Callable[[str], None] = _show
    keep: Callable[[Table], None] = lambda table: None
    step_end: float = float("inf")
    options: list[str] = field(default_factory=list)  # of every training

    @property
    def device(self) -> str:
        """Of tensors: a rehearsal has a CPU."""
        return "cpu" if self.rehearse else "cuda"

    def left(self) -> float:
        """Seconds until nothing more may begin."""
        return min(self.end, self.step_end) - time.monotonic()


@dataclass
class Report:
    """What all steps found, as gpu.json and gpu.md have it."""

    folder: Path
    about: dict[str, str]
    steps: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> Report:
        """What is in a folder already."""
        path = folder / "gpu.json"
        found = json.loads(path.read_text()) if path.exists() else {"about": {}, "steps": {}}
        return cls(folder, found["about"], found["steps"])

    @property
    def bad(self) -> bool:
        """Whether a step failed or found something wrong."""
        return any(step["bad"] for step in self.steps.values())

    def table(self, name: str) -> Table:
        """What a step has found so far."""
        step = self.steps[name]
        bad = [text for text in step["bad"] if text != UNFINISHED]
        return Table(step["title"], step["columns"], step["rows"], step["notes"], bad)

    def put(self, name: str, table: Table, begin: float, *, ended: bool) -> None:
        """Write a step's table with all others; a kill leaves the old files or the new ones."""
        table = Table(**{**asdict(table), "bad": [*table.bad, *([] if ended else [UNFINISHED])]})
        self.steps[name] = {"seconds": time.monotonic() - begin, **asdict(table)}
        texts = ["# A GPU", "", *(f"- {key}: {value}" for key, value in self.about.items()), ""]
        for step in self.steps.values():
            texts.append(Table(**{key: value for key, value in step.items() if key != "seconds"}).to_markdown())
        written = json.dumps({"about": self.about, "steps": self.steps}, indent=1) + "\n"
        for suffix, text in (("json", written), ("md", "\n".join(texts))):
            (self.folder / f"gpu.{suffix}.new").write_text(text)
            os.replace(self.folder / f"gpu.{suffix}.new", self.folder / f"gpu.{suffix}")


Step = Callable[[Contact], Table]


def run(steps: dict[str, tuple[Step, float]], contact: Contact, report: Report) -> None:
    """Steps one after another, each with its seconds, up to one that fails."""
    for name, (step, seconds) in steps.items():
        begin, failed = time.monotonic(), False
        if contact.left() <= 0:
            report.put(name, Table(name, [], bad=["left out: the time was over"]), begin, ended=True)
            continue
        contact.step_end = begin + seconds
        contact.keep = partial(report.put, name, begin=begin, ended=False)
        contact.keep(Table(name, []))
        path = contact.folder / f"{name}.traceback.txt"
        with open(path, "w") as file:
            if not contact.rehearse:
                faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=file)
            try:
                table = step(contact)
            except Exception as error:
                failed, table = True, report.table(name)
                table.bad.append(f"failed: {''.join(traceback.format_exception_only(error)).strip()}")
                traceback.print_exc(file=file)
            finally:
                faulthandler.cancel_dump_traceback_later()
        if not failed:
            path.unlink()
        contact.step_end = float("inf")
        table.notes.append(f"this step took {time.monotonic() - begin:.1f} s")
        report.put(name, table, begin, ended=True)
        contact.tell(table.to_markdown())
        if failed:
            return
        gc.collect()
        if (torch := sys.modules.get("torch")) is not None:
            torch.cuda.empty_cache()  # the next step may be other programs, which want the memory


def runs(name: str, case: Callable[[], object], told: list[str]) -> bool:
    """Whether a case runs; why not is told."""
    import torch

    try:
        case()
    except torch.AcceleratorError:  # after which CUDA is of no use
        raise
    except Exception as error:
        told.append(f"{name} is left out: {type(error).__name__}: {error}")
        return False
    return True


def call(command: Sequence[str], log: Path, seconds: float, until: Callable[[], bool] = lambda: False) -> int | None:
    """Run a program in ROOT, with its output in a file; its exit status.

    It is ended with all that it started when ``until`` holds, which is a status of 0, or after so many seconds: None.
    """
    end = time.monotonic() + seconds
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, process_group=0)
    try:
        while process.poll() is None:
            if until():
                return 0
            if time.monotonic() > end:
                return None
            time.sleep(0.1)
        return process.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def in_one_process(names: list[str], contact: Contact) -> None:
    """Run steps in this process."""
    import torch
    from harness import machine

    if not contact.rehearse and not torch.cuda.is_available():
        print("error: no GPU is here; --rehearse runs every step on the CPU", file=sys.stderr)
        sys.exit(2)
    report = Report.of(contact.folder)
    report.about = {**machine(contact.device), **report.about}  # the first process's command
    found = {name: (getattr(importlib.import_module(STEPS[name][0]), name), STEPS[name][1]) for name in names}
    run(found, contact, report)


def main(words: list[str] | None = None) -> int:
    """Run the chosen steps, in a process of their own, and in another one after a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of gpu.json and gpu.md")
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="no step begins after so many")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    chosen = args.steps.split(",")
    if unknown := [name for name in chosen if name not in STEPS]:
        parser.error(f"--steps {', '.join(unknown)} unknown; known: {', '.join(STEPS)}")
    folder, end = args.output.resolve(), time.monotonic() + 60 * args.minutes
    if args.inside:
        sys.path.insert(0, str(ROOT))  # the package may not be installed
        in_one_process(chosen, Contact(args.rehearse, folder, end))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for old in ("gpu.json", "gpu.md"):
        (folder / old).unlink(missing_ok=True)
    while left := [name for name in chosen if name not in Report.of(folder).steps]:
        more = ["--rehearse"] if args.rehearse else []
        words = ["--inside", "--output", str(folder), "--steps", ",".join(left), *more]
        command = [sys.executable, sys.argv[0], *words, "--minutes", str((end - time.monotonic()) / 60)]
        status = subprocess.run(command).returncode
        if left[0] not in Report.of(folder).steps:
            return status or 1
    return int(Report.of(folder).bad)


if __name__ == "__main__":
    sys.modules["gpu"] = sys.modules["__main__"]  # the steps import Table from here
    sys.exit(main())
