"""Before the first iteration, run every option and a probe once, so that problems show on the first day.

Kernels compile and memory peaks at the start instead of at --snip-start.  The tokens are synthetic and all results
are discarded: a preflight does not change a bit of the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from megatron_snip.config import Config
from megatron_snip.data.loader import Batch
from megatron_snip.quant import GEMMS, PLAIN, LinearPrecision
from megatron_snip.snip.measure.probe import ProbeFailed
from megatron_snip.train.build_model import build_pipeline
from megatron_snip.train.setup import Parts
from megatron_snip.train.step import Stepper

#: Up to this many options, all are tried.
FEW = 8
LOGGER = logging.getLogger("megatron_snip")


def made_up_batch(config: Config, microbatches: int) -> Batch:
    """Tokens and labels [M, B, S] from the vocabulary, for samples from 0 on."""
    shape = (microbatches, config.training.micro_batch_size, config.model.seq_length)
    tokens = (torch.arange(shape[0] * shape[1] * shape[2]) % int(config.model.vocab_size or 1)).reshape(shape)
    return Batch(tokens, tokens.roll(-1, dims=-1), torch.arange(shape[0] * shape[1]).reshape(shape[:2]))


def covering(options: Sequence[LinearPrecision]) -> list[LinearPrecision]:
    """All options if they are few; otherwise enough that each GEMM runs in each of its formats."""
    if len(options) <= FEW:
        return list(options)
    seen: set[tuple[str, str]] = set()
    found = []
    for option in options:
        pairs = {(gemm, getattr(option, gemm)) for gemm in GEMMS}
        if pairs - seen:
            found.append(option)
            seen |= pairs
    return found


def preflight(config: Config, parts: Parts) -> None:
    """Run a few microbatches in each option of the planner, and one probe.  Every rank must call it.

    The microbatches fill the pipeline.  There are at least two if an iteration has that many, so that gradients
    accumulate.
    """
    coordinator, mesh = parts.coordinator, parts.mesh
    if coordinator is None:
        return
    begin, device = time.perf_counter(), parts.stepper.pipeline.device
    microbatches = min(config.num_microbatches(mesh.dp.size), max(2, mesh.pp.size))
    pipeline = build_pipeline(config, mesh, parts.stages, device)
    pipeline.gathers = parts.stepper.pipeline.gathers  # which know how weights were gathered last
    stepper, zero_grad = Stepper(config, mesh, pipeline, parts.optimizer), parts.optimizer.zero_grad
    run_pass = stepper.pass_runner(made_up_batch(config, microbatches), 0)
    before = {name: linear.precision for name, linear in parts.linears.items()}
    final, options = coordinator.final, coordinator.options
    options = list(dict.fromkeys([*options, *(final.of(option) for option in options)])) if final else options
    for option in covering(options):
        for linear in parts.linears.values():
            linear.precision = option
        run_pass(0, PLAIN)
        zero_grad()
    for name, linear in parts.linears.items():
        linear.precision = before[name]
    try:
        coordinator.measure(0, run_pass, zero_grad, batches=1)
    except ProbeFailed as error:
        LOGGER.warning(f"preflight: {error}; probes may fail in training too, and then keep the plan in force")
    seconds, tried = time.perf_counter() - begin, ", ".join(map(str, covering(options)))
    peak = f", {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB at most" if device.type == "cuda" else ""
    LOGGER.info(f"preflight: {tried} and a probe in {seconds:.1f} s{peak}")
