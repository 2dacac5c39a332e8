"""The run folder: where a run starts from, and what keeps two runs apart.

A run has an id, made when it starts at iteration 0 and kept in config.json and in every checkpoint.
Nothing is written before every process has passed the checks.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_snip.config import Config, option_groups, parse
from megatron_snip.snip.jsonfile import write_atomic
from megatron_snip.train.checkpoint import STATE, latest_iteration, read_state

LOGGER = logging.getLogger("megatron_snip")
#: Model options that decide which weights there are and what they mean, whatever the sequence.
SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "untie_embeddings_and_output_weights", "norm_epsilon",
)  # fmt: skip
#: Model options that matter only while the model is made; a vocabulary of another size fails by its shape.
INITIAL = {"init_method_std", "vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings"}
#: Where data comes from: one given replaces all that a checkpoint's run had.
_SOURCES = ("data_path", "train_data_path", "valid_data_path", "mock_data")


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    iteration: int  # updates already made
    state: dict[str, Any] | None  # state.json of the checkpoint, None for a start from new weights
    load: Path | None  # folder of checkpoints to read tensors from
    load_iteration: int  # which of them
    run_id: str


def find_start(config: Config) -> Start:
    """Decide where to begin, reading only.  ValueError where going on would mix or overwrite runs."""
    c, run_dir = config.checkpoint, Path(config.logging.run_dir)
    for option, folder in (("--run-dir", run_dir), ("--save", config.save_dir)):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{option} {folder} is no folder; give another")
    saved = latest_iteration(Path(c.load)) if c.load else None
    if c.load and saved is None and c.exit_on_missing_checkpoint:
        raise ValueError(f"--load {c.load}: no checkpoint is there; drop --exit-on-missing-checkpoint to start anew")
    if saved is None and (c.finetune or c.no_load_optim):
        option = "--finetune" if c.finetune else "--no-load-optim"
        raise ValueError(f"{option} needs a checkpoint, --load is {c.load}; give a folder that holds one")
    if saved is None or c.finetune:
        _refuse_used_folders(config, resuming=bool(c.load) and not c.finetune)
        start = Start(0, None, None, 0, secrets.token_hex(8))
        if saved is not None:
            refuse_other_model(config, read_state(Path(str(c.load)), saved), finetune=True)
            start = Start(0, None, Path(str(c.load)), saved, start.run_id)
        return start
    assert c.load is not None
    state = read_state(Path(c.load), saved)
    here = run_id_of(run_dir)
    if here is not None and here != state["run_id"]:
        raise ValueError(
            f"--run-dir {run_dir} holds run {here}, but {c.load} belongs to run {state['run_id']}; "
            "give another --run-dir, or --finetune to start a new run from these weights"
        )
    _refuse_folder_of_another_run(config.save_dir, Path(c.load), state["run_id"])
    refuse_other_model(config, state, finetune=False)
    return Start(state["iteration"], state, Path(c.load), saved, state["run_id"])


def refuse_other_model(config: Config, state: dict[str, Any], *, finetune: bool) -> None:
    """ValueError unless a checkpoint goes on as the model and in the data order that it was trained with.

    `finetune` takes its weights alone, so it may change positions and data.
    """
    now, then = config.to_dict(), state["config"]
    fixed = [("model", name) for name in (SHAPE if finetune else now["model"].keys() - INITIAL)]
    if not finetune:
        fixed += [("training", "global_batch_size"), ("training", "seed"), ("data", "split")]
    for group, name in fixed:
        old, new = then.get(group, {}).get(name), now[group][name]
        if old != new:
            option = name.replace("_", "-")
            instead = "" if finetune else ", or start a new run from these weights with --finetune"
            raise ValueError(
                f"--{option} is {new}, the checkpoint in {config.checkpoint.load} was trained with {old}; "
                f"give --{option} {old}{instead}"
            )


def run_id_of(run_dir: Path) -> str | None:
    """Id of the run that a folder holds; None if it holds none."""
    path = run_dir / "config.json"
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_text())["run_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read ({error!r}); move the folder aside") from error


def _refuse_folder_of_another_run(save: Path, load: Path, run_id: str) -> None:
    """A run that goes on may have its checkpoints elsewhere, but not among another run's."""
    held = latest_iteration(save) if save.resolve() != load.resolve() else None
    if held is not None and (other := read_state(save, held)["run_id"]) != run_id:
        raise ValueError(
            f"--save {save} holds checkpoints of run {other}, but {load} belongs to run {run_id}; give another --save"
        )


def _refuse_used_folders(config: Config, *, resuming: bool) -> None:
    """A run from iteration 0 needs folders without a run, unless `--load` says that it may begin again."""
    run_dir, save = Path(config.logging.run_dir), config.save_dir
    held = latest_iteration(save)
    if held is not None:
        raise ValueError(
            f"{save} already holds checkpoints up to iteration {held}; --load {save} continues them, "
            "or give another --run-dir and --save"
        )
    other = _save_dir_of(run_dir)
    if resuming and other is not None and other.resolve() != save.resolve():
        raise ValueError(
            f"--run-dir {run_dir} holds a run that saves to {other}, not to {save}; --load {other} continues it, "
            "or give another --run-dir"
        )
    if not resuming and (run_dir / "metrics.jsonl").is_file():
        raise ValueError(
            f"--run-dir {run_dir} already holds a run; --load {save} continues it, or give another --run-dir"
        )


def _save_dir_of(run_dir: Path) -> Path | None:
    """Folder of the checkpoints of the run in `run_dir`; None if there is no run."""
    if run_id_of(run_dir) is None:
        return None
    saved = json.loads((run_dir / "config.json").read_text())["checkpoint"]["save"]
    return Path(saved or run_dir / "checkpoints")


def open_run_folder(config: Config, start: Start) -> None:
    """Write config.json, and put aside what a killed run wrote after the checkpoint; rank 0 calls it."""
    run_dir = Path(config.logging.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if start.iteration == 0 and (run_dir / "metrics.jsonl").is_file():  # killed before its first checkpoint
        aside = run_dir / f"before-{time.strftime('%Y%m%d-%H%M%S')}-{start.run_id}"
        aside.mkdir()
        for name in ("metrics.jsonl", "metrics", "config.json", "plans", "stats"):
            if (run_dir / name).exists():
                (run_dir / name).rename(aside / name)
    drop_later_plans(run_dir, start.iteration)
    write_atomic(run_dir / "config.json", json.dumps({"run_id": start.run_id, **config.to_dict()}, indent=1))


def drop_later_plans(run_dir: Path, iteration: int) -> None:
    """Remove plans and statistics of later iterations: made after the checkpoint, they will be made again."""
    for kind in ("plans", "stats"):
        (run_dir / kind).mkdir(exist_ok=True)
        for path in (run_dir / kind).glob("iter_*.json"):
            number = path.stem.removeprefix("iter_")
            if number.isdigit() and int(number) > iteration:
                path.unlink()


def saved_options(state: dict[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    """Options of a checkpoint's run for `config.parse`, those of some groups.

    Left out are those that were not set, and those that this version does not know.
    """
    known, saved = option_groups(), state["config"]
    found = {name: value for group in groups for name, value in saved.get(group, {}).items()}
    return {name: value for name, value in found.items() if known.get(name) in groups and value not in (None, [])}


def changed_options(config: Config, state: dict[str, Any]) -> list[str]:
    """`name: old -> new` for each model, training, data, precision or SNIP option that a resume changes."""
    now, out = config.to_dict(), []
    for group in ("model", "training", "data", "precision", "snip"):
        for name, value in now[group].items():
            old = state["config"].get(group, {}).get(name)
            if old != value:
                out.append(f"{name}: {old} -> {value}")
    return out


def checkpoint_of(load: str | None) -> tuple[Path, int]:
    """(folder of checkpoints, iteration) that --load names.  ValueError if there is none."""
    if not load:
        raise ValueError("--load names no checkpoint; give a folder of checkpoints, or an iter_ folder in it")
    folder = Path(load)
    if (one := re.fullmatch(r"iter_(\d+)", folder.name)) and (folder / STATE).is_file():
        return folder.parent, int(one[1])
    latest = latest_iteration(folder)
    if latest is None:
        raise ValueError(f"--load {load}: no checkpoint is there; give a folder of checkpoints, or an iter_ folder")
    return folder, latest


def with_saved_options(words: Sequence[str], groups: Sequence[str]) -> tuple[Config, Start]:
    """The options of a command line over those of the run that --load names, and that checkpoint as the start."""
    given = parse(words)
    folder, iteration = checkpoint_of(given.checkpoint.load)
    state = read_state(folder, iteration)
    saved = saved_options(state, groups)
    if any(getattr(given.data, name) for name in _SOURCES):
        saved = {name: value for name, value in saved.items() if name not in _SOURCES}
    config = parse(words, saved).replace(load=str(folder))
    return config, Start(state["iteration"], state, folder, iteration, state["run_id"])
