"""The run folder: where a run starts from, and what keeps two runs apart.

A run gets an id when it starts at iteration 0, and keeps it in config.json and in every checkpoint.
Nothing is written before every rank has passed the checks.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_snip.arguments import WITHOUT_PLANS, parse
from megatron_snip.checkpoint.lock import living_holder
from megatron_snip.checkpoint.low_parts import readable
from megatron_snip.checkpoint.manifest import (
    Damaged,
    check,
    folder_of,
    iteration_of,
    iterations,
    naming,
    newest,
)
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.config import Config, ModelConfig
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_folder
from megatron_snip.files.json import write_json
from megatron_snip.interop.huggingface import check_model, is_hf_folder, load_hf, model_options
from megatron_snip.model.spec import spec_of
from megatron_snip.quant.adamw.expansion import LOW
from megatron_snip.runtime import environment_rank, made_with
from megatron_snip.train.run.state_file import read_run_file, read_state

LOGGER = logging.getLogger("megatron_snip")
#: Model options that determine which weights exist and what they mean, for any sequence length.
SHAPE = (
    "model_name", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "untie_embeddings_and_output_weights", "norm_epsilon",
)  # fmt: skip
#: Model options that matter only at initialisation; a vocabulary of another size fails by its shape.
INITIAL = {"init_method_std", "vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings"}
#: Sources of data: giving one replaces all sources of the checkpoint's run.
_SOURCES = ("data_path", "train_data_path", "valid_data_path", "mock_data")


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    iteration: int  # updates already made
    state: dict[str, Any] | None  # state.json of the checkpoint, None for a start from new weights
    load: Path | None  # folder of checkpoints, or Hugging Face folder, to read tensors from
    load_iteration: int  # the checkpoint in it
    run_id: str


def find_checkpoint(load: str, step: int | None, below: int | None = None) -> tuple[Path, int | None]:
    """(folder of checkpoints, iteration) from --load and --ckpt-step; None if there is no checkpoint.

    By default the newest complete one; skipped ones are logged.  below: consider only earlier iterations.
    Raises UserError if the named checkpoint is incomplete, or if none is complete.
    """
    folder = Path(load)
    if (number := iteration_of(folder)) is not None:
        if step not in (None, number):
            raise UserError(f"--load {load} is from iteration {number}, but --ckpt-step is {step}; drop one")
        folder, step = folder.parent, number
    if step is None:
        found, passed_over = newest(folder, below)
        for why in passed_over:
            LOGGER.warning(f"skipped {why}")
        if found is None and iterations(folder / "checkpoints"):  # of a run folder
            raise UserError(f"{folder} holds no checkpoint itself, but {folder}/checkpoints does; give that folder")
        return folder, found
    if folder_of(folder, step).is_dir():
        with naming(folder, step):
            check(folder, step)
        return folder, step
    held = ", ".join(map(str, iterations(folder))) or "none"
    raise UserError(f"--load {load}: no whole checkpoint of iteration {step} is there; those of this folder: {held}")


def find_start(config: Config, below: int | None = None) -> Start:
    """Decide where to start, without writing.  Raises UserError if continuing would mix or overwrite runs.

    below: consider only checkpoints before this iteration, which turned out to be damaged.
    """
    c, log, run_dir = config.checkpoint, config.logging, Path(config.logging.run_dir)
    wandb = log.wandb_save_dir if log.wandb_project else None
    folders = {"--run-dir": run_dir, "--save": config.save_dir, "--tensorboard-dir": log.tensorboard_dir}
    for option, folder in {**folders, "--wandb-save-dir": wandb}.items():
        if folder is not None and environment_rank() == 0:  # other nodes need not see them
            check_folder(option, Path(folder))
    if c.load and is_hf_folder(Path(c.load)):
        if c.pretrained_checkpoint:
            raise UserError(
                f"--load {c.load} is a Hugging Face folder, whose weights a new run takes, and "
                f"--pretrained-checkpoint is {c.pretrained_checkpoint}; drop one"
            )
        return _start_from_hf(config, Path(c.load), resuming=False)
    load, saved = find_checkpoint(c.load, c.ckpt_step, below) if c.load else (None, None)
    if load is not None and saved is None:
        if c.exit_on_missing_checkpoint:
            raise UserError(
                f"--load {c.load}: no checkpoint is there; drop --exit-on-missing-checkpoint to start a new run"
            )
        if load.resolve() != config.save_dir.resolve() and not (c.finetune or c.no_load_optim):
            raise UserError(
                f"--load {c.load}: no checkpoint is there; correct the path, or drop --load to start a new run "
                f"(--load and --save of the same folder start one too)"
            )
    if saved is None and c.pretrained_checkpoint:
        return _start_from_weights(config, Path(c.pretrained_checkpoint), below)
    if saved is None and (c.finetune or c.no_load_optim):
        option = "--finetune" if c.finetune else "--no-load-optim"
        raise UserError(f"{option} needs a checkpoint, but --load is {c.load}; give a folder that holds one")
    if saved is None or c.finetune:
        _refuse_used_folders(config, resuming=bool(c.load) and not c.finetune)
        if saved is None or load is None:
            return _new_run(None, 0)
        refuse_other_model(config, read_state(load, saved), finetune=True)
        return _new_run(load, saved)
    assert load is not None
    state = read_state(load, saved)
    if state["weights_alone"]:
        raise UserError(f"--load {c.load} holds only weights; give --finetune to start a new run from them")
    here = run_id_of(run_dir)
    if here is not None and here != state["run_id"]:
        raise UserError(
            f"--run-dir {run_dir} holds run {here}, but {load} belongs to run {state['run_id']}; "
            "give another --run-dir, or --finetune to start a new run from these weights"
        )
    _refuse_other_saves(config.save_dir, load, state)
    refuse_other_model(config, state, finetune=False)
    return Start(state["iteration"], state, load, saved, state["run_id"])


def _new_run(load: Path | None, iteration: int) -> Start:
    """A run from iteration 0, with new weights or those of a checkpoint."""
    return Start(0, None, load, iteration, secrets.token_hex(8))


def _start_from_hf(config: Config, folder: Path, *, resuming: bool) -> Start:
    """A new run from the weights of a Hugging Face folder, with or without --finetune."""
    if config.checkpoint.ckpt_step is not None:
        raise UserError(f"--load {folder} is a Hugging Face folder, which has no iterations; drop --ckpt-step")
    check_model(folder, config.model)
    _refuse_used_folders(config, resuming=resuming)
    return _new_run(folder, 0)


def _start_from_weights(config: Config, folder: Path, below: int | None) -> Start:
    """A new run from the weights of --pretrained-checkpoint, because --load has no checkpoint yet."""
    resuming = bool(config.checkpoint.load)
    if is_hf_folder(folder):
        return _start_from_hf(config, folder, resuming=resuming)
    holder, iteration = find_checkpoint(str(folder), None, below)
    if iteration is None:
        raise UserError(f"--pretrained-checkpoint {folder}: no checkpoint is there; give a folder that holds one")
    refuse_other_model(config, read_state(holder, iteration), finetune=True, source=folder)
    _refuse_used_folders(config, resuming=resuming)
    return _new_run(holder, iteration)


def read_tensors(start: Start, tensors: Mapping[str, Tensor]) -> None:
    """Read a run's initial tensors in place, by their names in our checkpoints.  Every rank must call it.

    Raises UserError, before it reads anything, if one is missing or has another shape.  Raises Damaged if a checkpoint
    differs from what was written.
    """
    assert start.load is not None
    begin, what = time.perf_counter(), f"loaded and verified iteration {start.load_iteration}"
    if is_hf_folder(start.load):
        what = "loaded the weights"
        spec = spec_of(ModelConfig(**model_options(start.load)))
        wanted, finish = readable(tensors, {name: torch.float32 for name in tensors if not name.endswith(LOW)})
        load_hf(start.load, {name.removeprefix("model."): tensor for name, tensor in wanted.items()}, spec)
        finish()
    else:
        load_tensors(start.load, start.load_iteration, tensors)
    LOGGER.info(f"{what} of {start.load} in {time.perf_counter() - begin:.2f} s")


def earlier_start(config: Config, start: Start, why: Damaged) -> Start:
    """Another start, because `start`'s checkpoint turned out to be damaged while it was read.

    Raises UserError if no other can be continued, or if the options name this one.
    """
    c = config.checkpoint
    assert start.load is not None
    folder = folder_of(start.load, start.load_iteration)
    named = [Path(path) for path in (c.load, c.pretrained_checkpoint) if path]
    its_own = any((path.parent, iteration_of(path)) == (start.load, start.load_iteration) for path in named)
    if c.ckpt_step is not None or its_own:
        raise UserError(f"{folder}: {why}; load another iteration")
    LOGGER.warning(f"skipped {folder}: {why}")
    return find_start(config, below=start.load_iteration)


def refuse_other_model(config: Config, state: dict[str, Any], *, finetune: bool, source: object = None) -> None:
    """Raise UserError unless a checkpoint continues with the model and data order that it was trained with.

    `finetune` takes only its weights, so it may change positions and data.  source: its folder, by default --load.
    """
    now, then, source = config.to_dict(), state["config"], source or config.checkpoint.load
    fixed = [("model", name) for name in (SHAPE if finetune else now["model"].keys() - INITIAL)]
    if not finetune:
        fixed += [("training", name) for name in ("global_batch_size", "rampup_batch_size", "seed")]
        fixed += [("data", "split")]
    for group, name in fixed:
        old, new = then[group][name], now[group][name]
        if old != new:
            option = name.replace("_", "-")
            old, new = (" ".join(map(str, value)) if isinstance(value, list) else value for value in (old, new))
            instead = "" if finetune else ", or start a new run from these weights with --finetune"
            given, trained = "not given" if new == "" else new, "out it" if old == "" else f" {old}"
            raise UserError(
                f"--{option} is {given}, but the checkpoint in {source} was trained with{trained}; "
                f"{f'leave --{option} out' if old == '' else f'give --{option} {old}'}{instead}"
            )


def run_id_of(run_dir: Path) -> str | None:
    """Id of the run in a folder; None if it has none."""
    found = _run_of(run_dir)
    return None if found is None else found[0]


def _run_of(run_dir: Path) -> tuple[str, Config] | None:
    """Id and options of the run in a folder, from its config.json; None if it has none."""
    path = run_dir / "config.json"
    return read_run_file(path, "move the folder aside")[:2] if path.is_file() else None


def _refuse_other_saves(save: Path, load: Path, state: dict[str, Any]) -> None:
    """Raise UserError if --save has checkpoints of another run, or later ones of this run.

    A requeued job that repeats the same command would rename the later ones and go back each time.
    """
    held = newest(save)[0] if save.resolve() != load.resolve() else None
    if held is None:
        return
    if (other := read_state(save, held)["run_id"]) != state["run_id"]:
        raise UserError(
            f"--save {save} holds checkpoints of run {other}, but {load} belongs to run {state['run_id']}; "
            "give another --save"
        )
    if held > state["iteration"]:
        raise UserError(
            f"--save {save} holds iteration {held} of this run, and --load {load} would go back to iteration "
            f"{state['iteration']}; --load {save} continues it, or give another --save"
        )


def _refuse_used_folders(config: Config, *, resuming: bool) -> None:
    """Raise UserError unless a run from iteration 0 has unused folders, or `--load` allows it to start over."""
    run_dir, save = Path(config.logging.run_dir), config.save_dir
    without = " without --finetune" if config.checkpoint.finetune else ""
    if held := iterations(save):
        raise UserError(
            f"{save} already holds checkpoints up to iteration {held[0]}; --load {save}{without} continues them, "
            "or give another --run-dir and --save"
        )
    other = _save_dir_of(run_dir)
    if resuming and other is not None and other.resolve() != save.resolve():
        raise UserError(
            f"--run-dir {run_dir} holds a run that saves to {other}, not to {save}; --load {other} continues it, "
            "or give another --run-dir"
        )
    if not resuming and (run_dir / "metrics.jsonl").is_file():
        c, way = config.checkpoint, f"{other or save}{without} continues it"
        if (weights := c.pretrained_checkpoint or c.load) and not iterations(other or save):  # --load alone starts over
            named = folder_of(Path(weights), c.ckpt_step) if c.ckpt_step is not None else weights
            way = f"{other or save} --pretrained-checkpoint {named}{without} begins it again"
        raise UserError(f"--run-dir {run_dir} already holds a run; --load {way}, or give another --run-dir")


def _save_dir_of(run_dir: Path) -> Path | None:
    """The checkpoint folder of the run in `run_dir`; None if there is no run."""
    found = _run_of(run_dir)
    return None if found is None else Path(found[1].checkpoint.save or run_dir / "checkpoints")


def refuse_live_run_folder(config: Config) -> None:
    """Raise UserError if another process trains in the run folder and saves elsewhere.  Rank 0 calls it first."""
    run_dir = Path(config.logging.run_dir)
    other = _save_dir_of(run_dir)
    if other is None or other.resolve() == config.save_dir.resolve():
        return  # the lock of --save decides
    if holder := living_holder(other):
        raise UserError(
            f"--run-dir {run_dir} belongs to {holder}, which is still running and saves to {other}; "
            "wait until it ends, or give another --run-dir"
        )


def advice(config: Config) -> str:
    """What to do after a failure, as the end of a line."""
    save = config.save_dir
    try:
        saved, _ = newest(save)
    except (OSError, ValueError):
        saved = None
    if saved is None:
        return f"it has no checkpoint yet, start it again (stacks are in {config.logging.run_dir}/stacks)"
    return (
        f"its last checkpoint is iteration {saved}, continue it with --load {save} "
        f"(stacks are in {config.logging.run_dir}/stacks)"
    )


def open_run_folder(config: Config, start: Start) -> None:
    """Write config.json, and set aside what a killed run wrote after the checkpoint.  Rank 0 calls it."""
    run_dir = Path(config.logging.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    config.save_dir.mkdir(parents=True, exist_ok=True)  # fail now rather than at the first save
    if start.iteration == 0 and (run_dir / "metrics.jsonl").is_file():  # killed before its first checkpoint
        aside = run_dir / f"before-{time.strftime('%Y%m%d-%H%M%S')}-{start.run_id}"
        aside.mkdir()
        for name in ("metrics.jsonl", "metrics", "config.json", "plans", "stats", "evaluations"):
            if (run_dir / name).exists():
                (run_dir / name).rename(aside / name)
    drop_later_plans(config, start.iteration)
    if start.iteration < config.training.train_iters or run_id_of(run_dir) is None:  # else keep those of what ran
        write_json(run_dir / "config.json", {"run_id": start.run_id, **config.to_dict(), "versions": made_with()})


def drop_later_plans(config: Config, iteration: int) -> None:
    """Remove plans and statistics of later iterations, which will be made again, but not the plan that the run follows.

    Scores of later checkpoints, which no longer exist, are renamed.
    """
    run_dir, followed = Path(config.logging.run_dir), Path(config.precision.precision_plan or "").resolve()
    for kind in ("plans", "stats"):
        (run_dir / kind).mkdir(exist_ok=True)
    for path in [path for kind in ("plans", "stats", "evaluations") for path in (run_dir / kind).glob("iter_*.json")]:
        number = path.stem.removeprefix("iter_")
        if number.isdigit() and int(number) > iteration and path.resolve() != followed:
            if path.parent.name == "evaluations":
                path.rename(path.with_name(f"{path.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"))
            else:
                path.unlink()


def saved_options(state: dict[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    """Options from some groups that were set in a checkpoint's run, for `arguments.parse`."""
    found = {name: value for group in groups for name, value in state["config"][group].items()}
    return {name: value for name, value in found.items() if value not in (None, [])}


def changed_options(config: Config, state: dict[str, Any]) -> list[str]:
    """`name: old -> new` for each option that changes on resume; none of layouts, nor of plans in a run without."""
    now, then, plans = config.to_dict(), state["config"], config.precision.precision == "snip"
    names = [(group, name) for group in ("model", "training", "data", "precision", "snip") for name in now[group]]
    names = [(group, name) for group, name in names if group != "snip" or plans or name in WITHOUT_PLANS]
    names.append(("parallel", "grad_reduce_in_bf16"))
    values = [(name, then[group][name], now[group][name]) for group, name in names]
    return [f"{name}: {old} -> {new}" for name, old, new in values if old != new]


def options_of(words: Sequence[str], groups: Sequence[str]) -> Config:
    """Command-line options, on top of those of the run that --load names, if it is given."""
    config = parse(words)
    return with_saved_options(words, groups)[0] if config.checkpoint.load else config


def with_saved_options(words: Sequence[str], groups: Sequence[str]) -> tuple[Config, Start]:
    """Command-line options on top of those of the run that --load names, and that checkpoint as the start.

    For a Hugging Face folder, only the model's options are added.
    """
    given = parse(words)
    if not given.checkpoint.load:
        raise UserError("--load names no checkpoint; give a folder of checkpoints, or an iter_ folder in it")
    if is_hf_folder(Path(given.checkpoint.load)):
        folder = Path(given.checkpoint.load)
        return parse(words, model_options(folder) if "model" in groups else {}), Start(0, None, folder, 0, "")
    folder, iteration = find_checkpoint(given.checkpoint.load, given.checkpoint.ckpt_step)
    if iteration is None:
        raise UserError(
            f"--load {folder}: no checkpoint is there; give a folder of checkpoints, an iter_ folder in it, or a "
            "Hugging Face model (config.json with .safetensors files)"
        )
    state = read_state(folder, iteration)
    saved = saved_options(state, groups)
    saved.pop("data_cache_path", None)  # a checkpoint may be untrusted, and this folder is written to
    if any(getattr(given.data, name) for name in _SOURCES):
        saved = {name: value for name, value in saved.items() if name not in _SOURCES}
    config = parse(words, saved).replace(load=str(folder))
    return config, Start(state["iteration"], state, folder, iteration, state["run_id"])
