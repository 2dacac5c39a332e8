"""Options: one flat command line, the same names in TOML, and every complaint about them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from megatron_snip import config as config_module
from megatron_snip.arguments import ALTERNATIVES, parse
from megatron_snip.config import Config, option_groups
from megatron_snip.errors import UserError

#: Words of the command line -> value; every option stands here once (checked below).
WORDS = {
    "model_name": "qwen3",
    "num_layers": "4", "hidden_size": "256", "ffn_hidden_size": "512", "num_attention_heads": "8",
    "num_query_groups": "2", "kv_channels": "64", "seq_length": "128", "max_position_embeddings": "256",
    "rotary_base": "5e5", "use_rope_scaling": True, "rope_scaling_factor": "32", "rope_low_freq_factor": "1.5",
    "rope_high_freq_factor": "3.5", "rope_original_max_position_embeddings": "4096", "norm_epsilon": "1e-6",
    "untie_embeddings_and_output_weights": True, "init_method_std": "0.01", "vocab_size": "500",
    "make_vocab_size_divisible_by": "64", "tensor_model_parallel_size": "2", "pipeline_model_parallel_size": "3",
    "num_layers_per_virtual_pipeline_stage": "1", "num_virtual_stages_per_pipeline_rank": "4",
    "decoder_first_pipeline_num_layers": "5", "decoder_last_pipeline_num_layers": "6",
    "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
    "context_parallel_size": "2", "sequence_parallel": True, "grad_reduce_in_bf16": True, "fp8_param_gather": True,
    "data_parallel_sharding_strategy": "optim_grads",
    "num_distributed_optimizer_instances": "2", "distributed_backend": "gloo", "device": "cpu",
    "distributed_timeout_minutes": "2.5", "micro_batch_size": "2", "global_batch_size": "16", "train_iters": "7",
    "rampup_batch_size": ["4", "2", "90"], "train_samples": "112", "lr_decay_samples": "96", "lr_warmup_samples": "32",
    "lr_wsd_decay_samples": "48",
    "lr": "1e-3", "min_lr": "1e-5", "lr_decay_style": "WSD", "lr_decay_iters": "6", "lr_warmup_iters": "2",
    "lr_warmup_fraction": "0.25", "lr_warmup_init": "1e-6", "lr_wsd_decay_style": "cosine",
    "start_weight_decay": "0.05", "end_weight_decay": "0.2", "weight_decay_incr_style": "linear",
    "lr_wsd_decay_iters": "3", "weight_decay": "0.1", "adam_beta1": "0.8", "adam_beta2": "0.95",
    "adam_eps": "1e-7", "optimizer_impl": "apex", "optimizer_precision": "collage-plus",
    "clip_grad": "0.5", "seed": "5", "bf16": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": "0.5",
    "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "2",
    "recompute_modules": ["mlp"], "memory_plan": "auto", "compile": True, "max_skipped_iterations": "4",
    "rerun_mode": "disabled", "deterministic_mode": True, "manual_gc": True, "manual_gc_interval": "6",
    "log_memory": True, "log_edq_interval": "3", "profile": True, "profile_step_start": "2",
    "profile_step_end": "3", "profile_ranks": ["0", "2"], "preflight": False,
    "spike_window": "32", "spike_deviations": "4.5", "spike_nats": "0.25", "exit_interval": "9",
    "exit_duration_in_mins": "1.5", "exit_signal_handler": False, "data_path": ["0.3", "a", "0.7", "b"],
    "train_data_path": ["c"], "valid_data_path": ["d"], "split": "9,1,0", "data_cache_path": "cache",
    "num_workers": "2",
    "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True, "calculate_per_token_loss": True,
    "mock_data": True, "tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "t.model",
    "run_dir": "runs/x", "log_interval": "3", "log_throughput": True, "log_all_ranks": True,
    "eval_interval": "5", "eval_iters": "2",
    "tensorboard_dir": "board",
    "wandb_project": "p", "wandb_exp_name": "-name", "wandb_save_dir": "w", "wandb_mode": "online", "save": "s",
    "load": "l", "save_interval": "8", "async_save": True, "keep_last": 2, "keep_every": 8, "ckpt_step": 5,
    "pretrained_checkpoint": "p",
    "no_load_optim": True, "finetune": True,
    "exit_on_missing_checkpoint": True, "accept_changed_data": True, "precision": "snip", "precision_plan": "plan.json",
    "linear_impl": "emulated", "snip_target": "0.5", "snip_target_unit": "time", "snip_interval": "11",
    "snip_start": "12", "snip_apply_lag": "2", "snip_options": "fp8,fp4/fp4/fp8", "snip_granularity": "fused",
    "snip_fix": "layers.0.*=fp8",
    "snip_stage_constraint": "each", "snip_churn": "0.25", "gemm_times": "times.json",
    "snip_objective": "random", "snip_probe_tokens": "512", "snip_weight": "2.0",
    "snip_trials": "4", "snip_trial_tokens": "256", "snip_max_loss": "0.05", "host_bandwidth": "450",
    "snip_warmup_precision": "fp8", "snip_final_precision": "bf16/plan/plan", "snip_final_iters": "3",
    "snip_solve_timeout": "30", "snip_guard": True, "snip_guard_patience": "3", "snip_bf16_eval_interval": "4",
    "dry_run": True, "world_size": "512", "memory_gib": "80.5", "host_memory_gib": "48.5", "dry_run_gemms": True,
}  # fmt: skip
#: Option names of Megatron-LM core 0.16.1 that exist here.
MEGATRON = """--tensor-model-parallel-size --pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage
--num-virtual-stages-per-pipeline-rank --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
--sequence-parallel --distributed-backend --distributed-timeout-minutes --num-layers --hidden-size --ffn-hidden-size
--num-attention-heads --num-query-groups --kv-channels --seq-length --max-position-embeddings --rotary-base
--norm-epsilon --untie-embeddings-and-output-weights --init-method-std --make-vocab-size-divisible-by
--micro-batch-size --global-batch-size --rampup-batch-size --train-iters --train-samples --lr-decay-samples
--lr-warmup-samples --lr-wsd-decay-samples --lr --min-lr --lr-decay-style --lr-decay-iters
--lr-warmup-iters --lr-warmup-fraction --lr-warmup-init --lr-wsd-decay-iters --lr-wsd-decay-style
--start-weight-decay --end-weight-decay --weight-decay-incr-style --weight-decay
--adam-beta1 --adam-beta2 --adam-eps --clip-grad --seed --bf16
--recompute-granularity --exit-interval --exit-duration-in-mins --exit-signal-handler --data-path --split
--data-cache-path --num-workers --reset-position-ids --reset-attention-mask --eod-mask-loss
--calculate-per-token-loss --mock-data --tokenizer-type --tokenizer-model --vocab-size --log-interval --eval-interval
--eval-iters --save --load --save-interval --finetune --no-load-optim --log-throughput --wandb-project
--wandb-exp-name --wandb-save-dir --rerun-mode --deterministic-mode --profile --profile-step-start --profile-step-end
--profile-ranks --manual-gc --manual-gc-interval"""


def flat(config: Config) -> dict[str, object]:
    return {name: getattr(getattr(config, group), name) for name, group in option_groups().items()}


def typed(name: str, word: object) -> object:
    """The value that a word stands for, by the option's annotation."""
    group = type(getattr(Config(), option_groups()[name]))
    kind = get_type_hints(group)[name]
    if isinstance(word, list):
        return tuple(map(get_args(kind)[0], word))
    for one in (kind, *get_args(kind)):
        if one in (int, float):
            return one(word)
    return word


EXPECTED = {name: typed(name, word) for name, word in WORDS.items()}


def command_line(options: dict[str, object]) -> list[str]:
    words: list[str] = []
    for name, word in options.items():
        flag = name.replace("_", "-")
        if isinstance(word, bool):
            words.append(f"--{flag}" if word else f"--no-{flag}")
        elif isinstance(word, list):
            words += [f"--{flag}", *word]
        else:
            words.append(f"--{flag}={word}")
    return words


def toml(options: dict[str, object], tmp_path: Path, text: str = "") -> Path:
    """A file with the values in TOML's own types."""

    def literal(value: object) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(literal, value)) + "]"
        return f'"{value}"' if isinstance(value, str) else repr(value)

    path = tmp_path / "options.toml"
    lines = [f"{name} = {literal(value)}" for name, value in options.items()]
    path.write_text("\n".join([*lines, text]))
    return path


def error(words: list[str]) -> str:
    with pytest.raises(ValueError) as info:
        parse(words)
    assert "\n" not in str(info.value)
    return str(info.value)


def test_the_table_above_has_every_option_and_no_default():
    defaults = flat(Config())
    assert WORDS.keys() == defaults.keys()
    assert [name for name, value in EXPECTED.items() if value == defaults[name]] == []


def without(left: str, options: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name != left}


@pytest.mark.parametrize("left", ALTERNATIVES)
def test_every_option_on_the_command_line(left):
    got = flat(parse(command_line(without(left, WORDS))))
    assert got == {**EXPECTED, left: flat(Config())[left]}
    assert [type(value) for value in without(left, got).values()] == [
        type(EXPECTED[name]) for name in without(left, got)
    ]


@pytest.mark.parametrize("left", ALTERNATIVES)
def test_every_option_in_toml(left, tmp_path):
    got = flat(parse(["--config", str(toml(without(left, EXPECTED), tmp_path))]))
    assert got == {**EXPECTED, left: flat(Config())[left]}


def test_two_alternatives_are_refused(tmp_path):
    """Together on the command line, or in the file; one on the command line wins over the other in the file."""
    both = "--snip-target and --snip-max-loss are alternatives, and both are given; drop one"
    assert error(["--snip-max-loss=0.1", "--snip_target", "0.75"]) == both
    path = toml({"snip_target": 0.5, "snip_max_loss": 0.1}, tmp_path)
    assert error(["--config", str(path)]) == f"--config {path}: {both}"
    snip = parse(["--config", str(toml({"snip_target": 0.5}, tmp_path)), "--snip-max-loss", "0.1"]).snip
    assert (snip.snip_max_loss, snip.snip_target) == (0.1, 0.75)
    snip = parse(["--config", str(toml({"snip_max_loss": 0.1}, tmp_path)), "--snip-target", "0.6"]).snip
    assert (snip.snip_max_loss, snip.snip_target) == (None, 0.6)


def test_what_a_run_had_gives_way_to_its_alternative(tmp_path):
    """Its saved options have both, as the target is never missing."""
    saved = {"snip_target": 0.75, "snip_max_loss": 0.1}
    assert parse([], saved).snip.snip_max_loss == 0.1
    assert parse(["--snip-target", "0.5"], saved).snip.snip_max_loss is None
    path = str(toml({"snip_max_loss": 0.2}, tmp_path))
    assert parse(["--config", path], {"snip_target": 0.5}).snip.snip_max_loss == 0.2


def test_toml_tables_and_dashes_mean_nothing(tmp_path):
    path = toml({}, tmp_path, "lr = 1\n[a]\nnum-layers = 3\n[model]\nseed = 9\n")
    got = parse([f"--config={path}"])
    assert (got.training.lr, got.model.num_layers, got.training.seed) == (1.0, 3, 9)


def test_the_command_line_wins(tmp_path):
    given = {"lr": 0.5, "bf16": True, "data_path": ["x"], "no_load_optim": True, "train_iters": 3, "seed": 2}
    path = str(toml(given, tmp_path))
    words = ["--lr", "0.25", "--no-bf16", "--data-path", "y", "z", "--no-no-load-optim", "--train_iters=4"]
    for argv in ([*words, "--config", path], ["--config", path, *words]):
        got = flat(parse(argv))
        assert (got["lr"], got["bf16"], got["data_path"], got["no_load_optim"], got["train_iters"], got["seed"]) == (
            0.25, False, ("y", "z"), False, 4, 2,
        )  # fmt: skip


def test_an_empty_list_and_a_negative_number_can_be_given(tmp_path):
    got = parse(["--config", str(toml({"data_path": [], "min_lr": -1.0}, tmp_path)), "--snip-weight", "-2"])
    assert got.data.data_path == () and got.training.min_lr == -1.0 and got.snip.snip_weight == -2.0


def test_of_an_option_given_twice_the_last_counts():
    got = parse(["--lr", "1", "--bf16", "--data-path", "a", "b", "--lr", "2", "--no-bf16", "--data-path", "c"])
    assert (got.training.lr, got.training.bf16, got.data.data_path) == (2.0, False, ("c",))


def test_defaults_stand_below_file_and_command_line(tmp_path):
    path = toml({"lr": 2.0, "seed": 7}, tmp_path)
    defaults = {"lr": 3.0, "num_layers": 5, "bf16": True, "data_path": ["a", "b"], "seed": 9}
    config = parse(["--config", str(path), "--seed=8", "--no-bf16"], defaults)
    assert (config.training.lr, config.training.seed, config.model.num_layers) == (2.0, 8, 5)
    assert config.data.data_path == ("a", "b") and config.training.bf16 is False


def test_twice_in_toml_is_refused(tmp_path):
    path = toml({}, tmp_path, "lr = 1\n[training]\nlr = 2\n")
    assert error(["--config", str(path)]) == f"--config {path}: option lr is given twice; keep one"
    path = toml({}, tmp_path, "lr = 1\nlr = 2\n")
    assert "not valid TOML" in error(["--config", str(path)])
    assert "--config is given twice" in error(["--config", str(path), f"--config={path}"])


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("tensor_model_paralel_size", "tensor_model_parallel_size"),
        ("sniptarget", "snip_target"),
        ("wandb_projekt", "wandb_project"),
    ],
)
def test_unknown_options_name_the_nearest(wrong, near, tmp_path):
    flag = wrong.replace("_", "-")
    said = f"unknown option --{flag}; did you mean --{near.replace('_', '-')}?"
    assert error([f"--{flag}", "2"]) == said and error([f"--{flag}=2"]) == said
    path = toml({wrong: 2}, tmp_path)
    assert error(["--config", str(path)]) == f"unknown option {wrong} in {path}; did you mean {near}?"
    with pytest.raises(ValueError, match=f"unknown option {wrong} in options; did you mean {near}?"):
        Config().replace(**{wrong: 2})


def test_config_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "none.toml"
    assert error(["--config", str(missing)]).startswith(f"--config {missing}: no such file; give the path")
    bad = toml({}, tmp_path, "lr = = 3")
    assert error(["--config", str(bad)]).startswith(f"--config {bad}: not valid TOML: ")
    bad.write_bytes(b"\xff\xfe\x00")
    assert error(["--config", str(bad)]).startswith(f"--config {bad}: not valid TOML: ")
    for words in (["--config"], ["--config="], ["--config", "--lr", "3"]):
        assert error(words).startswith("--config names no file")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-layers", "two"], ["--num-layers is 'two'; give a whole number"]),
        (["--num-layers", "2.5"], ["--num-layers", "'2.5'"]),
        (["--lr=fast"], ["--lr is 'fast'; give a number"]),
        (["--lr-decay-style", "steps"], ["'steps'", "--lr-decay-style", "'cosine'", "'WSD'"]),
        (["--bf16", "yes"], ["Unrecognized options: yes"]),
        (["stray", "--lr", "1"], ["Unrecognized options: stray"]),
        (["--no-lr"], ["Unrecognized options: --no-lr"]),
        (["--load", "--save", "x"], ["Missing value", "--load"]),
    ],
)
def test_words_that_cannot_be_read_get_one_line(words, said):
    line = error(words)
    assert all(part in line for part in said), line
    assert line.endswith("; --help lists all options and their values")
    assert not set("│╭─") & set(line) and "----" not in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("num_layers = 'two'", ["--num-layers", "'two'"]),
        ("num_layers = 1.5", ["--num-layers", "'1.5'"]),
        ("bf16 = 1", ["option bf16 is 1; give true or false"]),
        ("bf16 = 'true'", ["option bf16 is 'true'; give true or false"]),
        ("lr = true", ["option lr is True; give a value, not true or false"]),
        ("run_dir = ['a', 'b']", ["option run_dir is ['a', 'b']; give one value"]),
        ("[a.lr]\nb = 1", ["option lr is {'b': 1}; give one value"]),
    ],
)
def test_wrong_types_in_toml(options, said, tmp_path):
    line = error(["--config", str(toml({}, tmp_path, options))])
    assert all(part in line for part in said), line


def test_help_prints_every_option_and_leaves_with_0(capsys):
    with pytest.raises(SystemExit) as info:
        parse(["--help"])
    text = capsys.readouterr().out
    assert info.value.code == 0 and "--config FILE.toml" in text
    assert [name for name in option_groups() if f"-{name.replace('_', '-')}" not in text] == []


def test_megatrons_names_are_ours():
    assert [flag for flag in MEGATRON.split() if flag[2:].replace("-", "_") not in option_groups()] == []


def test_no_option_stands_in_two_groups(monkeypatch):
    groups = option_groups()
    fields = [f.name for group in vars(Config()).values() for f in dataclasses.fields(group)]
    assert len(fields) == len(set(fields)) == len(groups)
    twice = dataclasses.make_dataclass("Twice", [("lr", float, 0.0)], frozen=True)
    changed = dataclasses.make_dataclass("Config", [("a", twice, twice()), ("b", twice, twice())], frozen=True)
    monkeypatch.setattr(config_module, "Config", changed)
    with pytest.raises(AssertionError, match="option lr stands in two groups"):
        option_groups()


def test_replace_changes_a_copy():
    first = Config()
    second = first.replace(lr=1.0, num_layers=2, adam_eps=1e-6)
    assert (second.training.lr, second.model.num_layers, second.training.adam_eps) == (1.0, 2, 1e-6)
    assert first == Config() and second.snip is first.snip
    assert second.replace(lr=first.training.lr, num_layers=0, adam_eps=1e-8) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.training.lr = 2.0


def test_derived_values():
    config = Config().replace(
        num_attention_heads=8, hidden_size=256, vocab_size=257, run_dir="r", global_batch_size=24, micro_batch_size=2,
        tensor_model_parallel_size=2, pipeline_model_parallel_size=3,
    )  # fmt: skip
    m = config.model
    assert (m.query_groups, m.head_dim, m.padded_vocab_size) == (8, 32, 384)
    assert dataclasses.replace(m, num_query_groups=4, kv_channels=16).head_dim == 16
    assert dataclasses.replace(m, vocab_size=256).padded_vocab_size == 256
    with pytest.raises(ValueError, match="vocab_size is not known yet"):
        _ = Config().model.padded_vocab_size
    assert config.model_parallel_size == 6 and config.data_parallel_size(12) == 2 and config.num_microbatches(2) == 6
    assert config.save_dir == Path("r/checkpoints") and config.replace(save="s").save_dir == Path("s")
    assert config.to_dict()["data"]["data_path"] == [], "plain JSON values"


BAD_FILES = {
    "lists without end": ("a = " + "[" * 10**5, "not valid TOML: it is nested too deeply"),
    "a key without end": ("a" + ".a" * 10**5 + " = 1", "not valid TOML: a key has more than 64 parts"),
    "a quoted key without end": ('"a"' + ' . "a"' * 10**5 + " = 1", "not valid TOML: a key has more than 64 parts"),
    "a number without end": ("seed = " + "9" * 5000, "not valid TOML: Exceeds the limit"),
    "an item like an option": (
        'data_path = ["--mock-data"]',
        "--data-path has the item '--mock-data', which reads as an",
    ),
    "an item like a short option": (
        'data_path = ["1", "-h"]',
        "--data-path has the item '-h', which reads as an option",
    ),
    "a list in a list": ('data_path = [["a"]]', "option data_path has the item ['a']; give text or numbers"),
    "a switch in a list": ("data_path = [true]", "option data_path has the item True; give text or numbers"),
    "deep tables": ("x.lr.a.a = 1", "option lr is {'a': {'a': 1}}; give one value"),
    "an empty path": ('run_dir = ""', "--run-dir is empty; give it a value, or leave it out"),
    "an empty item": ('data_path = ["1", ""]', "--data-path is empty"),
    "a NUL": (r'save = "a\u0000b"', r"--save 'a\x00b' has a NUL character; leave that out"),
    "much of it": ("#" * (1 << 20) + "#", "this file of options has more than 1 MiB"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_strange_file_of_options_is_one_line(case, tmp_path):
    text, said = BAD_FILES[case]
    path = tmp_path / "options.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as info:
        parse(["--config", str(path)])
    assert said in str(info.value) and "\n" not in str(info.value) and len(str(info.value)) < 1000


@pytest.mark.parametrize(
    "option", ["run-dir", "save", "load", "pretrained-checkpoint", "data-cache-path", "tokenizer-model", "gemm-times"]
)
def test_an_empty_path_is_refused(option):
    with pytest.raises(ValueError, match=f"--{option} is empty; give it a value, or leave it out"):
        parse([f"--{option}", ""])


def test_many_dots_in_a_value_are_no_key(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text('data_path = ["data/v1.2.3.4", "a.b.c"]\n[model]\nnum_layers = 2\n')
    assert parse(["--config", str(path)]).data.data_path == ("data/v1.2.3.4", "a.b.c")


@pytest.mark.parametrize("option", ["--run-dir", "--save", "--tokenizer-model", "--wandb-exp-name"])
def test_a_name_that_is_not_utf_8_is_refused(option):
    """JSON files could not hold it, and no run could go on from them."""
    with pytest.raises(UserError, match=rf"{option} 'run.udcff' is not UTF-8; rename it"):
        parse([option, os.fsdecode(b"run\xff")])
