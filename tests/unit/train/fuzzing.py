"""A tiny run with every kind of file that a stranger may hand over, those who read them, and one mutation at a time.

python -m tests.unit.train.fuzzing FOLDER FIRST [LAST]     what mutations FIRST to LAST come to, line by line
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_snip import runtime
from megatron_snip.arguments import parse
from megatron_snip.checkpoint import lock
from megatron_snip.cli import convert_checkpoint, generate_plan
from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDatasetBuilder
from megatron_snip.errors import UserError
from megatron_snip.files.io import MOST_SHOWN, one_line
from megatron_snip.train import loop, setup
from megatron_snip.train.report.evaluations import Evaluation
from megatron_snip.train.report.run_summary import format_summary
from megatron_snip.train.report.sections import write_report
from megatron_snip.train.run.metrics import read_metrics
from tests.unit.train.conftest import TINY
from tests.unit.train.health.watched import MOST_MEMORY, Seen, TooLate, watched
from tests.unit.train.mutations import OUTSIDE, encode, mutate

SEED = "33"
SNIP = {
    "precision": "snip", "snip_start": 1, "snip_interval": 3, "snip_apply_lag": 2, "snip_options": "fp8,fp4",
    "snip_guard": True, "save_interval": 2, "spike_window": 4, "snip_guard_patience": 1, "snip_bf16_eval_interval": 2,
    "snip_probe_tokens": 512, "snip_trial_tokens": 256,
}  # fmt: skip
CHECKPOINT = "run/checkpoints/iter_0000004"
STATE, MANIFEST = f"{CHECKPOINT}/state.json", f"{CHECKPOINT}/manifest.json"
MARK = b"a secret of the host"


@dataclass(frozen=True)
class Base:
    """What is copied for each case: a folder, and beside it the data, which nobody changes."""

    folder: Path
    data: str

    def options(self, **more: Any) -> dict[str, Any]:
        """Of every run here."""
        return {**TINY, "mock_data": False, "train_data_path": (self.data,), **more}


def train(config: dict[str, Any]) -> list[float]:
    """Losses of a run, those before a resume too."""
    loop.train(Config().replace(**config))
    return [row["lm loss"] for row in read_metrics(Path(config["run_dir"]) / "metrics.jsonl")]


def resume(base: Base, case: Path) -> Any:
    """Go on from the newest checkpoint, in its run folder."""
    run = case / "run"
    more = {"run_dir": str(run), "load": str(run / "checkpoints"), "train_iters": 6}
    return train(base.options(**SNIP, **more, data_cache_path=str(case / "cache")))


def elsewhere(base: Base, case: Path) -> Any:
    """Go on from it in another run folder."""
    saves = str(case / "run/checkpoints")
    more = {"run_dir": str(case / "new"), "load": saves, "save": saves, "train_iters": 6}
    return train(base.options(**SNIP, **more, data_cache_path=str(case / "cache")))


def finetune(base: Base, case: Path) -> Any:
    """Take the weights alone."""
    load = str(case / "run/checkpoints")
    return train(base.options(run_dir=str(case / "new"), load=load, finetune=True, train_iters=1))


def export(base: Base, case: Path) -> Any:
    """A Hugging Face folder of the newest checkpoint."""
    convert_checkpoint.export_hf(str(case / "run/checkpoints"), None, case / "out", dtype=None, dry_run=False)
    return contents(case / "out")


def planned(base: Base, case: Path) -> Any:
    """--precision plan."""
    plan = str(case / "run/plans/iter_0000003.json")
    return train(base.options(run_dir=str(case / "new"), precision="plan", precision_plan=plan, train_iters=1))


def report(base: Base, case: Path) -> Any:
    """The report of a run folder, which tells of what it cannot read and shows the rest."""
    write_report(case / "run")
    return len(format_summary(case / "run").splitlines())


def plans(base: Base, case: Path) -> Any:
    """Plans from statistics."""
    stats = case / "run/stats/iter_0000001.json"
    config = generate_plan.read_config(["--snip-options", "fp8,fp4"], stats)
    return generate_plan.generate(config, stats, case / "out", 1, 0)


def options(base: Base, case: Path) -> Any:
    """The options of an import.  A run of another size is for its user to have."""
    given = {"run-dir": case / "new", "micro-batch-size": 1, "global-batch-size": 2, "seq-length": 128, "lr": 0.01}
    words = [f"--{name}={value}" for name, value in {**given, "train-iters": 1}.items()]
    config = parse(["--mock-data", *words, "--config", str(case / "imported/model.toml")])
    config, _ = setup.check(config, 1)
    return re.sub(r"[^\"']*/case", "", repr(config.to_dict()))


def hf_run(base: Base, case: Path) -> Any:
    """A new run from a Hugging Face folder."""
    return train(base.options(run_dir=str(case / "new"), load=str(case / "hf"), train_iters=1))


def imported(base: Base, case: Path) -> Any:
    """A checkpoint of it."""
    convert_checkpoint.import_hf(case / "hf", case / "saved", dry_run=False)
    shard = case / "saved/iter_0000000/__0_0.distcp"
    return (case / "saved/model.toml").read_text().replace(str(case), ""), zlib.crc32(shard.read_bytes())


def contents(folder: Path) -> list[tuple[str, int]]:
    """Files of a folder and what they hold."""
    return sorted((path.name, zlib.crc32(path.read_bytes())) for path in folder.iterdir())


Reader = Callable[[Base, Path], Any]
_CHECKPOINTS: tuple[Reader, ...] = (resume, resume, resume, elsewhere, elsewhere, finetune, export)
#: File -> how often it is drawn, who reads it, and the places in which another value is another valid run: what the
#: training does is then another's, and nobody can tell.
FILES: dict[str, tuple[int, tuple[Reader, ...], str]] = {
    STATE: (
        30,
        _CHECKPOINTS,
        r"optimizer_steps|scheduled_samples|consumed_samples|config|snip|guard|watch|run_id|unwritten_rows",
    ),
    MANIFEST: (22, _CHECKPOINTS, r"tensors"),
    "run/checkpoints/latest_checkpointed_iteration.txt": (5, _CHECKPOINTS, ""),
    "run/checkpoints/lock.json": (5, (resume, elsewhere), ""),
    "run/config.json": (9, (resume, report, plans, finetune), ""),
    "run/plans/iter_0000003.json": (10, (planned, planned, planned, report), r"linears|iteration"),
    "run/stats/iter_0000001.json": (10, (plans, plans, plans, report), r".*"),
    "run/evaluations/iter_0000004.json": (2, (report, resume), ""),
    "imported/model.toml": (8, (options,), r".*"),
    "hf/config.json": (12, (hf_run, imported), r"rope.*|rms_norm_eps|max_position.*|num_.*|vocab_size|tie_.*|head_dim"),
    "hf/model.safetensors.index.json": (2, (hf_run, imported), ""),
    "cache": (5, (resume, elsewhere), ""),
}
#: What may become a path, or a part of one: places, and with / at the end the names in an object.
NAMES: dict[str, tuple[str, ...]] = {
    STATE: (
        "run_id", "run_id", "run_id", "snip/unwritten/", "snip/unwritten/", "config/data/tokenizer_model",
        "config/logging/run_dir", "config/checkpoint/save", "config/data/data_cache_path", "plan_hash", "guard/plan",
        "divergence/plan",
    ),
    MANIFEST: ("run_id", "small/", "tensors/", "layout/"),
    "run/checkpoints/lock.json": ("run_id", "host", "place", "token"),
    "run/config.json": (
        "run_id", "checkpoint/save", "precision/precision_plan", "snip/gemm_times", "data/tokenizer_model", "versions/",
    ),
    "run/plans/iter_0000003.json": ("linears/", "gemm_times", "hash", "objective"),
    "run/stats/iter_0000001.json": ("linears/",),
    "run/evaluations/iter_0000004.json": ("model", "scores/"),
    "imported/model.toml": ("model_name",),
    "hf/config.json": ("model_type",),
    "cache": ("arrays/",),
}  # fmt: skip


@contextlib.contextmanager
def here() -> Iterator[None]:
    """Runs train inside this process, quietly, by one thread; locks of another host are waited for a moment only."""
    logger = logging.getLogger("megatron_snip")
    changed: list[tuple[Any, str, Any]] = [
        (runtime, "stop", lambda: None), (loop, "write_report", lambda run_dir: run_dir),
        (loop, "format_summary", lambda run_dir: ""), (lock, "STALE_SECONDS", 0.3), (lock, "BEAT_SECONDS", 0.05),
        (logger, "level", logging.CRITICAL), (tempfile, "tempdir", None),
    ]  # fmt: skip
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    for owner, name, value in changed:
        setattr(owner, name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        torch.set_num_threads(threads)
        for owner, name, value in before:
            setattr(owner, name, value)


def make_base(folder: Path) -> Base:
    """Train four iterations; export, import, and score them."""
    data = folder / "text"
    folder.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetBuilder(data, np.int32) as builder:
        for document in range(40):
            builder.add_document((np.arange(100) * (document + 1) + document) % 128)
    base = Base(folder / "base", str(data))
    run = base.folder / "run"
    with here():
        more = {"run_dir": str(run), "train_iters": 6, "exit_interval": 4}
        more["data_cache_path"] = str(base.folder / "cache")
        train(base.options(**SNIP, **more))
        convert_checkpoint.export_hf(str(run / "checkpoints"), None, base.folder / "hf", dtype=None, dry_run=False)
        index = {"metadata": {"total_size": 5}, "weight_map": {"model.norm.weight": "model.safetensors"}}
        (base.folder / "hf/model.safetensors.index.json").write_text(json.dumps(index))
        convert_checkpoint.import_hf(base.folder / "hf", base.folder / "imported", dry_run=False)
    _keep_unwritten(base.folder)
    (run / "evaluations").mkdir(exist_ok=True)
    Evaluation(4, {"bf16": {"arc": {"acc": (0.5, 0.1)}}}, "0123456789abcdef").save(
        run / "evaluations/iter_0000004.json"
    )
    holder = lock._Holder("0" * 16, "0" * 16, "elsewhere", 77, "another boot", "5", 3)
    (run / "checkpoints/lock.json").write_text(json.dumps({n: getattr(holder, n) for n in holder.__struct_fields__}))
    return base


def _keep_unwritten(folder: Path) -> None:
    """The newest checkpoint as of a run that could not write its last files, and whose guard has done something."""
    state, metrics = json.loads((folder / STATE).read_bytes()), folder / "run/metrics.jsonl"
    *lines, last = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines))
    state["unwritten_rows"] = [last]
    state["snip"]["unwritten"] = {"stats/iter_0000001.json": (folder / "run/stats/iter_0000001.json").read_text()}
    step = {"kind": "plan", "iteration": 2, "why": "it broke", "checkpoint": None}
    state["guard"] |= {"steps": [step], "blamed": ["0123456789abcdef"]}
    (folder / STATE).write_text(json.dumps(state))
    assert forge(folder, STATE)


def _copy(source: str, target: str) -> None:
    """Weights, which nobody writes in place, by another name alone."""
    (os.link if source.endswith((".distcp", ".safetensors")) else shutil.copy2)(source, target)


def new_case(base: Base, folder: Path) -> tuple[Path, Path]:
    """A fresh copy, and a folder beside it that nothing may be written to or published from."""
    case, outside = folder / "case", folder / OUTSIDE
    for path in (case, outside):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base.folder, case, copy_function=_copy)
    (case / "tmp").mkdir()
    outside.mkdir()
    for name in ("kept", "kept.json"):
        (outside / name).write_bytes(b'{"kept": "' + MARK + b'"}')
    return case, outside


def forge(case: Path, name: str) -> str:
    """Make checksums right again, as whoever crafts a checkpoint does; "" where it was left out or cannot be."""
    path = case / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        if name == STATE:
            content = (case / STATE).read_bytes()
            body["small"]["state.json"] = [len(content), zlib.crc32(content)]
        text = encode(body, compact=True) if name == STATE else path.read_text()
        text = re.sub(r'"sha256":"[0-9a-f]{64}"', '"sha256":""', text)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(text.replace('"sha256":""', f'"sha256":"{digest}"'))
    return ", forged"


@dataclass
class Case:
    """What a mutation came to: one of the outcomes, and how to find it again."""

    outcome: str  # refused, same, other: those are fine; traceback, outside, late, memory, lines, losses, published
    told: str
    seen: Seen
    file: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in ("refused", "same", "other")


def run_case(base: Base, folder: Path, number: int, expected: dict[str, list[Any]]) -> Case:
    """Mutation ``number``, whatever was before it; ``expected`` has what readers give, and is filled."""
    draw = random.Random(f"{SEED} {number}")
    name = draw.choices(list(FILES), [weight for weight, _, _ in FILES.values()])[0]
    _, readers, may = FILES[name]
    reader = draw.choice(readers)
    if reader.__name__ not in expected:
        expected[reader.__name__] = []
        for older in (False, True) if reader in _CHECKPOINTS else (False,):  # a damaged one is passed over
            case, _ = new_case(base, folder)
            if older:
                (case / MANIFEST).unlink()
            with here():
                expected[reader.__name__].append(reader(base, case))
    case, outside = new_case(base, folder)
    if name == "cache":
        path = draw.choice(sorted((case / "cache").glob("*.json")))
    else:
        path = case / name
    places, what = mutate(draw, path, NAMES.get(name, ()), outside)
    if name in (STATE, MANIFEST) and path.is_file() and not path.is_symlink() and draw.random() < 0.85:
        what += forge(case, name) if path.stat().st_size < 1 << 24 else ""
    may_differ = any(re.fullmatch(rf"({may})(/.*)?", where) for where in places)
    found = judge(base, case, outside, reader, expected[reader.__name__], may_differ)
    found.told = f"seed {SEED}, mutation {number}, {name} by {reader.__name__}: {what} -> {found.told}"
    found.file = name
    return found


def judge(base: Base, case: Path, outside: Path, reader: Reader, expected: list[Any], may_differ: bool) -> Case:
    """What a reader makes of a case."""
    seen, error, result = Seen(case), None, None
    with here():
        tempfile.tempdir = str(case / "tmp")
        try:
            with watched(case) as seen:
                result = reader(base, case)
        except BaseException as caught:
            error = caught
    kept = {path.name: path.read_bytes() for path in outside.iterdir()}
    if seen.writes or len(kept) != 2 or any(MARK not in data for data in kept.values()):
        return Case("outside", f"{seen.writes} {sorted(kept)}", seen)
    if any(MARK in path.read_bytes() for path in (case / "out").rglob("*") if path.is_file()):
        return Case("published", "a file of the host is in the folder to publish", seen)
    if error is not None:
        text = one_line(error) if isinstance(error, (UserError, OSError)) else repr(error)
        users = isinstance(error, UserError) or (isinstance(error, OSError) and error.filename is not None)
        if not users:
            last = "".join(traceback.format_exception(error)[-12:])
            kind = {TooLate: "late", MemoryError: "memory"}.get(type(error), "traceback")
            return Case(kind, f"{text[:300]}\n{last}", seen)
        if not text.isprintable() or len(text) > MOST_SHOWN + 20:  # nor may a terminal be told what to do
            return Case("lines", repr(text), seen)
        if seen.bytes > MOST_MEMORY:
            return Case("memory", f"{seen.bytes >> 20} MiB before {text}", seen)
        return Case("refused", text[:300], seen)
    if seen.bytes > MOST_MEMORY:
        return Case("memory", f"{seen.bytes >> 20} MiB", seen)
    if result in expected:
        return Case("same", "", seen)
    return Case("other" if may_differ else "losses", f"{str(result)[:300]} instead of {str(expected)[:600]}", seen)


def main(words: list[str]) -> None:
    """What some mutations come to."""
    folder, first, last = Path(words[0]), int(words[1]), int(words[-1])
    runtime.start("gloo", 1.0)
    base, expected = make_base(folder), {}
    outcomes: Counter[str] = Counter()
    slowest, largest = 0.0, 0
    for number in range(first, last + 1):
        found = run_case(base, folder, number, expected)
        outcomes[found.outcome] += 1
        slowest, largest = max(slowest, found.seen.seconds), max(largest, found.seen.bytes)
        if not found.good or found.seen.seconds > 5 or len(words) < 3 or os.environ.get("VERBOSE"):
            print(f"{found.outcome}: {found.told}", flush=True)
        if number % 50 == 49 or number == last:
            _tell(number, outcomes, slowest, largest)
    os._exit(0)


def _tell(number: int, outcomes: Counter[str], slowest: float, largest: int) -> None:
    print(f"up to {number}: {dict(outcomes)}; slowest {slowest:.1f} s, most memory {largest >> 20} MiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
