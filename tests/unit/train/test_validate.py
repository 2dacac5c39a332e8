"""Every rule on options, each with one option changed in a layout that is right."""

from __future__ import annotations

from dataclasses import fields

import pytest

from megatron_snip.config import Config
from megatron_snip.train.validate import RANGES, check_restarts, validate

GOOD = {
    "num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4,
    "seq_length": 256, "vocab_size": 512, "untie_embeddings_and_output_weights": True, "micro_batch_size": 2,
    "global_batch_size": 24, "train_iters": 10, "mock_data": True, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2, "sequence_parallel": True,
}  # fmt: skip
WORLD = 12  # three copies: four microbatches of two sequences each
POSITIVE = [
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "global_batch_size",
    "train_iters", "micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "log_interval", "snip_interval", "max_skipped_iterations", "make_vocab_size_divisible_by",
]  # fmt: skip


def error(world: int = WORLD, **changes) -> str:
    with pytest.raises(ValueError) as info:
        validate(Config().replace(**{**GOOD, **changes}), world)
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": None},
        {"num_layers_per_virtual_pipeline_stage": 2},
        {"kv_channels": 10},
        {"max_position_embeddings": 256},
        {"snip_target": 0.0},
        {"snip_target": 1.0},
        {"snip_max_loss": 0.1, "snip_trials": 3},
        {"snip_apply_lag": 0},
        {"snip_guard": True, "max_skipped_iterations": 6, "spike_window": 16},
        {"max_skipped_iterations": 1, "spike_window": 2},
        {"snip_apply_lag": 4, "snip_interval": 5},
        {"precision": "plan", "precision_plan": "p"},
        {"mock_data": False, "data_path": ("a",)},
        {"mock_data": False, "train_data_path": ("a",), "valid_data_path": ("b",)},
        {"num_distributed_optimizer_instances": 3},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        {"data_parallel_sharding_strategy": "no_shard"},
        {"train_iters": 0, "train_samples": 90, "rampup_batch_size": (12, 6, 9), "lr_warmup_samples": 3},
        {"train_iters": 3, "train_samples": 90},  # as a saved run has them
        {"eval_iters": 0},  # Megatron's way to say: no validation
    ],
)
def test_good_layouts_pass(changes):
    validate(Config().replace(**{**GOOD, **changes}), WORLD)


def test_a_lone_process_may_tie_its_embeddings():
    alone = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "global_batch_size": 2}
    validate(Config().replace(**{**GOOD, **alone, "untie_embeddings_and_output_weights": False}), 1)


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_that_must_be_positive(name, value):
    said = "missing or 0" if value == 0 and option_default(name) == 0 else value  # whoever leaves it out typed no 0
    assert error(**{name: value}) == f"--{name.replace('_', '-')} is {said}; give a positive number"


def option_default(name: str) -> object:
    return next(f.default for group in fields(Config) for f in fields(getattr(Config(), group.name)) if f.name == name)


def numeric_options() -> set[str]:
    types = {f.name: str(f.type) for group in fields(Config) for f in fields(getattr(Config(), group.name))}
    return {name for name, kind in types.items() if "int" in kind or "float" in kind or kind == "Needed"}


def test_every_numeric_option_has_a_range():
    own_rules = {
        "profile_ranks", "rampup_batch_size", "snip_apply_lag", "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    }  # fmt: skip
    assert {name for _, names in RANGES.values() for name in names} | own_rules == numeric_options()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in RANGES.items() for name in names])
def test_numbers_out_of_range_are_named(kind, name):
    too_high = {"0 or more and less than 1": 1.0, "0 to 4294967295": 2**32, "a share, 0 to 1": 1.01}
    for value in (-1, float("nan"), float("inf"), too_high.get(kind, -2)):
        assert error(**{name: value}) == f"--{name.replace('_', '-')} is {value}; give {kind}"


def test_workers_have_a_limit_by_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    validate(Config().replace(**GOOD, num_workers=128), WORLD)
    assert error(num_workers=129) == "--num-workers is 129; give at most 128, 4 for each core of this machine or 64"
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert error(num_workers=10000).startswith("--num-workers is 10000; give at most 64,")


def test_a_world_size_that_context_parallel_does_not_divide():
    said = error(12, context_parallel_size=2)
    assert said.startswith(
        "world size 12 is not a multiple of tensor x pipeline x context parallel = 2 x 2 x 2; start 8"
    )


@pytest.mark.parametrize("world", [1, 2, 6, 13])
def test_world_sizes_that_do_not_divide(world):
    said = error(world)
    assert said == (
        f"world size {world} is not a multiple of tensor x pipeline parallel = 2 x 2; "
        "start 4 processes (torchrun --nproc_per_node), or a multiple"
    )


CASES = [
    ({"num_query_groups": 3}, ["--num-query-groups: 8 is not a multiple of 3"]),
    ({"hidden_size": 250}, ["--hidden-size by heads: 250 is not a multiple of 8", "--kv-channels"]),
    ({"kv_channels": 15}, ["channels of a head", "15 is not a multiple of 2", "--kv-channels"]),
    (
        {"num_attention_heads": 5, "kv_channels": 4, "num_query_groups": 5},
        ["--num-attention-heads by tensor parallel: 5 is not a multiple of 2", "--tensor-model-parallel-size"],
    ),
    ({"num_query_groups": 1}, ["--num-query-groups by tensor parallel: 1 is not a multiple of 2"]),
    ({"hidden_size": 257, "kv_channels": 32}, ["--hidden-size by tensor parallel: 257 is not a multiple of 2"]),
    ({"ffn_hidden_size": 511}, ["--ffn-hidden-size by tensor parallel: 511 is not a multiple of 2"]),
    ({"num_layers": 7}, ["--num-layers by pipeline parallel: 7 is not a multiple of 2"]),
    ({"num_layers_per_virtual_pipeline_stage": 3}, ["layers a virtual stage: 4 is not a multiple of 3"]),
    ({"decoder_first_pipeline_num_layers": 8}, ["--decoder-first-pipeline-num-layers 8 leaves 0 of 8 blocks to 1"]),
    ({"num_layers_per_virtual_pipeline_stage": 0}, ["--num-layers-per-virtual-pipeline-stage is 0", "give at least 1"]),
    (
        {"num_layers_per_virtual_pipeline_stage": 2, "pipeline_model_parallel_size": 1},
        ["--num-layers-per-virtual-pipeline-stage is 2", "--pipeline-model-parallel-size 1"],
    ),
    (
        {"num_layers_per_virtual_pipeline_stage": 2, "global_batch_size": 30},
        ["microbatches by rounds of the interleaved pipeline: 5 is not a multiple of 2", "--global-batch-size"],
    ),
    (
        {"context_parallel_size": 3, "pipeline_model_parallel_size": 1},
        ["--seq-length in two pieces of whole 128-token tiles for each of 3 context", "256 is not a multiple of 768"],
    ),
    ({"seq_length": 192}, ["--seq-length by the quantisation tile: 192 is not a multiple of 128"]),
    ({"max_position_embeddings": 255}, ["--seq-length 256 is beyond --max-position-embeddings 255", "raise the limit"]),
    ({"global_batch_size": 25}, ["25 is not a multiple of 6", "(2 x 3)", "the number of ranks"]),
    ({"global_batch_size": 6}, ["1 microbatches an iteration cannot fill 2 pipeline stages", "lower --micro-batch"]),
    ({"recompute_method": "uniform"}, ["--recompute-method is given, but --recompute-granularity is none; use full"]),
    (
        {"recompute_num_layers": 2, "recompute_granularity": "selective"},
        ["--recompute-num-layers is given", "is selective; use full"],
    ),
    (
        {"recompute_modules": ("mlp", "layernorm"), "recompute_granularity": "selective"},
        ["--recompute-modules layernorm is unknown; known: core_attn, mlp"],
    ),
    ({"recompute_modules": ("mlp",)}, ["--recompute-modules is given", "is none; use selective"]),
    ({"recompute_granularity": "selective", "compile": True}, ["--compile does not go with --recompute-granularity"]),
    (
        {"num_distributed_optimizer_instances": 2},
        ["data-parallel ranks by --num-distributed-optimizer-instances: 3 is not a multiple of 2"],
    ),
    (
        {"num_distributed_optimizer_instances": 3, "data_parallel_sharding_strategy": "no_shard"},
        ["--num-distributed-optimizer-instances is 3", "no_shard shards nothing; drop one"],
    ),
    (
        {"fp8_param_gather": True, "data_parallel_sharding_strategy": "no_shard"},
        ["--fp8-param-gather", "no_shard, which gathers no weights; drop one"],
    ),
    ({"grad_reduce_in_bf16": True}, ["--grad-reduce-in-bf16 needs --bf16", "add --bf16 or drop it"]),
    ({"num_distributed_optimizer_instances": 0}, ["--num-distributed-optimizer-instances is 0"]),
    (
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5},
        ["--optimizer-offload-fraction is 1.5; give a share, 0 to 1"],
    ),
    (
        {"optimizer_offload_fraction": 0.5},
        ["--optimizer-offload-fraction is 0.5, but --optimizer-cpu-offload is not given; add it"],
    ),
    (
        {"optimizer_cpu_offload": True, "optimizer_impl": "apex"},
        ["--optimizer-cpu-offload updates weights on the host", "--optimizer-impl apex", "use --optimizer-impl torch"],
    ),
    ({"host_memory_gib": 8.0}, ["--host-memory-gib 8.0 needs --memory-plan auto"]),
    (
        {"host_memory_gib": 8.0, "memory_plan": "auto", "optimizer_cpu_offload": True},
        ["--host-memory-gib 8.0 lets --memory-plan auto decide", "--optimizer-cpu-offload is given; drop one"],
    ),
    ({"snip_target": -0.1}, ["--snip-target is -0.1", "0 to 1"]),
    ({"snip_target": 1.1}, ["--snip-target is 1.1"]),
    ({"snip_target": float("nan")}, ["--snip-target is nan"]),
    ({"snip_max_loss": 0.0}, ["--snip-max-loss is 0.0; give a number above 0"]),
    ({"snip_max_loss": -0.1}, ["--snip-max-loss is -0.1; give a number above 0"]),
    ({"snip_max_loss": float("nan")}, ["--snip-max-loss is nan"]),
    ({"snip_max_loss": 0.1, "snip_trials": 0}, ["--snip-max-loss 0.1 needs trials", "--snip-trials is 0; give 3"]),
    ({"snip_guard": True, "max_skipped_iterations": 5}, ["--snip-guard-patience is 5", "--max-skipped-iterations 5"]),
    ({"snip_guard": True, "spike_window": 15}, ["--snip-guard-patience is 5", "--spike-window 15"]),
    ({"snip_apply_lag": -1}, ["--snip-apply-lag is -1"]),
    ({"snip_apply_lag": 5, "snip_interval": 5}, ["--snip-apply-lag is 5", "--snip-interval - 1 = 4"]),
    ({"precision": "plan"}, ["--precision plan needs a plan; give --precision-plan FILE"]),
    ({"precision_plan": "p"}, ["--precision-plan is given, but --precision is bf16; use --precision plan"]),
    ({"mock_data": False}, ["no data: give --data-path, --train-data-path or --mock-data"]),
    ({"mock_data": False, "data_path": ("a",), "train_data_path": ("b",)}, ["exclude each other"]),
    ({"mock_data": False, "data_path": ("a",), "valid_data_path": ("b",)}, ["exclude each other"]),
    ({"data_path": ("a",)}, ["--mock-data is given with paths of real data; drop one"]),
]


@pytest.mark.parametrize(("changes", "said"), CASES, ids=[" ".join(map(str, c.values())) for c, _ in CASES])
def test_rules(changes, said):
    world = 6 if changes.get("pipeline_model_parallel_size") == 1 else WORLD
    line = error(world, **changes)
    assert all(part in line for part in said), line


def test_sequence_parallel_cuts_the_sequence_evenly():
    odd = {"tensor_model_parallel_size": 3, "num_attention_heads": 9, "num_query_groups": 3, "kv_channels": 32,
           "hidden_size": 288, "ffn_hidden_size": 513, "global_batch_size": 24}  # fmt: skip
    assert "--seq-length by tensor parallel: 256 is not a multiple of 3" in error(18, **odd)
    validate(Config().replace(**{**GOOD, **odd, "sequence_parallel": False}), 18)


def test_a_run_may_end_while_it_warms_up():
    """As a short try of a long schedule does."""
    validate(Config().replace(**GOOD, lr_warmup_iters=2000), 12)
    validate(Config().replace(**GOOD, lr_warmup_iters=20, lr_decay_iters=15), 12)
    validate(Config().replace(**GOOD, lr_warmup_iters=5, lr_decay_iters=4, lr_decay_style="constant"), 12)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"precision": "snip", "snip_solve_timeout": 60.0, "distributed_timeout_minutes": 1.0},
            "--snip-solve-timeout is 60 seconds, and --distributed-timeout-minutes 1 ends a run whose ranks wait",
        ),
        ({"lr": 1e-3, "min_lr": 2e-3}, "--min-lr 0.002 is above --lr 0.001"),
        (
            {"profile": True, "profile_step_start": 13},
            "--profile-step-end 12 is before --profile-step-start 13; change",
        ),
        ({"profile_ranks": (0, 12)}, "--profile-ranks 12: the run's ranks are 0 to 11; leave it out"),
        ({"lr": 1e-3, "lr_warmup_init": 2e-3}, "--lr-warmup-init 0.002 is above --lr 0.001"),
        (
            {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2},
            "--lr-warmup-fraction and --lr-warmup-iters",
        ),
        (
            {"lr_warmup_iters": 5, "lr_decay_iters": 4},
            "--lr-decay-iters 4 leaves nothing after the warm-up of --lr-warmup-iters 5; raise the",
        ),
        (
            {"lr_warmup_fraction": 1.0, "lr_decay_iters": 4},
            "--lr-decay-iters 4 leaves nothing after the warm-up of --lr-warmup-fraction 1; raise the",
        ),
        ({"lr_warmup_samples": 2}, "--lr-warmup-samples counts samples; give --train-samples"),
        ({"rampup_batch_size": (4, 2, 9), "global_batch_size": 6}, "--rampup-batch-size counts samples; give"),
        ({"rampup_batch_size": (4, 4, 9), "global_batch_size": 6}, "--rampup-batch-size is 4 4 9; give START INCREM"),
        ({"rampup_batch_size": (6, 2, 9), "global_batch_size": 6}, "--rampup-batch-size is 6 2 9; give START INCREM"),
        ({"rampup_batch_size": (4, 0, 9), "global_batch_size": 6}, "--rampup-batch-size is 4 0 9; give START INCREM"),
        ({"rampup_batch_size": (4, 2), "global_batch_size": 6}, "--rampup-batch-size is 4 2; give START INCREMENT"),
        ({"train_samples": 90}, "--train-iters is 10, but --train-samples 90 makes 3; drop one"),
        ({"train_samples": 9, "train_iters": 0}, "--train-samples is 9, less than --global-batch-size 24; change one"),
        ({"train_samples": 90, "train_iters": 0, "lr_warmup_iters": 3}, "--lr-warmup-iters counts iterations, but"),
        (
            {"train_samples": 90, "train_iters": 0, "rampup_batch_size": (12, 4, 9)},
            "a batch of --rampup-batch-size by --micro-batch-size x data parallel (2 x 3): 16 is not a multiple of 6",
        ),
        ({"start_weight_decay": 0.1}, "--start-weight-decay and --end-weight-decay need a weight decay that grows"),
        (
            {"weight_decay_incr_style": "linear", "end_weight_decay": 1.0},
            "--weight-decay-incr-style linear needs --start",
        ),
        (
            {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "--start-weight-decay 0.2 is above --end-weight-decay 0.1",
        ),
        ({"lr_wsd_decay_iters": 3}, "--lr-wsd-decay-iters is given, but --lr-decay-style is cosine; use WSD"),
        ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters, the length of its final decay"),
        (
            {"lr_decay_style": "WSD", "train_samples": 240, "train_iters": 0},
            "--lr-decay-style WSD needs --lr-wsd-decay-samples, the length of its final decay",
        ),
        (
            {"use_rope_scaling": True, "rope_low_freq_factor": 4.0},
            "--rope-low-freq-factor 4 must be below --rope-high-freq-factor 4; change one",
        ),
        (
            {"snip_final_precision": "bf16"},
            "--snip-final-precision bf16: --lr-decay-style cosine has no final decay; give --snip-final-iters a number "
            "of iterations, or use --lr-decay-style WSD",
        ),
        (
            {"snip_final_precision": "bf16", "snip_final_iters": 10**6},
            "--snip-final-iters is 1000000, but --train-iters",
        ),
        ({"snip_final_precision": "fp9", "snip_final_iters": 1}, "--snip-final-precision fp9: fprop: unknown format"),
        ({"snip_final_iters": 0}, "--snip-final-iters is 0; give a positive number"),
        ({"exit_on_missing_checkpoint": True}, "--exit-on-missing-checkpoint needs --load"),
        (
            {"device": "cpu", "distributed_backend": "nccl"},
            "--distributed-backend nccl is for GPUs, but --device is cpu",
        ),
        (
            {"device": "cuda", "distributed_backend": "gloo"},
            "--pipeline-model-parallel-size is 2, but gloo cannot send between GPUs; use nccl, or one",
        ),
    ],
)
def test_options_that_contradict_each_other(changes, said):
    assert error(**changes).startswith(said)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "snip", "snip_solve_timeout": 59.0, "distributed_timeout_minutes": 1.0},
        {"precision": "fp4", "snip_solve_timeout": 60.0, "distributed_timeout_minutes": 1.0},
        {"lr": 1e-3, "min_lr": 2e-3, "lr_decay_style": "constant"},
        {"lr_wsd_decay_iters": 3, "lr_decay_style": "WSD"},
        {"exit_on_missing_checkpoint": True, "load": "a"},
        {"device": "cuda", "distributed_backend": "gloo", "pipeline_model_parallel_size": 1},
    ],
)
def test_options_that_agree_pass(changes):
    validate(Config().replace(**{**GOOD, **changes}), WORLD)


def test_a_restart_must_be_able_to_continue():
    def said(restarts: int = 3, requeues: int = 0, **changes) -> str:
        try:
            check_restarts(Config().replace(**GOOD, run_dir="r", **changes), restarts, requeues)
        except ValueError as error:
            return str(error)
        return ""

    assert said(load="r/checkpoints") == said(load="s", save="s") == said(restarts=0) == ""
    assert said().startswith("--max-restarts is 3, and a restart would continue from --load None, not from r/check")
    assert "give --load s" in said(load="r/checkpoints", save="s")
    assert said(load="r/checkpoints", finetune=True).startswith("--finetune starts over at each start, and --max-res")
    r = "r/checkpoints"
    back = f"; to go back once, give --load {r} alone and write 4 into {r}/latest_checkpointed_iteration.txt"
    step = {"load": r, "ckpt_step": 4}
    assert said(**step) == f"--ckpt-step 4 goes back at each start, and --max-restarts is 3{back}"
    assert said(0, 1, **step) == f"--ckpt-step 4 goes back at each start, and SLURM_RESTART_COUNT is 1{back}"
    folder = "r/checkpoints/iter_0000004"
    assert said(0, 1, load=folder) == f"--load {folder} goes back at each start, and SLURM_RESTART_COUNT is 1{back}"
    assert said(0, 0, **step) == said(0, 2, load="s", save="s") == said(0, 2, **step, finetune=True) == ""


@pytest.mark.parametrize("option", ["distributed_timeout_minutes", "snip_solve_timeout"])
def test_a_time_that_no_clock_holds_is_refused(option):
    name = option.replace("_", "-")
    assert error(**{option: 1e300}) == f"--{name} is 1e+300; give a number above 0, at most 1000000"


def test_no_model_has_so_many_blocks_or_none():
    assert error(num_layers=0, hidden_size=0).startswith("no model: give --num-layers, --hidden-size, ")
    loaded = error(num_layers=0, hidden_size=0, load="llama")
    assert loaded.endswith(
        "such as the model.toml that `megatron-snip convert import` writes of a model from Hugging Face"
    )
    assert error(num_layers=0) == "--num-layers is missing or 0; give a positive number up to 9999"
    assert error(num_layers=10**9) == "--num-layers is 1000000000; give a positive number up to 9999"
