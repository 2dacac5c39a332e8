"""Train on under each arm of a schedule, and judge what the weights have become.

    python -m examples.study.head_to_head examples/study/schedules/smollm2.toml

Every arm is a run of `megatron-snip train` that continues from the same iterations in BF16 with the same data.  When it
has ended, its weights are exported and judged on held-out text by `judge.py`, which shares no code with the trainer:
with the forward of the arm's formats, and unrounded.  If the schedule has cloze items and lm-eval is installed,
`megatron-snip evaluate` scores the tasks of `cloze.py`, too.  DIR/NAME/SEED/ARM/ keeps metrics, plans, the report,
scores and result.json; the checkpoints go.

You can kill the command at any time and start it again: an arm goes on from its last checkpoint, or on a GPU, where
writing one takes longer than what it saves, from the prefix.  Several of these
commands share the work: each takes the next arm that no other one is at.  `--jobs 16` starts so many, for a GPU; under
CUDA's MPS their kernels run at once.  `--table` prints what is known so far.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from examples.study import cloze, real_model, scratch
from examples.study.head_to_head_table import table
from examples.study.judge import TEXTS, formats_of, in_formats, linears_of, losses, sequences_of
from examples.study.real_text import write_texts
from examples.study.schedule import BASE, BY_HAND, FROM_SCRATCH, Schedule, read_schedule
from megatron_snip import runtime
from megatron_snip.errors import UserError
from megatron_snip.files.json import write_atomic, write_json
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.report.evaluations import Evaluation
from megatron_snip.train.run.metrics import read_metrics
from megatron_snip.train.schedule import final_switch

RESULT = "result.json"
#: Metrics in seconds of what planning adds to training.
OVERHEADS = ("snip/probe_seconds", "snip/trial_seconds", "snip/wait_seconds", "snip/apply_seconds")
PLAN = ("iteration", "hash", "achieved", "target", "trial")  # what a result keeps of a plan
TRAIN = ("probe", *TEXTS)  # texts that become datasets; the first is trained on


def run(words: Sequence[str], log: Path) -> None:
    """`megatron-snip` with these words in a process of its own.  UserError with its last line if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with log.open("a") as file:
        command = [sys.executable, "-m", "megatron_snip.cli", *words]
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    if ended:
        last = (log.read_text().strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"megatron-snip {words[0]} ended with status {ended}: {last}; {log} has all of it")


@contextmanager
def alone(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether no other process is at this folder; wait: until none is."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def means(values: Sequence[float], size: int) -> list[float]:
    """Means of ``size`` values each, the last of what is left."""
    return [round(fmean(values[i : i + size]), 6) for i in range(0, len(values), size)]


def to_digits(losses: torch.Tensor) -> list[float]:
    """Losses [sequences] with the digits that a table of milli-nats needs."""
    return [round(loss, 6) for loss in losses.tolist()]


def has_lm_eval() -> bool:
    """Whether `megatron-snip evaluate` can run."""
    return importlib.util.find_spec("lm_eval") is not None


class HeadToHead:
    """The runs of a schedule in a folder."""

    def __init__(self, schedule: Schedule, folder: Path, model: Path, device: str) -> None:
        self.schedule, self.folder, self.model, self.device = schedule, folder, model, device

    def say(self, text: str) -> None:
        """One line to the terminal."""
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def prepare(self) -> None:
        """The model's folder, its texts, and their tokens."""
        with alone(self.folder, wait=True):
            (scratch if self.schedule.model == FROM_SCRATCH else real_model).made(self.model)
            if not all((self.model / file).is_file() for file in TEXTS.values()):
                write_texts(self.model)
            if self.schedule.cloze:
                cloze.write_tasks(self.model, self.folder / "cloze", self.schedule.cloze)
                if not has_lm_eval():
                    self.say("no cloze tasks without lm-eval; pip install lm-eval")
            for text in TRAIN:
                prefix = self.folder / "tokens" / text
                if not prefix.with_name(f"{text}_text_document.idx").is_file():
                    prefix.parent.mkdir(exist_ok=True)
                    self.say(f"tokenises {text}")
                    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(self.model)]
                    source = str(self.model / TEXTS.get(text, f"{text}.txt"))
                    run(["preprocess", "--input", source, "--output-prefix", str(prefix), *words],
                        self.folder / "log.txt")  # fmt: skip

    def train(self, seed: int, name: str, load: Path | None, words: Sequence[str]) -> Path:
        """A run up to its end, from its own checkpoints if it has any; its folder."""
        folder = self.folder / str(seed) / name
        saved = folder / "checkpoints"
        mine = saved if (saved / "latest_checkpointed_iteration.txt").is_file() else load
        start = {} if mine is None else {"load": mine}
        tokens = [str(self.folder / "tokens" / f"{text}_text_document") for text in TRAIN]
        sparing: dict[str, Any] = {} if self.device == "cpu" else {"save_interval": 10**6}
        common = self.schedule.words(
            **sparing, **start, seed=seed, device=self.device,
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=self.model,
            train_data_path=tokens[0], valid_data_path=[w for each in tokens[1:] for w in ("1", each)],
            run_dir=folder, save=saved, keep_last=1,
        )  # fmt: skip
        run(["train", *common, *words], folder / "log.txt")
        return folder

    def prefix(self, seed: int) -> Path:
        """Checkpoints of the iterations in BF16 that a seed's arms share."""
        folder = self.folder / str(seed) / "prefix"
        with alone(folder, wait=True):
            if not (folder / RESULT).is_file():
                self.say(f"seed {seed}: {self.schedule.prefix} iterations in BF16 before all arms")
                start = None if self.schedule.model == FROM_SCRATCH else self.model
                self.train(seed, "prefix", start, ["--exit-interval", str(self.schedule.prefix)])
                write_json(folder / RESULT, {})
        return folder / "checkpoints"

    def arm(self, seed: int, name: str) -> None:
        """Train and judge an arm, unless it is done or another process is at it."""
        folder = self.folder / str(seed) / name
        with alone(folder) as free:
            if not free or (folder / RESULT).is_file():
                return
            began, plan = time.perf_counter(), folder / "by_hand.json"
            if BY_HAND in self.schedule.arms[name] and not plan.is_file():
                self.schedule.plan(self.schedule.arms[name]).save(plan)
            self.say(f"seed {seed}, {name}: trains")
            self.train(seed, name, self.prefix(seed), self.schedule.words_of(name, plan))
            exported = folder / "exported"
            words = ["--load", str(folder / "checkpoints"), "--hf", str(exported)]
            run(["convert", "export", *words], folder / "log.txt")
            self.say(f"seed {seed}, {name}: is judged")
            found = {"arm": name, "seed": seed, **self.facts(name, folder), **self.judged(name, folder, exported)}
            if self.schedule.cloze and has_lm_eval():
                found["cloze"] = self.cloze(name, folder, exported)
            write_json(folder / RESULT, found)
            shutil.rmtree(folder / "checkpoints")
            shutil.rmtree(exported)
            self.say(f"seed {seed}, {name}: done in {(time.perf_counter() - began) / 60:.0f} minutes")

    def facts(self, name: str, folder: Path) -> dict[str, Any]:
        """What the run's metrics tell: losses on the way, plans, and planning's time in plain iterations."""
        rows = read_metrics(folder / "metrics.jsonl")
        seconds = sorted(row["iteration-time"] for row in rows if "iteration-time" in row)
        spent = sum(row.get(key, 0.0) for row in rows for key in OVERHEADS)
        plans = [json.loads(path.read_text()) for path in sorted((folder / "plans").glob("*.json"))]
        every = self.schedule.options.get("log-interval", 1)
        return {
            "options": self.schedule.arms[name],
            "tokens": hashlib.sha256((self.folder / "tokens/probe_text_document.bin").read_bytes()).hexdigest(),
            "training loss": means([row["lm loss"] for row in rows if "lm loss" in row], every),
            "validation": {row["iteration"]: row[key] for row in rows if (key := "lm loss validation") in row},
            "plans": [{key: plan[key] for key in PLAN} for plan in plans],
            "saved": [row["snip/saved"] for row in rows if "snip/saved" in row],
            "seconds an iteration": seconds[len(seconds) // 2],
            "planning, in iterations": spent / seconds[len(seconds) // 2],
        }  # fmt: skip

    def formats(self, name: str, folder: Path, names: Sequence[str]) -> dict[str, str]:
        """The format of each linear's fprop at the end of an arm."""
        final = final_switch(self.schedule.config(self.schedule.arms[name]))
        plans = sorted((folder / "plans").glob("*.json")) or [*folder.glob("by_hand.json")]
        word = str(plans[-1]) if plans else LinearPrecision.parse(self.schedule.arms[name]["precision"]).fprop
        found = formats_of(word, names)
        if final is not None:
            found = {each: final.of(LinearPrecision.uniform(fmt)).fprop for each, fmt in found.items()}
        return found

    @torch.no_grad()
    def judged(self, name: str, folder: Path, exported: Path) -> dict[str, Any]:
        """Mean loss of each held-out sequence, by text: with the arm's forward, and unrounded."""
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, local_files_only=True)
        model = model.eval().to(self.device)
        chosen = self.formats(name, folder, list(linears_of(model)))
        length = self.schedule.options["seq-length"]
        texts = {
            text: sequences_of(self.model, file, self.schedule.judged * length, length).to(self.device)
            for text, file in TEXTS.items()
        }
        found: dict[str, Any] = {
            "unrounded": {text: to_digits(losses(model, each).mean(1)) for text, each in texts.items()}
        }
        rounded = set(chosen.values()) != {BASE}
        with in_formats(model, chosen):
            found["losses"] = {
                text: to_digits(losses(model, each).mean(1)) if rounded else found["unrounded"][text]
                for text, each in texts.items()
            }
        return found

    def cloze(self, name: str, folder: Path, exported: Path) -> dict[str, dict[str, float | None]]:
        """Scores of the cloze tasks with the arm's forward, in float32 as `judged`: task -> metric -> value."""
        plan, scores, shapes = folder / "cloze_plan.json", folder / "cloze_scores.json", self.schedule.shapes()
        formats = self.formats(name, folder, [shape.name for shape in shapes])
        Plan.by_hand({each: LinearPrecision.uniform(fmt) for each, fmt in formats.items()}, shapes).save(plan)
        scores.unlink(missing_ok=True)  # of a try that was killed
        words = ["--plan", str(plan), "--include-path", str(self.folder / "cloze"), "--tasks", ",".join(cloze.TASKS)]
        words += ["--max-length", str(cloze.MAX_LENGTH), "--device", self.device, "--output", str(scores)]
        run(["evaluate", str(exported), *words], folder / "log.txt")
        (found,) = Evaluation.load(scores).scores.values()
        return {task: cloze.flat(metrics) for task, metrics in found.items()}

    def results(self) -> list[dict[str, Any]]:
        """Of every arm that has ended, in the schedule's order."""
        paths = (self.folder / str(seed) / name / RESULT for seed in self.schedule.seeds for name in self.schedule.arms)
        return [json.loads(path.read_text()) for path in paths if path.is_file()]

    def write(self, file: Path | None) -> None:
        """All results so far to a file, if there is one."""
        if file is not None:
            write_atomic(file, "".join(json.dumps(each) + "\n" for each in self.results()))


def work_through(work: HeadToHead, arms: Sequence[str], seeds: Sequence[int], file: Path | None) -> None:
    """Train and judge every arm that no other process is at; after each, write all results to the file."""
    for seed in seeds:
        for name in arms:
            work.arm(seed, name)
            work.write(file)


def _in_another_process(*everything: Any) -> None:
    with runtime.report_errors():
        work_through(*everything)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedule", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/head_to_head"), help="folder of all schedules")
    parser.add_argument(
        "--model", type=Path, help="folder of the model, its tokenizer and texts, in place of the cache's"
    )
    parser.add_argument("--device", default="cpu", help="of training and judging (default: cpu)")
    parser.add_argument("--arms", help="these alone, comma-separated")
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone, in this order")
    parser.add_argument("--jobs", type=int, default=1, help="processes, as a GPU has room for sixteen (default: 1)")
    parser.add_argument("--table", action="store_true", help="print what is known so far, and train nothing")
    parser.add_argument("--json", type=Path, help="also write all results to a file, a line each")
    own = parser.parse_args(arguments)
    schedule = read_schedule(own.schedule)
    arms = own.arms.split(",") if own.arms else list(schedule.arms)
    if unknown := [name for name in arms if name not in schedule.arms]:
        raise UserError(f"--arms: {own.schedule} has no arm {unknown[0]}; it has {', '.join(schedule.arms)}")
    seeds = own.seeds or [*schedule.seeds]
    if unknown := [seed for seed in seeds if seed not in schedule.seeds]:
        raise UserError(
            f"--seeds: {own.schedule} has no seed {unknown[0]}; it has {', '.join(map(str, schedule.seeds))}"
        )
    model = own.model or (scratch if schedule.model == FROM_SCRATCH else real_model).DEFAULT
    work = HeadToHead(schedule, own.output.absolute() / own.schedule.stem, model, own.device)
    if not own.table:
        work.prepare()
        turns = [[*seeds[job % len(seeds) :], *seeds[: job % len(seeds)]] for job in range(own.jobs)]
        spawn = multiprocessing.get_context("spawn")
        others = [spawn.Process(target=_in_another_process, args=(work, arms, turn, own.json)) for turn in turns[1:]]
        for other in others:
            other.start()
        try:
            work_through(work, arms, turns[0], own.json)
        finally:
            for other in others:
                other.join()
        if failed := sum(other.exitcode != 0 for other in others):
            raise UserError(f"{failed} of --jobs {own.jobs} failed; their errors are above")
    work.write(own.json)
    print(table(work.results()))


if __name__ == "__main__":
    with runtime.report_errors():
        main()
