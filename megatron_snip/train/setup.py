"""From options to the parts of a run.  `check` only reads and needs no process group; `build` makes the parts."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.data.loader import Loader
from megatron_snip.data.sampling import Dataset, Repeated, build_datasets, check_data
from megatron_snip.data.tokenizer import build_tokenizer
from megatron_snip.data.workers import Workers
from megatron_snip.errors import UserError
from megatron_snip.formats import ROW, format_names, get_format
from megatron_snip.mesh import Mesh, build_mesh
from megatron_snip.model.initial import draw_weights
from megatron_snip.model.llama import LlamaStage
from megatron_snip.model.spec import spec_of
from megatron_snip.model.stages import stage_blocks
from megatron_snip.quant import GEMMS, LINEAR_IMPLS, LinearPrecision, LinearShape, Sizes, check_linear, compiled_impl
from megatron_snip.runtime import Runtime
from megatron_snip.snip.coordinator import Coordinator, check_snip
from megatron_snip.snip.measure.probe import Probe
from megatron_snip.snip.measure.updates import AdamSettings, Updates
from megatron_snip.snip.plan.final import Final
from megatron_snip.snip.plan.options import device_options, read_choices, read_times
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.build_model import build_model, build_pipeline
from megatron_snip.train.host_states import host_parameters
from megatron_snip.train.memory_plan.plan_file import MemoryPlan, read_memory_plan
from megatron_snip.train.optim import Optimizer, check_optimizer_impl
from megatron_snip.train.run.data_identity import Identity
from megatron_snip.train.run.run_folder import Start
from megatron_snip.train.run.trackers import check_trackers
from megatron_snip.train.schedule import decay_start, final_switch
from megatron_snip.train.step import Stepper
from megatron_snip.train.validate import validate

LOGGER = logging.getLogger("megatron_snip")


def check(config: Config, world_size: int) -> tuple[Config, Plan | None]:
    """Find everything that can be wrong before ranks meet.  Raises UserError for the first problem.

    Returns the plan of --precision plan, and the options with the tokenizer's vocabulary and the device's
    --snip-options filled in.
    """
    validate(config, world_size)
    config = config.with_iterations()
    m, p = config.model, config.precision
    spec_of(m)
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model, m.vocab_size)
    if m.vocab_size is None:
        config = config.replace(vocab_size=tokenizer.vocab_size)
    elif tokenizer.vocab_size > m.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but --vocab-size is {m.vocab_size}; raise it or drop it"
        )
    tp = config.parallel.tensor_model_parallel_size
    if config.model.padded_vocab_size % tp:
        way_out = "change --make-vocab-size-divisible-by"
        if config.checkpoint.load or config.checkpoint.pretrained_checkpoint:
            way_out = (
                f"change --tensor-model-parallel-size, or, for new weights, --make-vocab-size-divisible-by (Hugging "
                f"Face model: pad it with transformers' resize_token_embeddings and pad_to_multiple_of={tp})"
            )
        vocabulary = config.model.padded_vocab_size
        raise UserError(f"the padded vocabulary {vocabulary} is not a multiple of tensor parallel {tp}; {way_out}")
    if p.linear_impl not in LINEAR_IMPLS:
        raise UserError(f"--linear-impl {p.linear_impl} is unknown; known: {', '.join(LINEAR_IMPLS)}")
    check_optimizer_impl(config.training)
    paths = (config.data.data_path, config.data.train_data_path, config.data.valid_data_path)
    check_data(*paths, whole=runtime.environment_local_rank() == 0)
    check_trackers(config)
    plan = None
    if p.precision == "plan":
        plan = Plan.load(str(p.precision_plan))
        plan.check_names(spec_of(m).linear_names(m.num_layers), str(p.precision_plan))
        plan.check_achieved(snip_shapes(config), str(p.precision_plan))
    elif p.precision == "snip":
        config = config.replace(snip_options=device_options(config.snip.snip_options, _device(config)))
        check_snip(config.snip, snip_shapes(config))
    else:
        try:
            LinearPrecision.parse(p.precision)
        except ValueError as error:
            known = ", ".join([*format_names(), "plan", "snip"])
            raise UserError(f"--precision {p.precision} is unknown; known: {known}") from error
    _check_linears(config, plan)
    read_memory_plan(config, world_size)
    return config, plan


def _check_linears(config: Config, plan: Plan | None) -> None:
    """Raise UserError if --linear-impl cannot run a precision that this run may use."""
    for precision in precisions_of(config, plan):
        check_linear(config.precision.linear_impl, precision, _device(config))
    if config.training.compile:
        compiled_impl(config.precision.linear_impl)


def _device(config: Config) -> torch.device:
    return runtime.device_of(config.parallel.distributed_backend, config.parallel.device)


def precisions_of(config: Config, plan: Plan | None) -> list[LinearPrecision]:
    """Every precision that linears of this run may use."""
    kind = config.precision.precision
    if plan is not None:
        found = set(plan.linears.values())
    elif kind == "snip":
        choices = read_choices(config.snip, snip_shapes(config))
        found = {*choices.options, LinearPrecision.parse(config.snip.snip_warmup_precision)}
    else:
        found = {LinearPrecision.parse(kind)}
    final = final_switch(config)
    return sorted(found | {final.of(precision) for precision in found} if final else found, key=str)


@dataclass
class Parts:
    """The parts that the training loop works with."""

    mesh: Mesh
    stages: dict[int, LlamaStage]
    optimizer: Optimizer
    stepper: Stepper
    train_loader: Loader
    valid_loader: Loader | None
    coordinator: Coordinator | None
    first_on_node: bool  # whether this is the rank that reads on behalf of its node
    plan_hash: str | None = None  # of the plan of --precision plan
    final: Final | None = None  # the late switch
    memory_plan: MemoryPlan | None = None
    data: Identity = dataclasses.field(default_factory=dict)  # for checkpoints, on rank 0

    @property
    def linears(self) -> dict[str, Any]:
        """This rank's quantisable linears by name."""
        return {name: linear for stage in self.stages.values() for name, linear in stage.linears().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments by their names in a checkpoint."""
        weights = {f"model.{name}": p.detach() for name, p in self.optimizer.parameters.items()}
        return {**weights, **self.optimizer.tensors()}

    def switch(self) -> bool:
        """Apply the late switch to all linears, in a run without a coordinator.  Returns whether any linear changed."""
        assert self.final is not None
        changed = False
        for linear in self.linears.values():
            before, linear.precision = linear.precision, self.final.of(linear.precision)
            changed |= linear.precision != before
        return changed


def build_loaders(config: Config, mesh: Mesh, first: bool) -> tuple[Loader, Loader | None]:
    """Loaders for training and validation.  Every rank must call it.

    first: whether this is the rank of its node that fills the cache of sample indices before the others read it.
    """
    d, t, log = config.data, config.training, config.logging
    validations = t.train_iters // log.eval_interval + 1 if log.eval_interval else 0  # as Megatron-LM counts them
    samples = t.global_batch_size * log.eval_iters * validations
    make = partial(
        build_datasets,
        d.train_data_path, d.valid_data_path, d.data_path, d.split, d.mock_data,
        t.train_samples or t.train_iters * t.global_batch_size, samples, config.model.seq_length, t.seed,
        config.model.vocab_size, d.data_cache_path,
    )  # fmt: skip
    datasets = mesh.in_turn(first, make) if d.data_cache_path else make()
    train, valid = (Repeated(each) if each is not None else None for each in datasets)
    assert train is not None
    workers = Workers([each for each in (train, valid) if each is not None], d.num_workers) if d.num_workers else None

    def loader(dataset: Dataset, batch_size: int | Callable[[int], int], prefetch: bool) -> Loader:
        return Loader(
            dataset,
            global_batch_size=batch_size,
            micro_batch_size=t.micro_batch_size,
            dp_rank=mesh.dp.rank,
            dp_size=mesh.dp.size,
            prefetch=prefetch,
            workers=workers,
        )

    valid_loader = loader(valid, t.global_batch_size, workers is not None) if valid is not None else None
    return loader(train, t.batch_size, True), valid_loader


def snip_shapes(config: Config, known: Sequence[LinearShape] | None = None) -> list[LinearShape]:
    """The linears that a plan covers, in the order of its matrices, each on its pipeline stage.

    known: the model's linears, if the options do not define them.
    Raises UserError if the options do not define the model's shape; some commands have only a part of them.
    """
    for option in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads") if known is None else ():
        if (value := getattr(config.model, option)) < 1:
            name = option.replace("_", "-")
            found = value or "missing or 0"
            raise UserError(f"--{name} is {found}; give the model's shape with --load CKPT, --config FILE or options")
    shapes, p = spec_of(config.model).linear_shapes(config.model) if known is None else known, config.parallel
    stages, pp = stage_blocks(1 + max(shape.block for shape in shapes), p), p.pipeline_model_parallel_size
    process = {block: stage % pp for stage, blocks in enumerate(stages) for block in blocks}
    shapes = [dataclasses.replace(shape, stage=process[shape.block]) for shape in shapes]
    home = (len(stages) - 1) % pp
    if known is None and shapes[-1].stage != home:  # the last stage has only the output layer
        output = shapes[-1].other_flops - spec_of(config.model).attention_flops(config.model)
        places = [place for place, shape in enumerate(shapes) if shape.stage == home]
        for place, flops in ((len(shapes) - 1, -output), *((place, output) for place in places[-1:])):
            shapes[place] = dataclasses.replace(shapes[place], other_flops=shapes[place].other_flops + flops)
    return shapes


def build_coordinator(config: Config, parts: Parts, device: torch.device) -> Coordinator:
    """SNIP's coordinator over this rank's linears."""
    t = config.training
    shapes = snip_shapes(config)
    choices = read_choices(config.snip, shapes)
    probe = Probe(
        parts.linears,
        {index: partial(stage.attend, index) for stage in parts.stages.values() for index in stage.blocks()},
        shapes=shapes,
        formats=choices.formats,
        updates=Updates(parts.optimizer, AdamSettings(t.adam_beta1, t.adam_beta2, t.adam_eps, t.clip_grad)),
        mesh=parts.mesh,
        tokens=t.global_batch_size * config.model.seq_length,
        device=device,
        gather=next(iter(parts.stages.values())).whole_sequences if parts.mesh.cp.size > 1 else None,
    )
    return Coordinator(
        config.snip, shapes, choices, probe, parts.linears, parts.mesh, Path(config.logging.run_dir), t.seed,
        last_iteration=t.train_iters, times=read_times(config.snip), final=parts.final, decay=decay_start(t),
    )  # fmt: skip


def mesh_of(config: Config, runtime: Runtime) -> Mesh:
    """The mesh of a run.  Every rank must call it."""
    p, dp = config.parallel, config.data_parallel_size(runtime.world_size)
    return build_mesh(
        runtime.device.type,
        pp=p.pipeline_model_parallel_size,
        dp=dp,
        tp=p.tensor_model_parallel_size,
        cp=p.context_parallel_size,
        replicate=config.replicas(dp),
        tied=not config.model.untie_embeddings_and_output_weights,
        timeout_minutes=p.distributed_timeout_minutes,
    )


def build(
    config: Config,
    runtime: Runtime,
    plan: Plan | None,
    draw: bool = True,
    mesh: Mesh | None = None,
    *,
    moments: bool = True,
    memory_plan: MemoryPlan | None = None,
) -> Parts:
    """All parts of a run.  Every rank must call it.

    draw: draw initial weights; otherwise the caller fills them, from a checkpoint or with `draw_weights`.
    moments: whether to allocate the optimiser's moments, twice the weights' size.  Only updates need them.
    memory_plan: by default that of --memory-plan FILE.
    """
    mesh, memory_plan = mesh or mesh_of(config, runtime), memory_plan or read_memory_plan(config, runtime.world_size)
    stages = build_model(config, mesh, runtime.device, memory_plan)
    host = host_parameters(stages.values(), config.training, mesh, memory_plan)
    optimizer = Optimizer(stages.values(), config.training, moments=moments, mesh=mesh, host=host)
    if draw:
        draw_weights(stages.values(), optimizer.low_parts())
    pipeline = build_pipeline(config, mesh, stages, runtime.device)
    first, stepper = runtime.local_rank == 0, Stepper(config, mesh, pipeline, optimizer)
    parts = Parts(mesh, stages, optimizer, stepper, *build_loaders(config, mesh, first), None, first_on_node=first)
    parts.final, parts.memory_plan, parts.plan_hash = final_switch(config), memory_plan, plan.hash if plan else None
    _set_precision(config, parts, plan)
    if config.precision.precision == "snip":
        parts.coordinator = build_coordinator(config, parts, runtime.device)
    _warn_about_cut_blocks(config, parts, plan)
    _log_backends(config, parts, plan, runtime.device)
    return parts


def _set_precision(config: Config, parts: Parts, plan: Plan | None) -> None:
    kind = config.precision.precision
    uniform = config.snip.snip_warmup_precision if kind == "snip" else kind
    for name, linear in parts.linears.items():
        linear.precision = plan.linears[name] if plan is not None else LinearPrecision.parse(uniform)


def _log_backends(config: Config, parts: Parts, plan: Plan | None, device: torch.device) -> None:
    """Log what runs the GEMMs of each format.  If that varies, say for which kinds of linears and which precisions."""
    by_format: dict[str, dict[str, set[tuple[str, str]]]] = {}
    used = precisions_of(config, plan)
    by_name = {name: used if plan is None else [plan.linears[name]] for name in parts.linears}
    tokens = config.training.micro_batch_size * config.model.seq_length // parts.mesh.cp.size
    for name, linear in parts.linears.items():
        sides = [linear.out_features, linear.in_features]
        sides[linear.split_dim] //= parts.mesh.tp.size
        for precision in by_name[name]:
            runs = LINEAR_IMPLS[linear.impl].runs(precision, device, Sizes(tokens, sides[1], sides[0]))
            for fmt, who in runs.items():
                by_format.setdefault(fmt, {}).setdefault(who, set()).add((name.rsplit(".", 1)[1], str(precision)))
    if config.precision.precision == "snip":
        LOGGER.info(f"plans choose from {config.snip.snip_options}")
        LOGGER.info(f"GEMM times are {read_times(config.snip).told}")
    gathers = parts.stepper.pipeline.gathers
    if gathers is None and config.parallel.fp8_param_gather:  # the same options may run on more ranks
        LOGGER.warning(
            "--fp8-param-gather has no effect: weights are not sharded over data- or context-parallel ranks; drop it, "
            "use more ranks, or lower --num-distributed-optimizer-instances"
        )
    for line in [*_table(by_format), *(gathers.told(by_name) if gathers is not None else ())]:
        LOGGER.info(line)


def _table(by_format: Mapping[str, Mapping[str, set[tuple[str, str]]]]) -> list[str]:
    """Lines of format -> what runs it -> (kind of linear, precision of the linear)."""
    lines = []
    for fmt, by in sorted(by_format.items()):
        kinds = {who: sorted({kind for kind, _ in each}) for who, each in by.items()}
        for who, each in by.items():
            about = f"; {', '.join(kinds[who])}" if len(by) > 1 else ""
            if any({*kinds[who]} & {*others} for other, others in kinds.items() if other != who):
                about += f" in {', '.join(sorted({precision for _, precision in each}))}"
            lines.append(f"GEMMs in {fmt}: {who}{about}")
    return lines


def _warn_about_cut_blocks(config: Config, parts: Parts, plan: Plan | None) -> None:
    """Log where scales depend on the layout, so that results differ a little between layouts.

    That is so if tp cuts a block, or if a tile does not end with a sequence.
    """
    tp, cp, length = parts.mesh.tp.size, config.parallel.context_parallel_size, config.model.seq_length
    names = {getattr(precision, gemm) for precision in precisions_of(config, plan) for gemm in GEMMS}
    formats = [fmt for fmt in map(get_format, sorted(names)) if fmt.quantised]
    for side in sorted({side for fmt in formats for side in (fmt.tile, fmt.weight_block) if side}, reverse=True):
        kinds = {
            name.rsplit(".", 1)[1]
            for name, linear in parts.linears.items()
            if tp > 1 and ((linear.out_features, linear.in_features)[linear.split_dim] // tp) % side
        }
        if kinds:
            cut = "rows under one scale" if side == ROW else f"{side}-wide scale blocks"
            LOGGER.info(
                f"tensor parallel {tp} cuts the {cut} of {', '.join(sorted(kinds))}: "
                "their scales close at the shard's edge, so results differ a little from other layouts"
            )
    for fmt in formats:
        if fmt.tile == ROW:
            LOGGER.info(
                f"wgrad's scales in {fmt.name} are of all tokens of a microbatch: "
                "results differ a little from other layouts and microbatches"
            )
        elif (tokens := length // (2 * cp) if cp > 1 else length) % fmt.tile:
            LOGGER.info(
                f"wgrad's tiles of {fmt.tile} tokens in {fmt.name} do not end with every {tokens} of a sequence: "
                "results differ a little from other layouts and microbatches"
            )


def agree_on(config: Config, start: Start) -> Start:
    """Broadcast rank 0's start, because each rank drew its own id for a new run.  Every rank must call it.

    Raises UserError on all ranks if their options or plans differ, or if they see different checkpoints.  That happens
    if a folder is not shared, or if a network file system lags.
    """
    named = config.precision.precision_plan, config.training.memory_plan
    plans = [path for path in named if path and Path(path).is_file()]
    read = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in plans]
    mine = start.iteration, start.load_iteration, config, read
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, start.run_id))
    (first, run_id), *_ = everyone
    for rank, (theirs, _) in enumerate(everyone):
        if theirs[:2] != first[:2]:
            raise UserError(
                f"--load {config.checkpoint.load}: rank 0 sees iteration {first[1]}, rank {rank} {theirs[1]}; "
                "another run may be writing to it, or ranks see different folders; give --ckpt-step, or share it"
            )
        if theirs[2] != first[2]:
            raise UserError(f"rank {rank} has other options than rank 0; start all with the same")
        if theirs[3] != first[3]:
            raise UserError(f"rank {rank} reads another {' or '.join(plans)} than rank 0; share the file")
    return dataclasses.replace(start, run_id=run_id)
