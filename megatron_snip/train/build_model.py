"""Build this rank's stages of the model from options, and the pipeline that runs them."""

from __future__ import annotations

import torch

from megatron_snip.config import Config
from megatron_snip.data.tokenizer import build_tokenizer
from megatron_snip.mesh import Axis, Mesh
from megatron_snip.model.build import Build
from megatron_snip.model.document_ends import Documents
from megatron_snip.model.llama import LlamaStage, build_stages
from megatron_snip.model.offload import Offload
from megatron_snip.model.recompute import Recompute
from megatron_snip.model.stages import stage_blocks
from megatron_snip.parallel.code_gather import CodeGathers
from megatron_snip.parallel.data import keeps_weights, shard_over_dp
from megatron_snip.parallel.pipeline import Pipeline
from megatron_snip.parallel.tensor import Region
from megatron_snip.quant import Casts, compiled_impl
from megatron_snip.train.memory_plan.plan_file import MemoryPlan


def documents_of(config: Config, cp: Axis) -> Documents | None:
    """The handling of document boundaries in a run with this cp axis; None if they have no effect."""
    d, per_token = config.data, config.training.calculate_per_token_loss
    if not (d.reset_position_ids or d.reset_attention_mask or d.eod_mask_loss):
        return None
    return Documents(
        build_tokenizer(d.tokenizer_type, d.tokenizer_model, config.model.vocab_size).eod,
        reset_positions=d.reset_position_ids,
        reset_attention=d.reset_attention_mask,
        mask_loss=d.eod_mask_loss,
        per_token=per_token,
        cp=cp,
    )


def build_model(
    config: Config, mesh: Mesh, device: torch.device, memory_plan: MemoryPlan | None = None
) -> dict[int, LlamaStage]:
    """This rank's stages, sharded over dp, by stage number.  Their weights are allocated but have no values."""
    m, t, pp = config.model, config.training, mesh.pp.size
    dtype = torch.bfloat16 if t.bf16 else torch.float32
    again = Recompute(
        t.recompute_granularity, t.recompute_method or "uniform", t.recompute_num_layers or 1, t.recompute_modules,
        () if memory_plan is None else memory_plan.blocks,
    )  # fmt: skip
    region = Region(mesh.tp, config.parallel.sequence_parallel, mesh.tp_cp)
    stored = torch.float32 if t.optimizer_precision == "fp32" else torch.bfloat16
    offload = Offload(device) if "offload" in again.plan else None
    build = Build(m, mesh, region, t.seed, dtype, device, again, documents_of(config, mesh.cp), stored, offload)
    stages = build_stages(
        build,
        stage_blocks(m.num_layers, config.parallel),
        tied=not m.untie_embeddings_and_output_weights,
        of=lambda s: s % pp == mesh.pp.rank,
    )
    strategy = config.parallel.data_parallel_sharding_strategy
    reduce_dtype = torch.bfloat16 if config.parallel.grad_reduce_in_bf16 else torch.float32
    for stage in stages.values():
        for linear in stage.linears().values():
            linear.impl = compiled_impl(config.precision.linear_impl) if t.compile else config.precision.linear_impl
            if mesh.dp_cp.size > 1:  # FSDP gathers a copy; if it frees that after each use, casts are freed too
                linear.weight_casts = Casts(frees=True) if keeps_weights(strategy) else None
        for block in stage.blocks().values() if t.compile else ():
            block.compile_run()
        gathered = memory_plan.gathered if memory_plan is not None else ()
        stay = [block for index, block in stage.blocks().items() if index in gathered]
        shard_over_dp(stage, stage.units(), mesh, dtype, strategy, reduce_dtype, stay)
        stage.allocate()
    return stages


def build_pipeline(config: Config, mesh: Mesh, stages: dict[int, LlamaStage], device: torch.device) -> Pipeline:
    """The pipeline over this rank's stages."""
    m, t = config.model, config.training
    own = m.seq_length // mesh.cp.size
    s = own // (mesh.tp.size if config.parallel.sequence_parallel else 1)
    documents, gathers = next(iter(stages.values())).build.documents, None
    dtype = torch.bfloat16 if t.bf16 else torch.float32
    if config.parallel.fp8_param_gather and mesh.shard.size > 1:
        gathers = CodeGathers(stages.values(), mesh, dtype, t.micro_batch_size * own)
    return Pipeline(
        dict(stages),
        num_stages=len(stage_blocks(m.num_layers, config.parallel)),
        mesh=mesh,
        sharding=config.parallel.data_parallel_sharding_strategy,
        activation=(t.micro_batch_size, s, m.hidden_size),
        tokens=(t.micro_batch_size, own),
        dtype=dtype,
        device=device,
        begin=None if documents is None else documents.begin,
        gathers=gathers,
    )
