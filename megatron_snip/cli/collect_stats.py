r"""Probe a checkpoint without training: collect the statistics that plans are made from.

    megatron-snip probe --load runs/my/checkpoints
    torchrun --rdzv-backend one_node --nproc_per_node 8 -m megatron_snip.cli probe \
        --load runs/my/checkpoints/iter_0001000 --output stats.json \
        --tensor-model-parallel-size 4 --snip-options fp8,fp4,nvfp4

--load names a checkpoint, or a folder of checkpoints: the newest is probed.  Model, data, batch and SNIP
options come from its run; you can override them with the trainer's options, on the command line or by --config FILE.
The layout does not come from the run.  --load may also be a Hugging Face model; then give data, batch and seq-length.
--snip-options names the formats.  The probe reads what the run would probe next: the coming batches, until it has
--snip-probe-tokens, all with these weights.  It writes only --output.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from torch import nn

from megatron_snip import runtime
from megatron_snip.checkpoint.manifest import naming
from megatron_snip.cli import parsers
from megatron_snip.config import Config
from megatron_snip.data.loader import Batch
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output
from megatron_snip.interop.huggingface import check_model
from megatron_snip.snip.measure.probe import ProbeFailed
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.options import read_times
from megatron_snip.snip.planner import ask
from megatron_snip.snip.predict.sampling import LEAST_TOKENS, batches_of, suffices
from megatron_snip.train.health.memory import TRAINING, WEIGHTS, warn_about_memory
from megatron_snip.train.memory_plan.auto import plan_of_run
from megatron_snip.train.run.run_folder import Start, read_tensors, refuse_other_model, with_saved_options
from megatron_snip.train.run.state_file import new_state
from megatron_snip.train.setup import Parts, agree_on, build, check

LOGGER = logging.getLogger("megatron_snip")


#: (ahead, samples=None) -> the batch that is ``ahead`` after a checkpoint's next one, or this many samples from there.
Batches = Callable[..., Batch]


def probe_config(config: Config, iteration: int, batches: int) -> Config:
    """Options to build a run that only probes."""
    t = config.training  # a finished run has no next batch; --train-samples determines the iterations
    longer = {"train_iters": 0 if t.train_samples else max(t.train_iters, iteration + batches)}
    return config.replace(
        precision="snip",
        precision_plan=None,
        snip_target=0.0,  # nothing is planned
        snip_max_loss=None,
        snip_objective="snip",  # the run's own may be unknown here
        eval_interval=None,
        memory_plan="none",  # it may be for another layout
        memory_gib=None,
        host_memory_gib=None,
        host_bandwidth=None,
        wandb_project=None,
        **longer,
    )


def prepare(config: Config, start: Start, batches: int, *, updates: bool = True) -> tuple[Parts, Batches, int]:
    """Build a checkpoint's run: its parts, its coming batches, and the next iteration.

    updates: whether the probe needs the optimiser's moments.  Every rank must call it.  Raises UserError for bad input.
    """
    assert start.load is not None
    config, _ = check(probe_config(config, start.iteration, batches), runtime.environment_world_size())
    config = config.with_defaults()
    state = start.state or new_state("", config)
    alone = state["weights_alone"]  # then the probe is of the first update
    if start.state is None:
        check_model(start.load, config.model)
    else:
        refuse_other_model(config, state, finetune=alone)
    p = config.parallel
    here = runtime.start(p.distributed_backend, p.distributed_timeout_minutes, device=p.device)
    start = agree_on(config, start)
    warn_about_memory(config, here, TRAINING if updates else WEIGHTS)
    memory_plan = plan_of_run(config, here) if updates else None
    parts = build(config, here, None, draw=False, moments=updates, memory_plan=memory_plan)
    assert parts.coordinator is not None
    if not updates:  # skip the linears' weight gradients, a third of the pass
        for linear in parts.coordinator.probe.linears.values():
            cast(nn.Module, linear).requires_grad_(False)
    assert start.load is not None
    with naming(start.load, start.load_iteration):
        read_tensors(start, {n: t for n, t in parts.tensors().items() if not alone or n.startswith("model.")})
    parts.optimizer.set_steps(state["optimizer_steps"])
    consumed = state["consumed_samples"]
    size = parts.train_loader.size(consumed)
    parts.coordinator.probe.tokens = size * config.model.seq_length

    def batch(ahead: int, samples: int | None = None) -> Batch:
        return parts.train_loader.make(consumed + ahead * size, samples or size)

    runtime.seed_iteration(config.training.seed, start.iteration + 1)
    return parts, batch, start.iteration + 1


def collect(config: Config, start: Start) -> Statistics:
    """Build the run from its checkpoint, and probe.  Every rank must call it.  Raises UserError for bad input."""
    size = config.training.batch_size(start.state["consumed_samples"] if start.state else 0)
    batches = batches_of(config.snip, size * config.model.seq_length)
    parts, batch, iteration = prepare(config, start, batches)
    assert parts.coordinator is not None
    begin, run_pass = time.perf_counter(), parts.stepper.pass_runner(batch(0), iteration, batch)
    probe, of = parts.coordinator.probe, (config.snip, parts.coordinator.shapes, parts.coordinator.choices)

    def enough(stats: Statistics, tokens: int) -> bool:  # for the target of ``config``: the run itself plans nothing
        request, _ = ask(*of, stats, times=read_times(config.snip), objective="snip")
        return tokens >= LEAST_TOKENS and suffices(stats, of[2].options, request)

    auto = config.snip.snip_probe_tokens == "auto"
    try:
        stats = probe.run(run_pass, parts.optimizer.zero_grad, iteration, batches, enough=enough if auto else None)
    except ProbeFailed as error:  # on every rank alike
        raise UserError(f"--load {start.load}, iteration {start.load_iteration}: {error}") from None
    finally:
        parts.train_loader.close()
    LOGGER.info(f"probed {probe.seen} tokens: loss {stats.loss:.4f}, {time.perf_counter() - begin:.1f} s")
    return stats


def write(stats: Statistics, output: Path, load: Path) -> None:
    """Save the statistics, and print a summary and the next command."""
    if bad := stats.not_finite:
        LOGGER.warning(f"statistics are not finite, so plans hold these linears at the base option: {', '.join(bad)}")
    stats.save(output)
    print(
        f"{output}: {len(stats.shapes)} linears in {', '.join(stats.formats)}, before iteration {stats.iteration}, "
        f"loss {stats.loss:.4f}; next: megatron-snip plan --stats {output} --load {load}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line.  Raises UserError for bad input."""
    own, rest = parsers.probe().parse_known_args(arguments)
    output = Path(own.output)
    check_output("--output", output)
    config, start = with_saved_options(rest, ("model", "training", "data", "snip"))
    stats = collect(config, start)
    if runtime.environment_rank() == 0:
        write(stats, output, Path(config.checkpoint.load or ""))
    runtime.stop()
