"""`pretrain_llama.py --dry-run`: what the command says, and what would help if the run does not fit."""

from __future__ import annotations

import contextlib

import torch

from megatron_snip import runtime
from megatron_snip.config import Config, TrainingConfig
from megatron_snip.errors import UserError
from megatron_snip.train.dry_run import measure
from megatron_snip.train.dry_run.counts import Measured
from megatron_snip.train.dry_run.output import as_text
from megatron_snip.train.memory_plan import auto
from megatron_snip.train.memory_plan.plan_file import read_memory_plan
from megatron_snip.train.validate import validate

GIB = 2**30


def dry_run(config: Config) -> None:
    """`pretrain_llama.py --dry-run`, on rank 0 only.  Raises UserError if the run does not fit --memory-gib."""
    world_size = config.dry_run.world_size or runtime.environment_world_size()
    # measured without these two, but they decide what is refused, and the first what is planned
    own = {"optimizer_impl": config.training.optimizer_impl, "log_edq_interval": config.logging.log_edq_interval}
    config = measure.without_files(config).replace(**own)
    validate(config, world_size)
    if runtime.environment_rank() > 0:
        return
    measured = _measured(config, world_size)
    runtime.say(as_text(config, world_size, measured))
    worst = max(measured, key=lambda one: one.worst.total)
    if config.dry_run.memory_gib is None:
        runtime.say(f"\n{needs(worst)}; --memory-gib GIB says whether that fits")
    else:
        check_memory(config, world_size, worst, config.dry_run.memory_gib)
        spare = config.dry_run.memory_gib - worst.worst.total / GIB
        runtime.say(f"\nfits in {config.dry_run.memory_gib:g} GiB with {spare:.1f} to spare: {needs(worst)}")


def _measured(config: Config, world_size: int) -> list[Measured]:
    """The ends of the pipeline under the memory plan, which is printed."""
    if config.training.memory_plan != "auto":
        if (plan := read_memory_plan(config, world_size)) is not None:
            runtime.say("\n".join([*auto.as_lines(plan), ""]))
        return measure.measure_all(config, world_size, measure.end_ranks(config, world_size))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    plan, measured = auto.make_plan(config, world_size, auto.budget_of(config, device))
    runtime.say("\n".join([*auto.as_lines(plan), ""]))
    return measured


def needs(worst: Measured) -> str:
    """The rank that needs the most memory, and how much."""
    return (
        f"rank {worst.rank}, pipeline stage {worst.stage}, needs {worst.worst.total / GIB:.1f} GiB ({worst.worst.name})"
    )


def check_memory(config: Config, world_size: int, worst: Measured, gib: float) -> None:
    """Raise UserError if the worst peak exceeds this many GiB.  Dry runs find the changes that would help."""
    if worst.worst.total <= gib * GIB:
        return
    found = []
    for words, changed in _changes(config):
        with contextlib.suppress(UserError):  # a layout that does not divide
            validate(changed, world_size)
            ends = measure.measure_all(changed, world_size, measure.end_ranks(changed, world_size))
            found.append((max(one.worst.total for one in ends) / GIB, words))
    if fits := [f"{words} ({peak:.1f} GiB)" for peak, words in found if peak <= gib]:
        way_out = f"it fits with {' or '.join(fits)}"
        if any(words.startswith("--recompute-granularity") for words in fits):
            way_out += "; --memory-plan auto recomputes no more than it must"
    else:
        least = ", ".join(f"{words} ({peak:.1f} GiB)" for peak, words in sorted(found)) or "no other layout divides"
        way_out = f"no single change makes it fit: {least}; combine changes or use more ranks"
    raise UserError(f"--memory-gib {gib:g}: {needs(worst)}; {way_out}")


def _changes(config: Config) -> list[tuple[str, Config]]:
    """Single changes that save memory per rank, as command-line words and as options."""
    p, changes = config.parallel, []
    if config.training.recompute_granularity == "none" and not config.training.compile:
        selective = config.replace(recompute_granularity="selective", recompute_modules=("core_attn", "mlp"))
        changes.append(("--recompute-granularity selective --recompute-modules core_attn mlp", selective))
    if config.training.recompute_granularity != "full":
        modules = TrainingConfig().recompute_modules
        without = "" if config.training.recompute_modules == modules else " without --recompute-modules"
        full = config.replace(recompute_granularity="full", recompute_modules=modules)
        changes.append((f"--recompute-granularity full{without}", full))
    if config.training.optimizer_precision == "fp32":
        changes.append(("--optimizer-precision collage-plus", config.replace(optimizer_precision="collage-plus")))
    if p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        changes.append(("--sequence-parallel", config.replace(sequence_parallel=True)))
    if config.training.micro_batch_size > 1:
        changes.append(("--micro-batch-size 1", config.replace(micro_batch_size=1)))
    option = "data_parallel_sharding_strategy"
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # in descending order of memory
    for strategy in strategies[strategies.index(p.data_parallel_sharding_strategy) + 1 :]:
        changes.append((f"--{option.replace('_', '-')} {strategy}", config.replace(**{option: strategy})))
    for option in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = 2 * getattr(p, option)
        changes.append((f"--{option.replace('_', '-')} {size}", config.replace(**{option: size})))
    return changes
