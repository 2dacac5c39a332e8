"""A memory plan's file, and every complaint about one."""

from __future__ import annotations

import json

import pytest

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.train.memory_plan.plan_file import MemoryPlan, RankCost, read_memory_plan
from megatron_snip.train.validate import validate

OPTIONS = {
    "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 512, "micro_batch_size": 2, "global_batch_size": 16, "train_iters": 20, "mock_data": True,
    "pipeline_model_parallel_size": 2,
}  # fmt: skip
CONFIG = Config().replace(**OPTIONS)
BLOCKS = ("full", "selective", "keep", "keep")


@pytest.fixture
def path(tmp_path):
    plan = MemoryPlan.by_hand(BLOCKS, CONFIG, 4)
    plan.save(tmp_path / "memory_plan.json")
    return tmp_path / "memory_plan.json"


def test_it_is_read_as_written(path):
    ranks = (RankCost(0, 3 << 30, 0.25), RankCost(1, 2 << 30, 0.5))
    plan = MemoryPlan(BLOCKS, MemoryPlan.load(path).made_for, 80.0, ranks, "nominal", "optimal", 0.0)
    plan.save(path)
    assert MemoryPlan.load(path) == plan and plan.told == "of 4 blocks, 1 full, 2 keep, 1 selective"
    assert read_memory_plan(CONFIG.replace(memory_plan=str(path)), 4) == plan
    assert read_memory_plan(CONFIG, 4) is read_memory_plan(CONFIG.replace(memory_plan="auto"), 4) is None
    assert len({MemoryPlan(blocks, plan.made_for).hash for blocks in (BLOCKS, BLOCKS[::-1])}) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "field version is 2, but this code reads version 1"),
        ({"blocks": ["full", "selective", "keep", "some"]}, "field blocks[3] is 'some'"),
        ({"blocks": ["full", "selective", "keep", "full"]}, "but its choices and made_for give"),
        ({"made_for": {"num_layers": 5}}, "but its choices and made_for give"),
        ({"blocks": []}, "field blocks is []"),
        ({"more": 1}, "field more is unknown"),
        ({"linears": {}}, "this is a plan of precisions, not a memory plan"),
    ],
)
def test_damaged_files(path, change, said):
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError) as info:
        MemoryPlan.load(path)
    assert str(info.value).startswith(f"{path}: ") and said in str(info.value) and "\n" not in str(info.value)
    assert "make a new one (--memory-plan auto)" in str(info.value)


@pytest.mark.parametrize(
    ("options", "world", "said"),
    [
        ({"hidden_size": 512}, 4, "is for --hidden-size 256, and the run has 512"),
        ({"micro_batch_size": 1}, 4, "is for --micro-batch-size 2, and the run has 1"),
        ({}, 8, "is for data parallel 2, and the run has 4"),
        ({"sequence_parallel": True}, 4, "is for --sequence-parallel False, and the run has True"),
        ({"compile": True}, 4, "block 1 is selective, which does not go with --compile"),
    ],
)
def test_a_plan_of_another_run(path, options, world, said):
    with pytest.raises(UserError) as info:
        read_memory_plan(CONFIG.replace(memory_plan=str(path), **options), world)
    assert said in str(info.value) and str(path) in str(info.value)


def test_what_lies_on_the_host_and_what_stays_gathered(tmp_path):
    config = CONFIG.replace(data_parallel_sharding_strategy="optim_grads_params")
    plan = MemoryPlan.by_hand(BLOCKS, config, 4, gathered=(0, 2), on_host=("layers.3", "norm"))
    plan.save(tmp_path / "plan.json")
    assert read_memory_plan(config.replace(memory_plan=str(tmp_path / "plan.json")), 4) == plan
    assert plan.told.endswith("1 selective, 2 not resharded after forward; states of 2 units on the host")
    assert len({plan.hash, MemoryPlan.by_hand(BLOCKS, config, 4, on_host=plan.on_host).hash}) == 2
    assert plan.to_dict().keys() - {"gathered", "on_host"} == MemoryPlan.by_hand(BLOCKS, config, 4).to_dict().keys()


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({"gathered": (4,)}, {}, "field gathered has 4, which the model lacks"),
        ({"gathered": (1,)}, {"data_parallel_sharding_strategy": "optim"}, "and the run has optim, which gathers"),
        ({"on_host": ("lm_head",)}, {}, "field on_host has 'lm_head', which the model lacks"),
        # both copies of a tied embedding must get the same bits
        ({"on_host": ("embed_tokens",)}, {}, "field on_host has 'embed_tokens', which the model lacks"),
        ({"on_host": ("norm",)}, {"optimizer_cpu_offload": True}, "does not go with --optimizer-cpu-offload; drop one"),
        ({"on_host": ("norm",)}, {"optimizer_impl": "apex"}, "does not go with --optimizer-impl apex; drop one"),
    ],
)
def test_units_that_do_not_fit_the_run(tmp_path, more, options, said):
    config = CONFIG.replace(data_parallel_sharding_strategy="optim_grads_params").replace(**options)
    MemoryPlan.by_hand(BLOCKS, config, 4, **more).save(tmp_path / "plan.json")
    with pytest.raises(UserError) as info:
        read_memory_plan(config.replace(memory_plan=str(tmp_path / "plan.json")), 4)
    assert said in str(info.value) and str(tmp_path) in str(info.value)


def test_a_plan_without_a_choice_for_each_block(path):
    MemoryPlan.by_hand(BLOCKS[:3], CONFIG, 4).save(path)
    with pytest.raises(UserError, match="field blocks has 3 choices for 4 blocks"):
        read_memory_plan(CONFIG.replace(memory_plan=str(path)), 4)


def test_a_file_that_is_not_there():
    with pytest.raises(UserError, match="there.json"):
        read_memory_plan(CONFIG.replace(memory_plan="there.json"), 4)


def test_one_of_two_decides_what_is_recomputed():
    with pytest.raises(UserError, match="--memory-plan auto decides what each block recomputes, .* is full; drop one"):
        validate(CONFIG.replace(memory_plan="auto", recompute_granularity="full"), 4)
