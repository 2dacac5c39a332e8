"""Every rule on options that needs no file and no process group: layout, batches, choices.

These checks come before anything is built, so that a mistake costs seconds.  `train.setup` checks what needs a
tokenizer, a plan or a registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from megatron_snip.checkpoint.manifest import TRACKER, iteration_of
from megatron_snip.config import TILE, Config, TrainingConfig, option_groups
from megatron_snip.data.workers import check_workers
from megatron_snip.errors import UserError
from megatron_snip.model.recompute import MODULES
from megatron_snip.model.stages import is_interleaved, quotient
from megatron_snip.snip.max_loss import check_max_loss
from megatron_snip.train.schedule import check_batches, check_samples, check_schedule, final_switch

#: Every numeric option by its range, with the test of the range.  An option that allows None may be None.
RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "a positive number up to 9999": (lambda value: 1 <= value <= 9999, ("num_layers",)),
    "a positive number": (lambda value: value >= 1, (
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "seq_length", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by",
        "rope_original_max_position_embeddings", "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "context_parallel_size",
        "num_distributed_optimizer_instances", "recompute_num_layers",
        "micro_batch_size", "global_batch_size", "train_samples", "train_iters", "lr_decay_iters", "lr_wsd_decay_iters",
        "lr_decay_samples", "lr_wsd_decay_samples",
        "max_skipped_iterations", "exit_interval", "log_interval", "eval_interval", "save_interval", "keep_last",
        "keep_every", "profile_step_start", "profile_step_end",
        "snip_interval", "snip_start", "snip_final_iters", "snip_probe_tokens", "snip_trial_tokens",
        "snip_guard_patience", "world_size",
    )),
    "0 or more": (lambda value: value >= 0, (
        "lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "init_method_std", "eval_iters",
        "exit_duration_in_mins", "ckpt_step", "snip_weight", "snip_churn", "snip_bf16_eval_interval",
        "spike_deviations", "spike_nats", "manual_gc_interval", "lr_warmup_samples", "lr_warmup_init",
        "log_edq_interval", "start_weight_decay", "end_weight_decay", "num_workers", "snip_trials",
    )),
    "2 or more": (lambda value: value >= 2, ("spike_window",)),  # a standard deviation needs two
    "a number above 0": (lambda value: value > 0, (
        "rotary_base", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor", "norm_epsilon",
        "adam_eps", "memory_gib", "host_memory_gib", "host_bandwidth", "snip_max_loss",
    )),
    "a number above 0, at most 1000000": (lambda value: 0 < value <= 1e6, (  # clocks overflow
        "distributed_timeout_minutes", "snip_solve_timeout",
    )),
    "0 or more and less than 1": (lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2")),
    "0 to 4294967295": (lambda value: 0 <= value < 2**32, ("seed",)),  # range of numpy's seeds
    "a share, 0 to 1": (lambda value: 0 <= value <= 1, (
        "snip_target", "lr_warmup_fraction", "optimizer_offload_fraction",
    )),
}  # fmt: skip


def check_ranges(config: Config, *only: str) -> None:
    """Raise UserError for a number outside its range.  ``only``: groups of options to check, such as snip."""
    groups = option_groups()
    for kind, (within, names) in RANGES.items():
        for name in names:
            if only and groups[name] not in only:
                continue
            value = getattr(getattr(config, groups[name]), name)
            if value not in (None, "auto", "decay") and not (math.isfinite(value) and within(value)):
                required = getattr(getattr(Config(), groups[name]), name) == 0  # the only defaults out of range
                found = "missing or 0" if required and value == 0 else value
                raise UserError(f"--{name.replace('_', '-')} is {found}; give {kind}")


def validate(config: Config, world_size: int) -> None:
    """Check every rule that needs no file, before anything is built.  Raises UserError."""
    check_batches(config.training)
    config = config.with_iterations()
    if not (config.model.num_layers or config.model.hidden_size):
        example = "examples/llama_1b/llama_1b.toml"
        if config.checkpoint.load or config.checkpoint.pretrained_checkpoint:
            example = "the model.toml that `megatron-snip convert import` writes of a model from Hugging Face"
        raise UserError(
            "no model: give --num-layers, --hidden-size, --ffn-hidden-size, --num-attention-heads and --seq-length, or "
            f"--config FILE with them, such as {example}"
        )
    check_ranges(config)
    check_workers("--num-workers", config.data.num_workers)
    check_samples(config)
    m, p, t = config.model, config.parallel, config.training
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    dp = config.data_parallel_size(world_size)
    change_tp = "change it or --tensor-model-parallel-size"
    quotient(m.num_attention_heads, m.query_groups, "--num-attention-heads by --num-query-groups", "change one")
    if m.kv_channels is None:
        quotient(m.hidden_size, m.num_attention_heads, "--hidden-size by heads", "give --kv-channels")
    quotient(m.head_dim, 2, "channels of a head by 2, as rotary embeddings need", "change --kv-channels")
    quotient(m.num_attention_heads, tp, "--num-attention-heads by tensor parallel", change_tp)
    quotient(m.query_groups, tp, "--num-query-groups by tensor parallel", change_tp)
    for name, width in (("--hidden-size", m.hidden_size), ("--ffn-hidden-size", m.ffn_hidden_size)):
        quotient(width, tp, f"{name} by tensor parallel", change_tp)
    quotient(m.seq_length, TILE, "--seq-length by the quantisation tile", "change --seq-length")
    if cp > 1:
        quotient(m.seq_length, 2 * cp * TILE, f"--seq-length in two pieces of whole {TILE}-token tiles for each of "
                 f"{cp} context-parallel ranks", "change it or --context-parallel-size")  # fmt: skip
    if m.max_position_embeddings is not None and m.max_position_embeddings < m.seq_length:
        raise UserError(
            f"--seq-length {m.seq_length} is beyond --max-position-embeddings {m.max_position_embeddings}; "
            "shorten the sequence or raise the limit"
        )
    if p.sequence_parallel:
        axes = "tensor x context" if cp > 1 else "tensor"
        way_out = "change it or drop --sequence-parallel"
        quotient(m.seq_length, tp * cp, f"--seq-length by {axes} parallel", way_out)
    for size in (t.global_batch_size, *t.batch_sizes):
        what = "--global-batch-size" if size == t.global_batch_size else "a batch of --rampup-batch-size"
        quotient(size, t.micro_batch_size * dp, f"{what} by --micro-batch-size x data parallel "
                 f"({t.micro_batch_size} x {dp})", "change one of them or the number of ranks")  # fmt: skip
    if odd := [rank for rank in config.logging.profile_ranks if not 0 <= rank < world_size]:
        raise UserError(f"--profile-ranks {odd[0]}: the run's ranks are 0 to {world_size - 1}; leave it out")
    _validate_sharding(config, dp)
    for size in t.batch_sizes:
        _validate_stages(config, size // (t.micro_batch_size * dp))
    _validate_choices(config)
    _validate_pairs(config)
    check_schedule(config.training)
    final_switch(config)
    _validate_recompute(config)
    _validate_optimizer(config)
    _validate_dry_run(config)


def check_restarts(config: Config, restarts: int, requeues: int = 0) -> None:
    """Raise UserError if torchrun may restart the run but these options would not let it continue.

    requeues: how often SLURM has already restarted it.
    """
    c = config.checkpoint
    if restarts < 1 and requeues < 1:
        return
    load = Path(str(c.load))
    named = c.ckpt_step if iteration_of(load) is None else iteration_of(load)
    if named is not None and not c.finetune:
        option, folder = (
            (f"--ckpt-step {named}", load) if iteration_of(load) is None else (f"--load {load}", load.parent)
        )
        again = f"--max-restarts is {restarts}" if restarts else f"SLURM_RESTART_COUNT is {requeues}"
        raise UserError(
            f"{option} goes back at each start, and {again}; to go back once, give --load {folder} alone and write "
            f"{named} into {folder / TRACKER}"
        )
    if restarts < 1:
        return
    if c.finetune:
        raise UserError(
            f"--finetune starts over at each start, and --max-restarts is {restarts}; give torchrun --max-restarts 0, "
            f"or --load {config.save_dir} without --finetune once the run has saved"
        )
    if c.load is None or Path(c.load).absolute() != config.save_dir.absolute():
        raise UserError(
            f"--max-restarts is {restarts}, and a restart would continue from --load {c.load}, not from "
            f"{config.save_dir}, where the run saves; give --load {config.save_dir}, or torchrun --max-restarts 0"
        )


def _validate_sharding(config: Config, dp: int) -> None:
    p, option = config.parallel, "--num-distributed-optimizer-instances"
    instances = p.num_distributed_optimizer_instances
    quotient(dp, instances, f"data-parallel ranks by {option}", "change it or the number of ranks")
    if p.data_parallel_sharding_strategy == "no_shard" and instances > 1:
        raise UserError(
            f"{option} is {instances} and --data-parallel-sharding-strategy no_shard shards nothing; drop one"
        )
    if p.fp8_param_gather and p.data_parallel_sharding_strategy == "no_shard":
        raise UserError(
            "--fp8-param-gather and --data-parallel-sharding-strategy no_shard, which gathers no weights; drop one"
        )
    if p.grad_reduce_in_bf16 and not config.training.bf16:
        raise UserError(
            "--grad-reduce-in-bf16 needs --bf16, as gradients are float32 without it; add --bf16 or drop it"
        )


def _validate_stages(config: Config, microbatches: int) -> None:
    m, pp = config.model, config.parallel.pipeline_model_parallel_size
    interleaved = is_interleaved(m.num_layers, config.parallel)
    if microbatches < pp:
        raise UserError(
            f"{microbatches} microbatches an iteration cannot fill {pp} pipeline stages; "
            "raise --global-batch-size or lower --micro-batch-size"
        )
    # torch's interleaved schedule needs rounds of equal size, of pp or a few more microbatches
    rounds = microbatches // pp if interleaved else 1
    quotient(microbatches, rounds, "microbatches by rounds of the interleaved pipeline", "change --global-batch-size")


def _validate_choices(config: Config) -> None:
    s, d = config.snip, config.data
    if s.snip_apply_lag < 0 or s.snip_apply_lag >= s.snip_interval:
        raise UserError(
            f"--snip-apply-lag is {s.snip_apply_lag}; give 0 to --snip-interval - 1 = {s.snip_interval - 1}, "
            "so that one solve ends before the next begins"
        )
    _validate_guard(config)
    check_max_loss(s)
    if config.precision.precision == "plan" and not config.precision.precision_plan:
        raise UserError("--precision plan needs a plan; give --precision-plan FILE")
    if config.precision.precision != "plan" and config.precision.precision_plan:
        raise UserError(
            f"--precision-plan is given, but --precision is {config.precision.precision}; use --precision plan"
        )
    c = config.checkpoint
    if c.keep_every is not None and c.keep_last is None:
        raise UserError(f"--keep-every {c.keep_every} has no effect without --keep-last; give --keep-last too")
    if c.ckpt_step is not None and not c.load:
        raise UserError(f"--ckpt-step {c.ckpt_step} needs a folder; give --load too")
    if not (d.mock_data or d.data_path or d.train_data_path):
        raise UserError("no data: give --data-path, --train-data-path or --mock-data")
    if d.mock_data and (d.data_path or d.train_data_path or d.valid_data_path):
        raise UserError("--mock-data is given with paths of real data; drop one")
    if d.data_path and (d.train_data_path or d.valid_data_path):
        raise UserError("--data-path and --train-data-path/--valid-data-path exclude each other; keep one kind")


def _validate_pairs(config: Config) -> None:
    """Raise UserError for contradictory pairs of options: one would silently win, or the run would fail."""
    s, p = config.snip, config.parallel
    if p.device == "cpu" and p.distributed_backend == "nccl":
        raise UserError("--distributed-backend nccl is for GPUs, but --device is cpu; use gloo, or drop --device")
    if p.device == "cuda" and p.distributed_backend == "gloo" and p.pipeline_model_parallel_size > 1:
        raise UserError(
            f"--pipeline-model-parallel-size is {p.pipeline_model_parallel_size}, but gloo cannot send between "
            "GPUs; use nccl, or one stage"
        )
    waits, limit = s.snip_solve_timeout, 60.0 * config.parallel.distributed_timeout_minutes
    if config.precision.precision == "snip" and waits >= limit:
        raise UserError(
            f"--snip-solve-timeout is {waits:g} seconds, and --distributed-timeout-minutes {limit / 60.0:g} ends a run "
            f"whose ranks wait for {limit:g} seconds; lower the first or raise the second"
        )
    log = config.logging
    if log.profile and log.profile_step_end < log.profile_step_start:
        raise UserError(
            f"--profile-step-end {log.profile_step_end} is before --profile-step-start {log.profile_step_start}; "
            "change one"
        )
    if config.model.use_rope_scaling and config.model.rope_low_freq_factor >= config.model.rope_high_freq_factor:
        raise UserError(
            f"--rope-low-freq-factor {config.model.rope_low_freq_factor:g} must be below --rope-high-freq-factor "
            f"{config.model.rope_high_freq_factor:g}; change one"
        )
    if config.checkpoint.pretrained_checkpoint and config.checkpoint.finetune:
        raise UserError(
            f"--finetune takes the weights of --load, but --pretrained-checkpoint is "
            f"{config.checkpoint.pretrained_checkpoint}; drop one"
        )
    if config.checkpoint.exit_on_missing_checkpoint and not config.checkpoint.load:
        raise UserError("--exit-on-missing-checkpoint needs --load; give a folder of checkpoints or drop it")


def _validate_optimizer(config: Config) -> None:
    t, interval = config.training, config.logging.log_edq_interval
    if interval and t.optimizer_impl != "torch":
        raise UserError(
            f"--log-edq-interval is {interval}, but --optimizer-impl {t.optimizer_impl} updates all weights at once; "
            "use --optimizer-impl torch, or drop it"
        )
    if t.optimizer_cpu_offload and t.optimizer_impl != "torch":
        raise UserError(
            f"--optimizer-cpu-offload updates weights on the host, which --optimizer-impl {t.optimizer_impl} cannot; "
            "use --optimizer-impl torch, or drop one"
        )
    if not t.optimizer_cpu_offload and t.optimizer_offload_fraction != 1.0:
        raise UserError(
            f"--optimizer-offload-fraction is {t.optimizer_offload_fraction}, but --optimizer-cpu-offload is not "
            "given; add it, or drop this option"
        )
    if t.optimizer_precision == "fp32":
        return
    if not t.bf16:
        raise UserError(
            f"--optimizer-precision {t.optimizer_precision} stores weights in BF16, but this run computes in float32; "
            "give --bf16, or drop it"
        )
    if t.optimizer_impl != "torch":
        raise UserError(
            f"--optimizer-impl {t.optimizer_impl} needs float32 weights, but --optimizer-precision is "
            f"{t.optimizer_precision}; drop one"
        )


def _validate_recompute(config: Config) -> None:
    t = config.training
    if t.memory_plan != "none" and t.recompute_granularity != "none":
        raise UserError(
            f"--memory-plan {t.memory_plan} decides what each block recomputes, and --recompute-granularity is "
            f"{t.recompute_granularity}; drop one"
        )
    granularity, modules = t.recompute_granularity, t.recompute_modules
    for name in ("recompute_method", "recompute_num_layers"):
        if getattr(t, name) is not None and granularity != "full":
            raise UserError(
                f"--{name.replace('_', '-')} is given, but --recompute-granularity is {granularity}; "
                "use full, or drop it"
            )
    if unknown := [name for name in modules if name not in MODULES]:
        raise UserError(f"--recompute-modules {unknown[0]} is unknown; known: {', '.join(MODULES)}")
    if modules != TrainingConfig().recompute_modules and granularity != "selective":
        raise UserError(
            f"--recompute-modules is given, but --recompute-granularity is {granularity}; use selective, or drop it"
        )
    if granularity == "selective" and t.compile:
        raise UserError("--compile does not go with --recompute-granularity selective; use full, or drop one")


def _validate_dry_run(config: Config) -> None:
    given, auto = config.dry_run, config.training.memory_plan == "auto"
    host, bandwidth = given.host_memory_gib, given.host_bandwidth
    if host is not None and config.training.optimizer_cpu_offload:
        raise UserError(
            f"--host-memory-gib {host} lets --memory-plan auto decide which states lie on the host, but "
            "--optimizer-cpu-offload is given; drop one"
        )
    if host is not None and not auto:
        raise UserError(f"--host-memory-gib {host} needs --memory-plan auto; add it, or drop this option")
    if bandwidth is not None and host is None:
        raise UserError(f"--host-bandwidth {bandwidth} needs --host-memory-gib; add it, or drop this option")
    for name, value in vars(given).items() if not given.dry_run else ():
        if value and not (auto and name in ("memory_gib", "host_memory_gib", "host_bandwidth")):
            raise UserError(f"--{name.replace('_', '-')} {value} needs --dry-run; add it, or drop this option")


def _validate_guard(config: Config) -> None:
    s, t = config.snip, config.training
    if s.snip_guard and s.snip_guard_patience >= t.max_skipped_iterations:
        raise UserError(
            f"--snip-guard-patience is {s.snip_guard_patience}, and --max-skipped-iterations "
            f"{t.max_skipped_iterations} ends the run before the guard acts; lower the first or raise the second"
        )
    if s.snip_guard and 3 * s.snip_guard_patience >= t.spike_window:
        raise UserError(
            f"--snip-guard-patience is {s.snip_guard_patience}, and three times that exceeds --spike-window "
            f"{t.spike_window}, after which a loss counts as usual; lower the first or raise the second"
        )
