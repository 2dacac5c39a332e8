"""Every option of a run, as frozen dataclasses; `arguments` fills them from a command line and a TOML file.

Names are Megatron-LM's where it has the option (core 0.16.1); `--snip-*` are ours.
Names of formats and objectives are plain strings here, because their registries are above this module in the import
order.  `train.setup` checks them before anything is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import tyro

from megatron_snip.errors import UserError

TILE = 128  # tokens and channels of a quantisation tile; shapes are checked against it

#: A number that you must give: the help shows no default, and validation refuses 0.
Needed = Annotated[int, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class ModelConfig:
    """The kind of model and its shape."""

    model_name: str = "llama"  # Kind of model: llama, or qwen3, which normalises queries and keys.
    num_layers: Needed = 0  # Transformer blocks (required).
    hidden_size: Needed = 0  # Width of the residual stream (required).
    ffn_hidden_size: Needed = 0  # Width of the SwiGLU (required).
    num_attention_heads: Needed = 0  # Query heads (required).
    num_query_groups: Optional[int] = None  # Key/value heads; by default as many as query heads.
    kv_channels: Optional[int] = None  # Channels per head; by default hidden size / heads.
    seq_length: Needed = 0  # Tokens of a training sequence (required).
    max_position_embeddings: Optional[int] = None  # Longest position; by default the sequence length.
    rotary_base: float = 10000.0  # Base of the rotary embedding.
    use_rope_scaling: bool = False  # Llama 3's frequency scaling of the rotary embedding.
    rope_scaling_factor: float = 8.0  # Llama 3: factor by which low frequencies are stretched.
    rope_low_freq_factor: float = 1.0  # Llama 3: wavelengths above original length / this are stretched fully.
    rope_high_freq_factor: float = 4.0  # Llama 3: wavelengths below original length / this stay as they are.
    rope_original_max_position_embeddings: int = 8192  # Llama 3: sequence length before stretching.
    norm_epsilon: float = 1e-5  # Epsilon of RMSNorm.
    untie_embeddings_and_output_weights: bool = False  # Give the output layer its own weight.
    init_method_std: float = 0.02  # Standard deviation of initial weights.
    vocab_size: Optional[int] = None  # Vocabulary of the model; by default the tokenizer's.
    make_vocab_size_divisible_by: int = 128  # The vocabulary is padded to a multiple of this.

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the padded vocabulary, the same on every layout."""
        if not self.vocab_size:
            raise UserError("vocab_size is not known yet: give --vocab-size or a tokenizer")
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of the model and the batch over ranks."""

    tensor_model_parallel_size: int = 1  # Ranks that shard each linear.
    pipeline_model_parallel_size: int = 1  # Ranks that share the blocks.
    num_layers_per_virtual_pipeline_stage: Optional[int] = None  # Blocks per chunk, for interleaved 1F1B.
    num_virtual_stages_per_pipeline_rank: Optional[int] = None  # Chunks per rank, instead of blocks per chunk.
    decoder_first_pipeline_num_layers: Optional[int] = None  # Blocks on the first pipeline rank.
    decoder_last_pipeline_num_layers: Optional[int] = None  # Blocks on the last one; the others share the rest.
    account_for_embedding_in_pipeline_split: bool = False  # Count the embedding as a block of the first stage.
    account_for_loss_in_pipeline_split: bool = False  # Count output layer and loss as a block of the last stage.
    context_parallel_size: int = 1  # Ranks that share the tokens of each sequence.
    sequence_parallel: bool = False  # Shard norms and residuals along the tokens, over tensor-parallel ranks.
    # What data-parallel ranks shard: nothing; the optimiser state; also gradients; also weights.  Each saves more
    # memory than the one before; the last two also communicate more.
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim"
    # Shard within this many groups of data-parallel ranks, such as nodes; each group holds a full copy.
    num_distributed_optimizer_instances: int = 1
    # Add up and reduce a rank's gradients in BF16: half the memory and bytes, less exact; needs --bf16.
    grad_reduce_in_bf16: bool = False
    # Gather weights as the codes that linears multiply, where that changes no bit: a byte in FP8, half of one in FP4.
    fp8_param_gather: bool = False
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: GPUs if there are any, unless the backend is gloo.
    # auto: nccl on GPUs, gloo on CPUs.  gloo with --device cuda lets several ranks share a GPU, for testing.
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    distributed_timeout_minutes: float = 10.0  # The run ends if a collective takes longer.


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, optimiser, schedule and the end of a run."""

    micro_batch_size: int = 1  # Sequences that a rank runs at once.
    global_batch_size: Needed = 0  # Sequences in one iteration, over all ranks (required).
    # START INCREMENT SAMPLES: the batch grows from START in steps of INCREMENT over SAMPLES; needs train-samples.
    rampup_batch_size: tuple[int, ...] = ()
    train_iters: Needed = 0  # Iterations of the whole run (required, or train-samples).
    train_samples: Optional[int] = None  # Sequences of the whole run, instead of train-iters.
    lr: float = 3e-4  # Peak learning rate.
    min_lr: float = 0.0  # Learning rate at the end of the decay.
    # Schedule after warm-up; train/schedule.py has the curves.
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    lr_decay_iters: Optional[int] = None  # Iterations until min-lr; by default train-iters.
    lr_decay_samples: Optional[int] = None  # The same in sequences, with train-samples.
    lr_warmup_iters: int = 0  # Iterations of linear warm-up.
    lr_warmup_samples: int = 0  # The same in sequences, with train-samples.
    lr_warmup_fraction: Optional[float] = None  # The same as a fraction of the decay (lr-decay-iters).
    lr_warmup_init: float = 0.0  # Learning rate at the start of the warm-up.
    lr_wsd_decay_iters: Optional[int] = None  # WSD: iterations of the final decay.
    lr_wsd_decay_samples: Optional[int] = None  # The same in sequences, with train-samples.
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"  # WSD: its curve.
    weight_decay: float = 0.01  # Decoupled weight decay of matrices; norms have none.
    start_weight_decay: Optional[float] = None  # Weight decay at the start, if it grows.
    end_weight_decay: Optional[float] = None  # Weight decay at the end of training, if it grows.
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"  # How weight decay grows.
    adam_beta1: float = 0.9  # AdamW's first decay rate.
    adam_beta2: float = 0.999  # AdamW's second decay rate.
    adam_eps: float = 1e-8  # AdamW's epsilon.
    # How weights, gradients and moments are stored: fp32, or BF16 without a float32 master; see docs/numerics.md.
    optimizer_precision: Literal["fp32", "collage-light", "collage-plus", "bf16-stochastic", "bf16"] = "fp32"
    optimizer_impl: Literal["torch", "apex"] = "torch"  # apex: FusedAdam of NVIDIA's apex, on GPUs.
    optimizer_cpu_offload: bool = False  # Hold AdamW's state and main weights on the host, and update them there.
    optimizer_offload_fraction: float = 1.0  # With optimizer-cpu-offload: the share of the parameters it is for.
    # With eod-mask-loss: average over all tokens of the batch, not over the means of microbatches.
    calculate_per_token_loss: bool = False
    clip_grad: float = 1.0  # Clip the global gradient norm to this; 0: no clipping.
    seed: int = 1234  # Seed of weights, data order and stochastic rounding.
    deterministic_mode: bool = False  # Use deterministic algorithms of torch, cuBLAS and NCCL; slower on GPUs.
    manual_gc: bool = False  # Collect garbage only at --manual-gc-interval, so that ranks pause together.
    manual_gc_interval: int = 0  # Iterations between two collections under --manual-gc; 0: only at the start.
    bf16: bool = False  # Compute in BF16 with FP32 master weights; without it, in float32.
    recompute_granularity: Literal["none", "full", "selective"] = "none"  # What backward recomputes to save memory.
    # full: recompute-num-layers blocks at a time (uniform, the default), or only that many of a stage (block).
    recompute_method: Optional[Literal["uniform", "block"]] = None
    recompute_num_layers: Optional[int] = None  # full: number of blocks for recompute-method; by default 1.
    recompute_modules: tuple[str, ...] = ("core_attn",)  # selective: parts of each block: core_attn, mlp.
    # What each block keeps for backward: all; auto: the fastest choices that fit memory-gib and host-memory-gib;
    # FILE: those of a plan.
    memory_plan: str = "none"  # none, auto, or FILE.
    compile: bool = False  # Compile each block with torch.compile; linears give the same bits as without.
    preflight: bool = True  # Before iteration 1, try what --precision snip will run: each option and a probe.
    max_skipped_iterations: int = 10  # The run ends after this many non-finite iterations in a row.
    # validate_results: repeat an iteration whose loss spikes or is not finite; see docs/reliability.md.
    rerun_mode: Literal["disabled", "validate_results"] = "validate_results"
    spike_window: int = 64  # A loss is a spike if it exceeds the mean of this many good losses before it ...
    spike_deviations: float = 6.0  # ... by more than this many of their standard deviations ...
    spike_nats: float = 0.5  # ... and by more than this many nats.
    exit_interval: Optional[int] = None  # Save and end when the iteration is a multiple of this.
    exit_duration_in_mins: Optional[float] = None  # Save and end after this many minutes, startup included.
    exit_signal_handler: bool = True  # Save and end cleanly on SIGTERM or Ctrl-C.

    @property
    def batch_sizes(self) -> range:
        """Sequences per iteration, from the first batch to the last.  Source: num_microbatches_calculator.py."""
        if len(self.rampup_batch_size) != 3:
            return range(self.global_batch_size, self.global_batch_size + 1)
        start, increment = self.rampup_batch_size[0], max(1, self.rampup_batch_size[1])
        return range(start, self.global_batch_size + 1, increment)

    def batch_size(self, consumed: int) -> int:
        """Sequences in the batch that starts after this many samples."""
        sizes = self.batch_sizes
        if len(sizes) == 1 or consumed > self.rampup_batch_size[2]:
            return self.global_batch_size
        return sizes[int(consumed / (self.rampup_batch_size[2] / (len(sizes) - 1)))]


@dataclass(frozen=True)
class DataConfig:
    """Sources of tokens."""

    data_path: tuple[str, ...] = ()  # Prefix of a .bin/.idx pair, or weight prefix weight prefix ...
    train_data_path: tuple[str, ...] = ()  # The same for training only, instead of --data-path.
    valid_data_path: tuple[str, ...] = ()  # The same for validation only, instead of --data-path.
    split: str = "969,30,1"  # Shares of --data-path for training, validation, test.
    data_cache_path: Optional[str] = None  # Folder that keeps sample indices between runs.
    num_workers: int = 0  # Worker processes per rank that read ahead; 0: two threads of the rank itself.
    reset_position_ids: bool = False  # Restart positions after each end of document.
    reset_attention_mask: bool = False  # Let tokens attend only to their own document.
    eod_mask_loss: bool = False  # Do not train on the token after an end of document.
    mock_data: bool = False  # Use synthetic tokens, to try out a layout.
    tokenizer_type: str = "NullTokenizer"  # SentencePieceTokenizer, HuggingFaceTokenizer, ...
    tokenizer_model: Optional[str] = None  # File or folder of the tokenizer.


@dataclass(frozen=True)
class LoggingConfig:
    """The run folder, the log, wandb and validation."""

    run_dir: str = "runs/default"  # Folder for metrics, plans, statistics, checkpoints and the report.
    log_interval: int = 10  # Iterations between two progress lines.
    log_throughput: bool = False  # Add TFLOP/s per GPU (model FLOPs) to line and metrics; MFU to the line if known.
    log_edq_interval: int = 0  # Iterations between two measurements of lost updates, optim/edq and optim/lost; 0: none.
    log_memory: bool = False  # Add current and peak memory to each row of metrics.
    profile: bool = False  # Write a trace of some iterations to profile/ in the run folder (torch.profiler).
    profile_step_start: int = 10  # First iteration of the trace.
    profile_step_end: int = 12  # Last iteration of the trace.
    profile_ranks: tuple[int, ...] = (0,)  # Ranks that write a trace.
    log_all_ranks: bool = False  # All ranks write metrics; ranks other than 0 to metrics/ in the run folder.
    eval_interval: Optional[int] = None  # Iterations between two validations; by default none.
    eval_iters: int = 10  # Batches of one validation.
    tensorboard_dir: Optional[str] = None  # Folder for TensorBoard events (needs the tensorboard extra).
    wandb_project: Optional[str] = None  # Log to this wandb project (needs the wandb extra).
    wandb_exp_name: Optional[str] = None  # Name of the wandb run; by default the run folder's.
    wandb_save_dir: Optional[str] = None  # Folder for wandb's own `wandb` folder; by default the run folder.
    wandb_mode: Literal["online", "offline"] = "offline"  # offline: sync later with `wandb sync`.


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: Optional[str] = None  # Folder for checkpoints; by default <run-dir>/checkpoints.
    load: Optional[str] = None  # Checkpoints to continue from, or Hugging Face model to start from.
    # If --load holds no checkpoint yet, start from these weights: a folder of checkpoints, or a Hugging Face model.
    pretrained_checkpoint: Optional[str] = None
    ckpt_step: Optional[int] = None  # Iteration to load; by default the newest undamaged checkpoint.
    save_interval: Optional[int] = None  # Iterations between two checkpoints; by default only at the end.
    async_save: bool = False  # Write checkpoints in the background; training waits while tensors are copied.
    keep_last: Optional[int] = None  # Checkpoints to keep; older ones are deleted. By default all are kept.
    keep_every: Optional[int] = None  # With --keep-last: also keep checkpoints whose iteration is a multiple of this.
    no_load_optim: bool = False  # Do not load the optimiser state; start it from zero.
    finetune: bool = False  # Load only the weights; iteration, data and optimiser start from zero.
    exit_on_missing_checkpoint: bool = False  # Fail if --load holds no checkpoint.
    accept_changed_data: bool = False  # Continue even if the data differs from what the checkpoint was trained on.


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision of the linears."""

    precision: str = "bf16"  # bf16, fp8, fp4 or another format; plan: from a file; snip: chosen during training.
    precision_plan: Optional[str] = None  # The plan file of --precision plan.
    linear_impl: str = "auto"  # auto (the best available), built_in, emulated, scaled_mm, transformer_engine.


@dataclass(frozen=True)
class SnipConfig:
    """When and how to plan precision (--precision snip)."""

    snip_target: float = 0.75  # Share of the linears' FLOPs that a plan must put in FP4, or of the time to save.
    # fp4: the share of FLOPs in FP4.  time: modelled time saved, as a share of what the fastest format would save
    # everywhere.  auto: time where BF16 is an option, else fp4.
    snip_target_unit: Literal["auto", "fp4", "time"] = "auto"
    snip_max_loss: Optional[float] = None  # In place of it: the most that plans may measure above BF16's loss, in nats.
    snip_interval: int = 1000  # Iterations between two probes.
    snip_start: int = 100  # Iteration of the first probe.
    snip_apply_lag: int = 1  # Iterations from a probe until its plan takes effect; the solver works meanwhile.
    # Precisions a linear may take, comma-separated; a/b/c is fprop/dgrad/wgrad.  auto: mxfp8,nvfp4 on Blackwell, else
    # fp8,fp4.  recipes: the field's, by GEMM, of this device or of recipes:blackwell, recipes:hopper.
    snip_options: str = "auto"
    snip_granularity: Literal["linear", "gemm", "fused"] = "gemm"  # What gets a choice; fused: q,k,v and gate,up.
    snip_fix: str = ""  # Linears that you fix: PATTERN=PRECISION, comma-separated, such as layers.0.*=fp8.
    snip_objective: str = "snip"  # What a plan minimises; see docs/glossary.md for the names.
    # A probe takes whole batches until it has seen this many tokens; auto: 8192, or more until the plan's cost is
    # known within a tenth.
    snip_probe_tokens: Union[int, Literal["auto"]] = 8192
    snip_trials: int = 16  # Forward passes that measure plans before one takes effect; 0: no trials.
    snip_trial_tokens: int = 8192  # Tokens of each such pass, rounded up to full microbatches.
    snip_weight: float = 0.0  # Weight of the weight divergence in the objective; 0: not measured.
    snip_warmup_precision: str = "bf16"  # Format of all linears until the first plan takes effect.
    # Precision of a run's last iterations, under any --precision: a format, or one for each of fprop/dgrad/wgrad, where
    # plan keeps what the GEMM has by then.  bf16/plan/plan is the end of NVIDIA's NVFP4 recipe.
    snip_final_precision: Optional[str] = None
    # How many iterations these are; decay: from the beginning of the learning rate's decay on, with WSD.
    snip_final_iters: Union[int, Literal["decay"]] = "decay"
    # each: every pipeline stage meets the target; makespan: the slowest stage is made fast; auto: each if several.
    snip_stage_constraint: Literal["auto", "none", "each", "makespan"] = "auto"
    snip_churn: float = 0.0  # Price of changing a linear, in the objective's unit; a third for each GEMM.
    # Table from `megatron-snip profile`, or published:NAME, one of b200, b300, gb200 and h200.  By default BF16 takes
    # 1, FP8 1/2 and FP4 1/4.
    gemm_times: Optional[str] = None
    snip_solve_timeout: float = 60.0  # Seconds to wait for a late solver before keeping the old plan.
    snip_guard: bool = False  # Fall back step by step when the loss breaks; see docs/reliability.md.
    snip_guard_patience: int = 5  # Bad iterations in a row (spike or no update) before it falls back.
    snip_bf16_eval_interval: int = 0  # Iterations between BF16 forwards that measure the loss divergence; 0: none.


@dataclass(frozen=True)
class DryRunConfig:
    """What a run would need, without running it."""

    dry_run: bool = False  # Count memory, collectives, FLOPs and launches on fake tensors; do not train.
    world_size: Optional[int] = None  # With --dry-run: number of ranks of the run; by default torchrun's.
    # GiB of a GPU: for --memory-plan auto, and, with --dry-run, to say by how much the run fits or to fail.
    memory_gib: Optional[float] = None
    # GiB of the machine's memory that each rank may use, for --memory-plan auto; none: nothing goes to the host.
    host_memory_gib: Optional[float] = None
    # GB/s in each direction between a GPU and the machine's memory, for host-memory-gib; by default PCIe 5.0's 55.
    host_bandwidth: Optional[float] = None
    dry_run_gemms: bool = False  # With --dry-run: also list the shapes and formats of all GEMMs.


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    snip: SnipConfig = field(default_factory=SnipConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Groups of options as plain values, for config.json and checkpoints."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def replace(self, **options: Any) -> Config:
        """A copy with some options changed, by flat name.  Raises UserError for an unknown name."""
        groups = option_groups()
        check_names(options, "options")
        changed = {
            group: dataclasses.replace(getattr(self, group), **{k: v for k, v in options.items() if groups[k] == group})
            for group in {groups[name] for name in options}
        }
        return dataclasses.replace(self, **changed)

    def with_iterations(self) -> Config:
        """The options with --train-iters computed from --train-samples, as in Megatron-LM's update_train_iters."""
        t, iterations, consumed = self.training, 0, 0
        if t.train_samples is None or t.train_iters or min(t.batch_sizes, default=0) < 1:
            return self
        ramp = t.rampup_batch_size[2] if t.rampup_batch_size else -1
        while consumed <= min(ramp, t.train_samples):
            consumed += t.batch_size(consumed)
            iterations += 1
        return self.replace(train_iters=iterations + max(0, t.train_samples - consumed) // t.global_batch_size)

    def with_defaults(self) -> Config:
        """The options with derived values filled in, as in config.json and checkpoints."""
        return self.replace(num_query_groups=self.model.query_groups, kv_channels=self.model.head_dim)

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that share a sample."""
        p = self.parallel
        return p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size

    @property
    def save_dir(self) -> Path:
        """Folder for checkpoints."""
        return Path(self.checkpoint.save or Path(self.logging.run_dir) / "checkpoints")

    def data_parallel_size(self, world_size: int) -> int:
        """Number of data-parallel ranks among `world_size`.  Raises UserError if it does not divide."""
        if world_size % self.model_parallel_size:
            p, context = self.parallel, self.parallel.context_parallel_size
            too, size = (" x context", f" x {context}") if context > 1 else ("", "")
            raise UserError(
                f"world size {world_size} is not a multiple of tensor x pipeline{too} parallel = "
                f"{p.tensor_model_parallel_size} x {p.pipeline_model_parallel_size}{size}; "
                f"start {self.model_parallel_size} processes (torchrun --nproc_per_node), or a multiple"
            )
        return world_size // self.model_parallel_size

    def replicas(self, dp_size: int) -> int:
        """Number of dp and cp ranks that hold the same shard of weights and optimiser state."""
        p = self.parallel
        if p.data_parallel_sharding_strategy == "no_shard":
            return dp_size * p.context_parallel_size
        return p.num_distributed_optimizer_instances

    def num_microbatches(self, dp_size: int) -> int:
        """Microbatches per rank in an iteration with the full batch size."""
        return self.training.global_batch_size // (self.training.micro_batch_size * dp_size)


def option_groups() -> dict[str, str]:
    """Flat option name -> the group (field of Config) that holds it."""
    groups: dict[str, str] = {}
    for group in dataclasses.fields(Config):
        for option in dataclasses.fields(getattr(Config(), group.name)):
            assert option.name not in groups, f"option {option.name} stands in two groups"
            groups[option.name] = group.name
    return groups


def check_names(names: Sequence[str] | dict[str, Any], where: str) -> None:
    """Raise UserError for the first unknown option, with the nearest known one.  where: "" for a command line."""
    known = list(option_groups())
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            shown = [f"{one} in {where}" if where else f"--{one.replace('_', '-')}" for one in (name, *near)]
            hint = f"did you mean {shown[1].partition(' ')[0]}?" if near else "--help lists all options"
            raise UserError(f"unknown option {shown[0]}; {hint}")
