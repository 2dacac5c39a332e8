"""Every option of a run: frozen dataclasses, one flat command line, the same names in a TOML file.

Names are Megatron-LM's where Megatron has one; `--snip-*` are ours.  The command line wins over the file.
Values that name a format or an objective are plain strings here, because the registries stand above this
module; `train.setup` checks them before anything is built.  Source of the names: Megatron-LM core 0.16.1.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

TILE = 128  # tokens and channels of a quantisation tile; shapes are checked against it


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the Llama."""

    num_layers: int = 0  # Transformer blocks (required).
    hidden_size: int = 0  # Width of the residual stream (required).
    ffn_hidden_size: int = 0  # Width of the SwiGLU (required).
    num_attention_heads: int = 0  # Query heads (required).
    num_query_groups: Optional[int] = None  # Key/value heads; by default as many as query heads.
    kv_channels: Optional[int] = None  # Channels of a head; by default hidden size / heads.
    seq_length: int = 0  # Tokens of a training sequence (required).
    max_position_embeddings: Optional[int] = None  # Longest position; by default the sequence length.
    rotary_base: float = 10000.0  # Base of the rotary embedding.
    use_rope_scaling: bool = False  # Llama 3's frequency scaling of the rotary embedding.
    rope_scaling_factor: float = 8.0  # Llama 3: how much low frequencies are stretched.
    rope_low_freq_factor: float = 1.0  # Llama 3: below original length / this many turns, stretch fully.
    rope_high_freq_factor: float = 4.0  # Llama 3: above original length / this many turns, leave alone.
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
        """Rows of the embedding: the vocabulary padded up, the same on every layout."""
        if not self.vocab_size:
            raise ValueError("vocab_size is not known yet: give --vocab-size or a tokenizer")
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are laid out over processes."""

    tensor_model_parallel_size: int = 1  # Processes that share each linear.
    pipeline_model_parallel_size: int = 1  # Processes that share the blocks.
    num_layers_per_virtual_pipeline_stage: Optional[int] = None  # Blocks a chunk, for interleaved 1F1B.
    sequence_parallel: bool = False  # Shard norms and residuals along the sequence, over tensor parallel.
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl on GPUs, gloo on CPUs.
    distributed_timeout_minutes: float = 10.0  # A collective that takes longer ends the run.


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, optimiser, schedule and how a run ends."""

    micro_batch_size: int = 1  # Sequences a process runs at once.
    global_batch_size: int = 0  # Sequences of one iteration over all processes (required).
    train_iters: int = 0  # Iterations of the whole run (required).
    lr: float = 3e-4  # Peak learning rate.
    min_lr: float = 0.0  # Learning rate at the end of the decay.
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "cosine"  # Schedule after warm-up.
    lr_decay_iters: Optional[int] = None  # Iterations until min-lr; by default train-iters.
    lr_warmup_iters: int = 0  # Iterations of linear warm-up.
    lr_wsd_decay_iters: Optional[int] = None  # WSD: iterations of the final linear decay (default: a tenth).
    weight_decay: float = 0.01  # Decoupled weight decay of matrices; norms have none.
    adam_beta1: float = 0.9  # AdamW's first decay rate.
    adam_beta2: float = 0.999  # AdamW's second decay rate.
    adam_eps: float = 1e-8  # AdamW's epsilon.
    optimizer_impl: Literal["torch", "apex"] = "torch"  # apex: FusedAdam of NVIDIA's apex, on GPUs.
    clip_grad: float = 1.0  # Largest norm of the whole gradient; 0 clips nothing.
    seed: int = 1234  # Seed of weights, data order and stochastic rounding.
    bf16: bool = False  # Compute in BF16 with FP32 master weights; without it in float32.
    recompute_granularity: Literal["none", "full"] = "none"  # full: recompute each block in backward.
    max_skipped_iterations: int = 10  # Iterations in a row with a non-finite loss or gradient that end it.
    exit_interval: Optional[int] = None  # Save and leave when the iteration divides by this.
    exit_duration_in_mins: Optional[float] = None  # Save and leave after this many minutes.
    exit_signal_handler: bool = True  # Save and leave cleanly on SIGTERM.


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    data_path: tuple[str, ...] = ()  # Prefix of a .bin/.idx pair, or weight prefix weight prefix ...
    train_data_path: tuple[str, ...] = ()  # The same for training alone, in place of --data-path.
    valid_data_path: tuple[str, ...] = ()  # The same for validation alone, in place of --data-path.
    split: str = "969,30,1"  # Shares of --data-path for training, validation, test.
    data_cache_path: Optional[str] = None  # Folder that keeps sample indices between runs.
    mock_data: bool = False  # Made-up tokens, for a first try of a layout.
    tokenizer_type: str = "NullTokenizer"  # SentencePieceTokenizer, HuggingFaceTokenizer, ...
    tokenizer_model: Optional[str] = None  # The tokenizer's file or folder.


@dataclass(frozen=True)
class LoggingConfig:
    """The run folder, the log, wandb and validation."""

    run_dir: str = "runs/default"  # Folder of metrics, plans, statistics, checkpoints and the report.
    log_interval: int = 10  # Iterations between two progress lines.
    log_throughput: bool = False  # Add TFLOP/s a GPU (model FLOPs) to the progress line.
    eval_interval: Optional[int] = None  # Iterations between two validations; by default none.
    eval_iters: int = 10  # Batches of one validation.
    wandb_project: Optional[str] = None  # Log to this wandb project (needs the wandb extra).
    wandb_exp_name: Optional[str] = None  # Name of the wandb run; by default the run folder's.
    wandb_save_dir: Optional[str] = None  # Folder of wandb's files; by default <run-dir>/wandb.
    wandb_mode: Literal["online", "offline"] = "offline"  # offline: sync later with `wandb sync`.


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: Optional[str] = None  # Folder of checkpoints; by default <run-dir>/checkpoints.
    load: Optional[str] = None  # Folder to continue from; an empty one starts at iteration 0.
    save_interval: Optional[int] = None  # Iterations between two checkpoints; by default only at the end.
    no_load_optim: bool = False  # Leave the saved optimiser state alone and start it from zero.
    finetune: bool = False  # Load the weights alone; iteration, data and optimiser start from zero.
    exit_on_missing_checkpoint: bool = False  # Fail if --load holds no checkpoint.


@dataclass(frozen=True)
class PrecisionConfig:
    """What the linears compute in."""

    precision: str = "bf16"  # bf16, fp8, fp4 or another format; plan (fixed, from a file); snip (re-planned).
    precision_plan: Optional[str] = None  # The plan file of --precision plan.
    linear_impl: str = "auto"  # Implementation of quantised linears; auto takes the best that is here.


@dataclass(frozen=True)
class SnipConfig:
    """When and how precision is planned (--precision snip)."""

    snip_target: float = 0.75  # Share of the linears' FLOPs that the plan must put in FP4.
    snip_interval: int = 1000  # Iterations between two probes.
    snip_start: int = 100  # Iteration of the first probe.
    snip_apply_lag: int = 1  # A plan probed before iteration i holds from iteration i + this.
    snip_options: str = "fp8,fp4"  # Precisions a linear may take, by comma; a/b/c is fprop/dgrad/wgrad.
    snip_granularity: Literal["linear"] = "linear"  # What gets one choice: a whole linear.
    snip_objective: str = "snip"  # What a plan minimises; see docs/architecture.md for the names.
    snip_weight: float = 1.0  # c of the objective: weight of the weight divergence.
    snip_warmup_precision: str = "bf16"  # Format of all linears until the first plan holds.
    snip_stage_target: bool = False  # Hold every pipeline stage to its own share of the target.
    snip_solve_timeout: float = 60.0  # Seconds to wait for a late solver before keeping the old plan.


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

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Groups of options as plain values, for config.json and checkpoints."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def replace(self, **options: Any) -> Config:
        """A copy with options changed by their flat names; an unknown name raises ValueError."""
        groups = option_groups()
        check_names(options, "options")
        changed = {
            group: dataclasses.replace(
                getattr(self, group), **{k: v for k, v in options.items() if groups[k] == group}
            )
            for group in {groups[name] for name in options}
        }
        return dataclasses.replace(self, **changed)

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model."""
        return self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size

    @property
    def save_dir(self) -> Path:
        """Folder that checkpoints go to."""
        return Path(self.checkpoint.save or Path(self.logging.run_dir) / "checkpoints")

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among `world_size` processes; ValueError if they do not divide."""
        if world_size % self.model_parallel_size:
            raise ValueError(
                f"world size {world_size} is not a multiple of tensor x pipeline parallel = "
                f"{self.parallel.tensor_model_parallel_size} x {self.parallel.pipeline_model_parallel_size}; "
                f"start {self.model_parallel_size} processes (torchrun --nproc_per_node), or a multiple"
            )
        return world_size // self.model_parallel_size

    def num_microbatches(self, dp_size: int) -> int:
        """Microbatches that one process runs in an iteration."""
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
    """ValueError for the first name that is no option, with the nearest one that is."""
    known = list(option_groups())
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown option {name} in {where}; did you mean {near}?")


def read_toml(path: Path) -> dict[str, Any]:
    """Options of a TOML file; tables group them for the reader and their names mean nothing."""
    if not path.is_file():
        raise ValueError(f"--config {path}: no such file; give the path of a TOML file of options")
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not valid TOML: {error}") from error
    options: dict[str, Any] = {}
    for key, value in content.items():
        for name, item in value.items() if isinstance(value, dict) else [(key, value)]:
            name = name.replace("-", "_")
            if name in options:
                raise ValueError(f"--config {path}: option {name} is given twice; keep one")
            options[name] = item
    check_names(options, str(path))
    return options


def _as_arguments(options: dict[str, Any]) -> list[str]:
    """Options as command-line words, so that one parser checks the types of both sources."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            items = value if isinstance(value, list) else [value]
            words += [f"--{flag}", *map(str, items)]
    return words


def parse(argv: Sequence[str]) -> Config:
    """Config from command-line words; ValueError for what cannot be read (`--help` prints and exits)."""
    import tyro

    words = list(argv)
    file_options: dict[str, Any] = {}
    for i, word in enumerate(words):
        if word == "--config" or word.startswith("--config="):
            path = word.partition("=")[2] or (words[i + 1] if i + 1 < len(words) else "")
            del words[i : i + (1 if "=" in word else 2)]
            file_options = read_toml(Path(path))
            break
    given = [w.partition("=")[0][2:].replace("-", "_") for w in words if w.startswith("--") and len(w) > 2]
    names = [name[3:] if name.startswith("no_") and name not in option_groups() else name for name in given]
    check_names([n for n in names if n != "help"], "the command line")
    words = _as_arguments({k: v for k, v in file_options.items() if k not in names}) + words
    return tyro.cli(
        Config,
        args=words,
        prog="pretrain_llama.py",
        description="Pretrain a Llama whose linears' precision is planned. --config FILE.toml reads options "
        "from a file; the command line wins.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _positive(config: Config) -> None:
    required = [
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length",
        "global_batch_size", "train_iters", "micro_batch_size",
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "log_interval", "snip_interval",
    ]  # fmt: skip
    groups = option_groups()
    for name in required:
        value = getattr(getattr(config, groups[name]), name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give a positive number")


def _divides(value: int, by: int, what: str, way_out: str) -> None:
    if value % by:
        raise ValueError(f"{what}: {value} is not a multiple of {by}; {way_out}")


def validate(config: Config, world_size: int) -> None:
    """Check every layout rule that needs no file, before anything is built.  Raises ValueError."""
    _positive(config)
    m, p, t = config.model, config.parallel, config.training
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    dp = config.data_parallel_size(world_size)
    change_tp = "change it or --tensor-model-parallel-size"
    _divides(m.num_attention_heads, m.query_groups, "--num-attention-heads by --num-query-groups", "change one")
    if m.kv_channels is None:
        _divides(m.hidden_size, m.num_attention_heads, "--hidden-size by heads", "give --kv-channels")
    _divides(m.num_attention_heads, tp, "--num-attention-heads by tensor parallel", change_tp)
    _divides(m.query_groups, tp, "--num-query-groups by tensor parallel", change_tp)
    for name, width in (("--hidden-size", m.hidden_size), ("--ffn-hidden-size", m.ffn_hidden_size)):
        _divides(width, tp, f"{name} by tensor parallel", change_tp)
    _divides(m.num_layers, pp, "--num-layers by pipeline parallel", "change one")
    if p.num_layers_per_virtual_pipeline_stage is not None:
        per_stage = m.num_layers // pp
        _divides(per_stage, p.num_layers_per_virtual_pipeline_stage, "layers a stage by layers a virtual stage",
                 "change --num-layers-per-virtual-pipeline-stage")  # fmt: skip
    if pp > 1 and not m.untie_embeddings_and_output_weights:
        raise ValueError(
            f"tied embeddings need both ends of the model in one process, and --pipeline-model-parallel-size "
            f"is {pp}; add --untie-embeddings-and-output-weights or use one stage"
        )
    _divides(m.seq_length, TILE, "--seq-length by the quantisation tile", "change --seq-length")
    if m.max_position_embeddings is not None and m.max_position_embeddings < m.seq_length:
        raise ValueError(
            f"--seq-length {m.seq_length} is beyond --max-position-embeddings {m.max_position_embeddings}; "
            "shorten the sequence or raise the limit"
        )
    if p.sequence_parallel:
        _divides(m.seq_length, tp, "--seq-length by tensor parallel", "change it or drop --sequence-parallel")
    _divides(t.global_batch_size, t.micro_batch_size * dp, "--global-batch-size by --micro-batch-size x data "
             f"parallel ({t.micro_batch_size} x {dp})", "change one of them or the number of processes")  # fmt: skip
    if config.num_microbatches(dp) < pp:
        raise ValueError(
            f"{config.num_microbatches(dp)} microbatches an iteration cannot fill {pp} pipeline stages; "
            "raise --global-batch-size or lower --micro-batch-size"
        )
    _validate_choices(config)


def _validate_choices(config: Config) -> None:
    s, d = config.snip, config.data
    if not 0.0 <= s.snip_target <= 1.0:
        raise ValueError(f"--snip-target is {s.snip_target}; it is a share, give 0 to 1")
    if s.snip_apply_lag < 0 or s.snip_apply_lag >= s.snip_interval:
        raise ValueError(
            f"--snip-apply-lag is {s.snip_apply_lag}; give 0 to --snip-interval - 1 = {s.snip_interval - 1}, "
            "so that one solve ends before the next begins"
        )
    if config.precision.precision == "plan" and not config.precision.precision_plan:
        raise ValueError("--precision plan needs a plan; give --precision-plan FILE")
    if config.precision.precision != "plan" and config.precision.precision_plan:
        raise ValueError(
            f"--precision-plan is given, but --precision is {config.precision.precision}; use --precision plan"
        )
    if not (d.mock_data or d.data_path or d.train_data_path):
        raise ValueError("no data: give --data-path, --train-data-path or --mock-data")
    if d.data_path and (d.train_data_path or d.valid_data_path):
        raise ValueError("--data-path and --train-data-path/--valid-data-path exclude each other; keep one kind")
