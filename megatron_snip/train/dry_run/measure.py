"""`--dry-run`: a run's own code on fake tensors, which have a shape but no memory, one rank after another.

Mesh, stages, FSDP2, pipeline, optimiser, stepper and probe are those of training.  Collectives use torch's fake process
group, and nothing is read from or written to a run folder.  The dry run measures the first and last pipeline stages,
and the second if it has more blocks than the first: an iteration in each precision that the run may use, and a probe,
each with a whole --global-batch-size, and a forward pass of a trial.

Not counted: memory that kernels allocate internally (cuBLAS's workspace), NCCL's buffers, and fragmentation of the
caching allocator.

With many microbatches, only enough to fill the pipeline are run.  Each further one adds to the counts what happens
between the last two, and nothing to the peak.  An interleaved pipeline repeats after each round.

Blocks run without --compile, since the compiler does not accept fake tensors.  Compiled blocks launch fewer kernels and
keep other tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from megatron_snip.config import Config
from megatron_snip.data.loader import Batch
from megatron_snip.data.workers import end_with_parent
from megatron_snip.model.build import Build
from megatron_snip.model.llama import LlamaStage
from megatron_snip.model.stages import is_interleaved, stage_blocks
from megatron_snip.parallel.data import local_of
from megatron_snip.quant import LinearPrecision
from megatron_snip.runtime import Runtime
from megatron_snip.snip.measure.probe import Pass
from megatron_snip.snip.plan.cost import efficiency, stages
from megatron_snip.snip.plan.options import read_choices
from megatron_snip.snip.predict.sampling import batches_of
from megatron_snip.train.dry_run.by_linear import Linears
from megatron_snip.train.dry_run.counts import HOST, Measured, Stretch, Tracker
from megatron_snip.train.dry_run.device import as_on, device_of
from megatron_snip.train.dry_run.output import PROBE, TRIAL, trial_passes, trial_samples
from megatron_snip.train.dry_run.phases import Phases, Recorder
from megatron_snip.train.dry_run.units import units_of
from megatron_snip.train.memory_plan.plan_file import MemoryPlan
from megatron_snip.train.setup import Parts, build, check, mesh_of, snip_shapes

GPU_GRANULE = 512  # bytes; torch's CUDA allocator rounds up to this


def without_files(config: Config) -> Config:
    """The same run on mock tokens and without files, except a tokenizer if the vocabulary size is missing."""
    if config.model.vocab_size is not None:
        config = config.replace(tokenizer_type="NullTokenizer", tokenizer_model=None)
    return config.replace(
        mock_data=True, data_path=(), train_data_path=(), valid_data_path=(), data_cache_path=None, num_workers=0,
        wandb_project=None, tensorboard_dir=None, eval_interval=None, log_edq_interval=0, optimizer_impl="torch",
    )  # fmt: skip


def end_ranks(config: Config, world_size: int) -> list[int]:
    """A rank of the first pipeline stage, one of the last, and one of the second if that has the most blocks."""
    p, each = config.parallel, world_size // config.parallel.pipeline_model_parallel_size
    pp, stages = p.pipeline_model_parallel_size, stage_blocks(config.model.num_layers, p)
    blocks = [sum(map(len, stages[process::pp])) for process in range(pp)]
    # the first has the most microbatches in flight; those between the ends are alike, and the second has most of them
    middle = [1] if pp > 2 and blocks[1] > blocks[0] else []
    return [each * process for process in dict.fromkeys([0, *middle, pp - 1])]


def measure_all(
    config: Config, world_size: int, ranks: Sequence[int], memory_plan: MemoryPlan | None = None
) -> list[Measured]:
    """`measure` of each rank, in parallel processes."""
    with processes(min(2, len(ranks))) as pool:
        return [job.result() for job in [pool.submit(measure, config, world_size, rank, memory_plan) for rank in ranks]]


def processes(count: int) -> ProcessPoolExecutor:
    """Processes for `measure` and `measure_phases`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(count, context, end_with_parent)


def measure(config: Config, world_size: int, rank: int, memory_plan: MemoryPlan | None = None) -> Measured:
    """Build and run one rank of a run on fake tensors; replaces this process's process group.

    memory_plan: by default that of --memory-plan FILE.
    """
    with _built(config, world_size, rank, memory_plan) as stretches:
        return stretches.measured()


def measure_phases(
    config: Config, world_size: int, rank: int, memory_plan: MemoryPlan, precision: LinearPrecision | None = None
) -> list[tuple[Stretch, Phases]]:
    """The same cut into phases, without trials, which keep nothing for a backward.

    precision: instead, only an iteration with all linears in it, with what depends on formats.  The options of
    --precision snip then decide the device alone.
    """
    with _built(config, world_size, rank, memory_plan) as stretches:
        linears = stretches.parts.linears
        if precision is None:
            stretches.recorder = stretches.recorded()
            measured = stretches.measured(trials=False).stretches
        else:
            stretches.recorder = stretches.recorded(Linears(stretches.tracker, linears))
            for linear in linears.values():
                linear.precision = precision
            measured = (stretches.iteration(f"iteration, {precision}"),)
        return list(zip(measured, stretches.phases, strict=True))


@contextlib.contextmanager
def _built(config: Config, world_size: int, rank: int, memory_plan: MemoryPlan | None) -> Iterator[_Stretches]:
    config = without_files(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # fake tensors have no address, a fake group has no time-out
        device = device_of(config)
        if device != "cpu":
            stack.enter_context(as_on(device))
            if not torch.cuda.is_available():  # nothing queries the GPU
                config = config.replace(distributed_backend="auto", device="auto")
        config, plan = check(config, world_size)
        here = Runtime(rank, world_size, rank, torch.device("cpu"))
        _join_fake_group(rank, world_size)
        stack.callback(dist.destroy_process_group)
        tracker = Tracker(1 if device == "cpu" else GPU_GRANULE)
        few, left_out, forwards = _few_microbatches(config, config.data_parallel_size(world_size))
        mesh = mesh_of(config, here)
        tracker.name_axes(mesh)
        stack.enter_context(_on_fake_tensors(tracker))
        stack.enter_context(tracker)
        parts = build(few.replace(compile=False), here, plan, draw=False, mesh=mesh, memory_plan=memory_plan)
        yield _Stretches(config, few, (left_out, forwards), parts, tracker)


def _join_fake_group(rank: int, world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


@contextlib.contextmanager
def _on_fake_tensors(tracker: Tracker) -> Iterator[None]:
    """Make tensors fake, except a mesh's tables of ranks.  Arrays read from fake tensors are zeros."""

    def outside_modes(plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: object, **options: object) -> Any:
            with _disable_current_modes():
                return plain(*args, **options)

        return run

    def zeros(tensor: Tensor) -> np.ndarray[tuple[int, ...], Any]:
        tracker.counts["read",] += 1
        return np.zeros(tuple(tensor.shape), np.float64 if tensor.is_floating_point() else np.int64)

    with (
        mock.patch.object(DeviceMesh, "__init__", outside_modes(DeviceMesh.__init__)),
        mock.patch.object(FakeTensor, "numpy", zeros),
        # fake weights are allocated directly: torch cannot replace one fake tensor by another
        mock.patch.object(
            Build, "empty", lambda build, *shape: torch.empty(shape, device=build.device, dtype=build.weight_dtype)
        ),
        mock.patch.object(LlamaStage, "to_empty", lambda stage, *, device: stage),
        FakeTensorMode(),
    ):
        yield


def _few_microbatches(config: Config, dp: int) -> tuple[Config, int, int]:
    """The options with a batch that just fills the pipeline and runs on for a while; how often the stretch between its
    last forwards is left out; and how many forwards that stretch has.
    """
    p, t, wanted = config.parallel, config.training, config.num_microbatches(dp)
    pp, each, times, forwards = p.pipeline_model_parallel_size, 1, p.pipeline_model_parallel_size + 2, 1
    if is_interleaved(config.model.num_layers, p):  # microbatches come in rounds; two fill the pipeline
        each, times = wanted // max(1, wanted // pp), 3
        forwards = each * len(stage_blocks(config.model.num_layers, p)) // pp
    few = min(wanted // each, times)
    batch = few * each * t.micro_batch_size * dp
    return config.replace(global_batch_size=batch, rampup_batch_size=()), wanted // each - few, forwards


class _Stretches:
    """Runs the stretches of one rank.

    config has the whole batch, few the part that is run.  left_out: how often a repeated stretch is left out, and how
    many forwards it has.
    """

    def __init__(self, config: Config, few: Config, left_out: tuple[int, int], parts: Parts, tracker: Tracker) -> None:
        self.config, self.left_out, self.parts, self.tracker = config, left_out, parts, tracker
        optimizer, mesh = parts.optimizer, parts.mesh
        weights, self.stored = [local_of(p.detach()) for p in optimizer.parameters.values()], 0
        self.parameters = sum(weight.numel() for weight in weights)
        tracker.memory.mark((b for stage in parts.stages.values() for b in stage.buffers()), "parameters")
        tracker.memory.mark(weights, "parameters")
        tracker.memory.mark(optimizer.state(), "optimiser")
        tracker.memory.mark(optimizer.state(host=True), HOST)
        for tensor in optimizer.pinned():
            tracker.memory.is_on_host(tensor)
        tracker.has_host = bool(optimizer.pinned())
        m, t = few.model, few.training
        shape = (few.num_microbatches(mesh.dp.size), t.micro_batch_size)
        tokens, labels = (torch.zeros(*shape, m.seq_length, dtype=torch.int64) for _ in range(2))
        self.batch = Batch(tokens, labels, torch.zeros(shape, dtype=torch.int64))
        parts.stepper.before_update = self._mark_gradients
        for stage in parts.stages.values():
            stage.register_forward_pre_hook(lambda *_: tracker.lap(), prepend=True)
        self.before, self.kept = 0, 0
        self.recorder: Recorder | None = None
        self.phases: list[Phases] = []  # of each stretch, with a recorder
        blocks = [block for stage in parts.stages.values() for block in stage.blocks().values()]
        for block in blocks[:1]:  # none if a rank has only the embedding or output layer
            block.register_forward_pre_hook(self._before_block)
            block.register_forward_hook(self._after_block)

    def _before_block(self, *_: object) -> None:
        self.before = self._of_forward()

    def _after_block(self, *_: object) -> None:
        if torch._C._current_graph_task_id() == -1:  # not recomputation in backward
            self.kept = self._of_forward() - self.before

    def recorded(self, linears: Linears | None = None) -> Recorder:
        """A recorder of phases."""
        stages, memory = self.parts.stages, self.tracker.memory
        offload = next(iter(stages.values())).build.offload

        def leave() -> None:
            if offload is not None:
                offload.free_what_left()

        def serve_all() -> set[int]:
            return {id(memory.of(part)) for part in self._weight_casts()}

        return Recorder(self.tracker, stages, serve_all, leave, linears)

    def _of_forward(self) -> int:
        """Bytes made by forwards, without casts of weights, which serve all microbatches."""
        return self.tracker.memory.of_forward(self._weight_casts())

    def _weight_casts(self) -> list[Tensor]:
        casts = [linear.weight_casts for stage in self.parts.stages.values() for linear in stage.linears().values()]
        return [part for one in casts if one is not None for part in one.tensors()]

    def _mark_gradients(self) -> None:
        optimizer = self.parts.optimizer
        grads = [local_of(p.grad) for p in optimizer.parameters.values() if p.grad is not None]
        self.tracker.memory.mark(grads, "gradients")
        weights = [local_of(p.detach()) for p in optimizer.parameters.values()]
        self.stored = sum(one.nbytes for one in (*weights, *grads, *optimizer.state()))

    def measured(self, *, trials: bool = True) -> Measured:
        """All stretches of this rank."""
        kind, mesh = self.config.precision.precision, self.parts.mesh
        stretches = []
        if kind != "snip":
            stretches.append(self._stretch(f"iteration, {kind}", self._iteration))
        else:
            stretches.append(self._stretch(f"iteration, {self.config.snip.snip_warmup_precision}", self._iteration))
            self._plan_at_target()
            stretches.append(self._stretch("iteration, plan", self._iteration))
            stretches.append(self._stretch(PROBE, self._probe, self._batches()))
            if trials and trial_passes(self.config):
                stretches.append(self._trial())
        if self.parts.final is not None and self.parts.switch():
            stretches.append(self._stretch(f"iteration, {self.parts.final}", self._iteration))
        return Measured(mesh.rank, mesh.pp.rank, self.parameters, tuple(stretches), self.stored)

    def _stretch(
        self, name: str, run: Callable[[], object], batches: int = 1, left_out: tuple[int, int] | None = None
    ) -> Stretch:
        self.tracker.begin()
        if self.recorder is not None:
            self.recorder.begin()
        run()
        if self.recorder is not None:
            self.phases.append(dataclasses.replace(self.recorder.phases(), units=units_of(self.parts, self.tracker)))
        counts, laps = self.tracker.counts, self.tracker.laps
        times, forwards = left_out or self.left_out
        if times:
            further = Counter(laps[-1])
            further.subtract(laps[-1 - forwards])
            for what, count in further.items():
                counts[what] += times * batches * count
        counts = Counter({what: n for what, n in counts.items() if n})
        return Stretch(name, self.tracker.memory.peak(), counts, self.kept, self.tracker.memory.host_peak())

    def iteration(self, name: str) -> Stretch:
        """An iteration in the present precisions."""
        return self._stretch(name, self._iteration)

    def _iteration(self) -> None:
        self.parts.stepper.step(self.batch, 1)

    def _batches(self) -> int:
        return batches_of(self.config.snip, self.config.training.global_batch_size * self.config.model.seq_length)

    def _probe(self) -> None:
        coordinator, stepper = self.parts.coordinator, self.parts.stepper
        assert coordinator is not None
        run_pass = stepper.pass_runner(self.batch, 1, lambda ahead: self.batch)

        def marked(*which: Any, **how: Any) -> Pass:
            done = run_pass(*which, **how)
            self._mark_gradients()
            return done

        coordinator.probe.run(
            marked, self.parts.optimizer.zero_grad, 1, self._batches(), updates=self.config.snip.snip_weight > 0
        )

    def _trial(self) -> Stretch:
        """One pass of a trial, under the plan."""
        dp = self.parts.mesh.dp.size
        few, *left_out = _few_microbatches(self.config.replace(global_batch_size=trial_samples(self.config, dp)), dp)
        tokens, labels, samples = (
            part[:1].expand(few.num_microbatches(dp), *part.shape[1:])
            for part in (self.batch.tokens, self.batch.labels, self.batch.sample_index)
        )
        run = self.parts.stepper.trial_runner(Batch(tokens, labels, samples), 1)
        return self._stretch(TRIAL, run, left_out=(left_out[0], left_out[1]))

    def _plan_at_target(self) -> None:
        """A plan that saves --snip-target of each stage, by giving its first linears the option that saves most.

        What --snip-max-loss will find is unknown; the target's default stands for it.
        """
        shapes = snip_shapes(self.config)
        options = read_choices(self.config.snip, shapes).options
        saved = efficiency(shapes, options, "fp4")
        least, most, stage = saved.min(axis=1), saved.max(axis=1), stages(shapes)
        missing = {
            s: self.config.snip.snip_target * most[stage == s].sum() - least[stage == s].sum() for s in set(stage)
        }
        for row, shape in enumerate(shapes):
            column = saved[row].argmax() if missing[stage[row]] > 1e-9 else saved[row].argmin()
            missing[stage[row]] -= most[row] - least[row]
            if shape.name in self.parts.linears:
                self.parts.linears[shape.name].precision = options[int(column)]
