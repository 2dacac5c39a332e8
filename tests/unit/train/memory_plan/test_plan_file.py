"""A memory plan's file, and every complaint about one."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
import torch

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.model.llama import LLAMA
from megatron_snip.model.recompute import CHOICES
from megatron_snip.runtime import Runtime
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.dry_run.counts import Measured, Stretch
from megatron_snip.train.health import memory
from megatron_snip.train.memory_plan import auto
from megatron_snip.train.memory_plan.auto import choices_of
from megatron_snip.train.memory_plan.plan_file import MemoryPlan, RankCost, precision_of, read_memory_plan
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
    ranks = (RankCost(0, 3 << 30, 0.25), RankCost(1, 2 << 30, 0.5, 1 << 30))
    blocks = ("full", "selective", "keep", "offload")
    plan = MemoryPlan(blocks, MemoryPlan.load(path).made_for, 80.0, ranks, "nominal", "optimal", 0.0)
    plan.save(path)
    assert MemoryPlan.load(path) == plan and plan.told == "of 4 blocks, 1 full, 1 keep, 1 offload, 1 selective"
    assert read_memory_plan(CONFIG.replace(memory_plan=str(path)), 4) == plan
    assert read_memory_plan(CONFIG, 4) is read_memory_plan(CONFIG.replace(memory_plan="auto"), 4) is None
    assert len({MemoryPlan(blocks, plan.made_for).hash for blocks in (BLOCKS, BLOCKS[::-1])}) == 2


def test_a_plan_by_hand_is_told(path):
    """It was made for no budget."""
    plan = MemoryPlan.load(path)
    told = [f"memory plan {plan.hash}: of 4 blocks, 1 full, 2 keep, 1 selective"]
    assert auto.as_lines(plan) == [*told, "  blocks 0: full, 1: selective, 2-3: keep"]


def test_a_file_from_before_offload_is_read(path):
    """Its ranks have no bytes on the host, and its hash is of the same content."""
    values = json.loads(path.read_text())
    assert values["hash"] == "ea86932ded2a9d79" and values["version"] == 1
    path.write_text(json.dumps({**values, "ranks": [{"stage": 0, "peak": 5, "seconds": 0.5}]}))
    assert MemoryPlan.load(path).ranks == (RankCost(0, 5, 0.5, 0),)


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


def test_the_hosts_memory_is_for_auto(path):
    for plan in ("none", str(path)):
        with pytest.raises(UserError, match="^--host-memory-gib 64 needs --memory-plan auto; add it, or drop"):
            validate(CONFIG.replace(memory_plan=plan, host_memory_gib=64), 4)
    with pytest.raises(UserError, match="^--host-bandwidth 55 needs --host-memory-gib; add it, or drop"):
        validate(CONFIG.replace(memory_plan="auto", host_bandwidth=55), 4)
    with pytest.raises(UserError, match="--host-memory-gib"):
        validate(CONFIG.replace(memory_plan="auto", host_memory_gib=0), 4)


def test_only_a_run_that_names_the_hosts_memory_may_use_it():
    """With --compile, too: it keeps fewer tensors, through the same hooks."""
    run = CONFIG.replace(memory_plan="auto")
    assert choices_of(run) == ("keep", "selective", "full")
    assert choices_of(run.replace(host_memory_gib=4)) == CHOICES
    assert choices_of(run.replace(host_memory_gib=4, compile=True)) == ("keep", "full", "offload")


@pytest.fixture
def on_four(monkeypatch):
    """This machine has all four ranks of a run: call it with the GiB that it has free."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(auto.dist, "broadcast_object_list", lambda told, src: None)
    monkeypatch.setattr(auto, "_get_default_store", torch.distributed.HashStore)
    monkeypatch.setattr(auto.dist, "all_gather_object", lambda errors, mine: None)
    return lambda gib: monkeypatch.setattr(memory, "free_memory", lambda device: int(gib * 2**30))


HERE = Runtime(0, 4, 0, torch.device("cpu"))


def refused(**options: object) -> str:
    with pytest.raises(UserError) as info:
        auto.plan_of_run(CONFIG.replace(**options), HERE)
    return str(info.value)


def test_memory_that_the_machine_lacks(path, monkeypatch, on_four):
    """Of all ranks on the machine together, and before anything is measured."""
    made = dataclasses.replace(MemoryPlan.load(path), memory_gib=9.0)
    monkeypatch.setattr(auto, "make_plan", lambda *of: (made, []))
    options = {"memory_plan": "auto", "host_memory_gib": 11.0, "memory_gib": 9.0}
    on_four(40.5)
    assert refused(**options) == (
        "--host-memory-gib takes 44 GiB of the host for 4 ranks on this machine, and 40.5 GiB are free; give "
        "--memory-plan auto --host-memory-gib with at most 10.12, or use more machines"
    )
    on_four(44)
    assert auto.plan_of_run(CONFIG.replace(**options), HERE).blocks == BLOCKS


def test_memory_that_a_plan_s_file_wants_of_the_machine(path, monkeypatch, on_four):
    """As predicted; without a prediction for this precision, as a dry run counts.  The run's own states come on top."""
    blocks, ranks = ("full", "selective", "keep", "offload"), (RankCost(0, 1, 0.5), RankCost(1, 1, 0.5, 11 << 30))
    plan = dataclasses.replace(MemoryPlan.by_hand(blocks, CONFIG, 4), ranks=ranks, precision="bf16")
    plan.save(path)
    on_four(20)
    assert refused(memory_plan=str(path)) == (
        f"--memory-plan {path} takes 22 GiB of the host for 4 ranks on this machine, and 20.0 GiB are free; give "
        "--memory-plan auto --host-memory-gib with at most 5.0, or use more machines"
    )
    on_four(22)
    assert auto.plan_of_run(CONFIG.replace(memory_plan=str(path)), HERE) == plan
    (first, there), (_, second) = memory.held(CONFIG.replace(optimizer_cpu_offload=True), 4)
    assert first and there and second
    states = CONFIG.replace(memory_plan=str(path), optimizer_cpu_offload=True)
    assert auto.host_bytes(states, HERE, plan) == [there, (11 << 30) + second]
    measured, asked = [Measured(2 * s, s, 1, (stretch(5 << 30), stretch((6 << 30) + s)), 1) for s in (0, 1)], []
    monkeypatch.setattr(auto, "measure_all", lambda *of: (asked.append(of[1:]), measured)[1])
    for other in (dataclasses.replace(plan, ranks=(), precision=""), dataclasses.replace(plan, precision="fp4")):
        assert auto.host_bytes(states, HERE, other) == [6 << 30, (6 << 30) + 1]
        assert asked.pop() == (4, [0, 2], other)
    by_hand = MemoryPlan.by_hand(BLOCKS, CONFIG, 4, on_host=["layers.0", "norm"])
    (_, of_layer), (_, of_norm) = memory.held(CONFIG, 4, plan=by_hand)
    assert auto.host_bytes(CONFIG, HERE, by_hand) == [of_layer, of_norm] and 16 * 256 // 2 == of_norm < of_layer
    assert not asked
    by_hand.save(path)
    on_four(of_layer / 2**30)
    assert refused(memory_plan=str(path)).startswith(f"--memory-plan {path} takes 0.0")


def stretch(host: int) -> Stretch:
    return Stretch("iteration", {}, Counter(), 0, host)


def test_a_plan_for_another_precision_is_told(path, tmp_path, caplog, on_four):
    """A plan by hand promises nothing, so it is for every precision."""
    on_four(1)
    plan = dataclasses.replace(MemoryPlan.load(path), ranks=(RankCost(0, 1, 0.5), RankCost(1, 1, 0.5)))
    for precision, told in (("", 0), ("fp4", 1), ("bf16", 0)):
        caplog.clear()
        dataclasses.replace(plan, precision=precision).save(path)
        given = auto.plan_of_run(CONFIG.replace(memory_plan=str(path), precision="bf16"), HERE)
        assert given is not None and given.precision == precision and len(caplog.messages) == told
        assert all(
            line.startswith(f"--memory-plan {path} was made for the precision fp4, this run's is bf16, and it may")
            for line in caplog.messages
        )
    assert precision_of(CONFIG.replace(precision="fp8")) == "fp8"
    made = Plan.uniform(LLAMA.linear_names(4), "fp4")
    made.save(tmp_path / "plan.json")
    assert precision_of(CONFIG.replace(precision="plan", precision_plan=str(tmp_path / "plan.json"))) == (
        f"plan {made.hash}"
    )
    snip = CONFIG.replace(precision="snip", snip_options="fp8,fp4", snip_warmup_precision="fp8")
    assert precision_of(snip) == "snip, fp8 and then fp8,fp4"
    final = snip.replace(snip_final_precision="bf16/plan/plan", snip_final_iters=2)
    assert precision_of(final) == "snip, fp8 and then fp8,fp4, at last bf16/plan/plan"


def test_one_of_two_decides_what_is_recomputed():
    with pytest.raises(UserError, match="--memory-plan auto decides what each block recomputes, .* is full; drop one"):
        validate(CONFIG.replace(memory_plan="auto", recompute_granularity="full"), 4)
