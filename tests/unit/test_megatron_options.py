"""A Megatron-LM launch script's options, pasted: what is the same here is left out, the rest is told one by one."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest

import megatron_snip
from megatron_snip.arguments import parse
from megatron_snip.config import option_groups
from megatron_snip.errors import UserError
from megatron_snip.megatron_options import instead_of, tables, without_megatrons
from megatron_snip.train.validate import validate

#: Those of Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh, with its values.
LLAMA3_8B = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
--disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
--bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
--empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer
--vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 --split '99,1,0'
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
--ckpt-format torch_dist --distributed-timeout-minutes 60 --save saves --load saves --tensorboard-dir logs
"""
#: What its message asks to change, and what is then given.
LEFT_OUT = """apply-layernorm-1p decoupled-lr decoupled-min-lr
fp8-format fp8-amax-history-len fp8-amax-compute-algo"""
INSTEAD = "--precision fp8_hybrid"


def without(words: list[str], names: list[str]) -> list[str]:
    """Words without some options and their values."""
    out, leaving = [], False
    for word in words:
        if word.startswith("--"):
            leaving = word[2:] in names
        if not leaving:
            out.append(word)
    return out


def test_a_launch_script_is_told_option_by_option_what_to_change():
    with pytest.raises(UserError) as info:
        parse(LLAMA3_8B.split())
    said = str(info.value)
    assert "\n" not in said and said.startswith(
        "Megatron-LM options that are not supported here: --apply-layernorm-1p: norms"
    )
    assert all(f"--{name}" in said for name in LEFT_OUT.split())
    assert not any(f"--{name}" in said for name in ("swiglu", "num-workers", "context-parallel-size", "ckpt-format"))
    assert "--fp8-format hybrid: give --precision fp8_hybrid for hybrid (E5M2 gradients)" in said


def test_with_these_changes_it_runs(caplog):
    with caplog.at_level(logging.INFO, logger="megatron_snip"):
        config = parse([*without(LLAMA3_8B.split(), LEFT_OUT.split()), *INSTEAD.split()])
    m = config.model
    assert (m.num_layers, m.hidden_size, m.num_query_groups, m.rotary_base) == (32, 4096, 8, 1e6)
    assert (config.with_iterations().training.train_iters, config.precision.precision) == (15258789, "fp8_hybrid")
    assert config.data.num_workers == 1 and config.parallel.grad_reduce_in_bf16
    assert config.parallel.fp8_param_gather
    validate(config, 8)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Megatron-LM options that are ignored here: --use-mcore-models, --group-query-attention")
    assert "--position-embedding-type rope" in line and config.logging.tensorboard_dir == "logs"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2: there are no experts here"),
        ("--expert-model-parallel-size=2", "--expert-model-parallel-size 2: there are no experts here"),
        ("--hidden-dropout 0.1", "--hidden-dropout 0.1: there is no dropout here; give 0"),
        ("--normalization LayerNorm", "give RMSNorm"),
        ("--normalization", "--normalization: models here have RMSNorm"),
        ("--ckpt-format", "--ckpt-format: give it one value"),
        ("--fp16 --qk-layernorm", "--fp16: give --bf16; --qk-layernorm: give --model-name qwen3"),
        ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16: gradients, master weights and Adam's state are float32 here"),
        (
            "--exp-avg-dtype bf16 --fp16 --main-grads-dtype bf16",
            "--exp-avg-dtype bf16, --main-grads-dtype bf16: gradients",
        ),
        ("--no-save-optim", "--no-save-optim: checkpoints have the optimiser's state; --no-load-optim leaves it"),
        ("--save-retain-interval 10", "--save-retain-interval 10: give --keep-last 1 --keep-every in its place"),
        ("--iterations-to-skip 3 4", "--iterations-to-skip 3 4: no iteration is left out here"),
        ("--attention-dropout -1", "--attention-dropout -1: there is no dropout"),
    ],
)
def test_what_is_not_here_names_the_way_out(words, said):
    with pytest.raises(UserError) as info:
        without_megatrons(["--lr", "1", *words.split(), "--bf16"])
    assert said in str(info.value)


def test_grouped_attention_without_a_number_of_groups_is_refused(tmp_path):
    """Megatron-LM would take one group there, which a script that leaves it out rarely means."""
    with pytest.raises(
        UserError, match="--group-query-attention without --num-query-groups .*; give --num-query-groups"
    ):
        parse(["--num-attention-heads", "8", "--group-query-attention"])
    assert parse(["--group-query-attention", "--num-query-groups", "2"]).model.num_query_groups == 2
    (tmp_path / "run.toml").write_text("num-query-groups = 4\n")
    assert parse(["--group-query-attention", "--config", str(tmp_path / "run.toml")]).model.num_query_groups == 4
    assert parse(["--num-attention-heads", "8"]).model.num_query_groups is None


def test_what_changes_nothing_goes_and_all_else_stays():
    words = [
        "--lr",
        "-1",
        "--swiglu",
        "--rotary-percent",
        "1",
        "x",
        "--hidden-dropout=0",
        "--made-up",
        "3",
        "--bf16",
        "-h",
    ]
    with pytest.raises(UserError, match="--rotary-percent 1 x"):
        without_megatrons(words)
    words.remove("x")
    assert without_megatrons(words) == ["--lr", "-1", "--made-up", "3", "--bf16", "-h"]
    with pytest.raises(UserError, match="unknown option --made-up; --help lists all options"):
        parse(words)


SWITCHES, LISTS, VALUES, REFUSED, _ = map(set, tables())
#: Every option of Megatron-LM; those that take a value end in =, or in =* for several.
MEGATRONS = {
    name.rstrip("=*"): name[len(name.rstrip("=*")) :]
    for line in Path(__file__).with_name("megatron_lm_options.txt").read_text().splitlines()
    for name in line.split()
    if not line.startswith("#")
}


def test_the_tables_name_no_option_of_ours_and_none_twice():
    found = tomllib.loads(Path(megatron_snip.__file__).with_name("megatron_options.toml").read_text())
    several = [*found["refused"].values(), *(entry["names"] for entry in found["values"])]
    names = " ".join([found["switches"], found["lists"], found["any_value"], *several]).split()
    assert len(names) == len(set(names)) == len(SWITCHES | LISTS | VALUES | REFUSED)
    ours = option_groups().keys()
    assert not {name.replace("-", "_") for name in names} & ours
    assert not [name for name in ours if instead_of(name.replace("_", "-"))]


def test_every_option_of_megatron_is_ours_or_left_out_or_told_what_to_give():
    ours = {name.replace("_", "-") for name in option_groups()}
    known = {*ours, *SWITCHES, *LISTS, *VALUES}
    assert len(MEGATRONS) > 900
    assert not [name for name in MEGATRONS if name not in known and not instead_of(name)]


def test_the_tables_take_as_many_values_as_megatron_does():
    assert not {name for name in SWITCHES if MEGATRONS.get(name)}
    assert not {name for name in VALUES if MEGATRONS.get(name, "=") != "="}
    assert not {name for name in LISTS if MEGATRONS.get(name) != "=*"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-experts 8 --moe-router-topk 2", "--moe-router-topk 2: there are no experts here; leave it out"),
        ("--expert-tensor-parallel-size 4", "--expert-tensor-parallel-size 4: there are no experts here"),
        ("--squared-relu", "--squared-relu: MLPs are SwiGLU here; leave it out"),
        ("--fp8-quantizer-factory x", "give --precision fp8, mxfp8 or snip"),
        ("--step-batch-size-schedule 0:16 2.4B:320", "0:16 2.4B:320: give --rampup-batch-size"),
        ("--fake-process-group", "--fake-process-group: give --dry-run --world-size N"),
        ("--log-memory-interval 10", "--log-memory-interval 10: give --log-memory"),
        ("--muon-momentum 0.9", "--muon-momentum 0.9: the only optimizer is AdamW"),
        ("--outer-dp-sharding-strategy optim", "give no_shard"),
        ("--nproc_per_node 8", "--nproc_per_node 8: give it to torchrun, before the program"),
        ("--master-addr=h", "--master-addr h: give it to torchrun"),
        ("--use-tp-pp-dp-mapping", "processes are numbered along tp, cp, dp and then pp here"),
    ],
)
def test_options_of_experts_and_other_models_and_programs_name_the_way_out(words, said):
    with pytest.raises(UserError) as info:
        parse(["--lr", "1", *words.split(), "--bf16"])
    assert said in str(info.value)


def test_lists_and_values_that_change_nothing_go():
    words = (
        "--cuda-graph-impl local --cuda-graph-scope attn mlp --cp-comm-type p2p a2a --dist-ckpt-optim-fully-reshardable"
    )
    assert without_megatrons([*words.split(), "--bf16", "--expert-tensor-parallel-size", "1"]) == ["--bf16"]
    with pytest.raises(UserError, match="--cuda-graph-scope: give it a value"):
        without_megatrons(["--cuda-graph-scope"])
