"""What plans predict of states on the host and of gathered blocks is what dry runs of them count."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.config import Config
from megatron_snip.runtime import Runtime
from megatron_snip.train.dry_run.measure import measure, processes
from megatron_snip.train.health.memory import held
from megatron_snip.train.memory_plan import auto
from megatron_snip.train.memory_plan.auto import Planner, measure_runs
from megatron_snip.train.memory_plan.plan_file import MemoryPlan

OPTIONS = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 512, "global_batch_size": 4, "train_iters": 1, "bf16": True, "compile": True,
    "data_parallel_sharding_strategy": "optim_grads_params", "memory_plan": "auto", "host_memory_gib": 1.0,
}  # fmt: skip
BLOCK = 2 * (4 * 128**2 + 3 * 128 * 256 + 2 * 128)  # bytes in BF16
SENT = "bytes", "dp", "all-gather"


@pytest.fixture(scope="module")
def pool():
    with processes(2) as pool:
        yield pool


def test_predictions_are_what_a_dry_run_counts(pool, monkeypatch):
    config = Config().replace(**OPTIONS)
    planner = Planner(config, 2, pool)
    (runs,), (peaks,), (host,) = planner.runs, planner.peaks, planner.host_peaks
    assert runs.choices == ("keep", "full", "offload") and runs.gathered == (0, 1)
    assert runs.states == ("embed_tokens", "layers.0", "layers.1", "norm")
    cases = {
        (0, 0, 0, 0, 0, 0, 0, 0): MemoryPlan.by_hand(("keep",) * 2, config, 2),
        (0, 0, 0, 0, 1, 0, 1, 1): MemoryPlan.by_hand(
            ("keep",) * 2, config, 2, on_host=("embed_tokens", "layers.1", "norm")
        ),
        (0, 0, 1, 0, 0, 0, 0, 0): MemoryPlan.by_hand(("keep",) * 2, config, 2, gathered=(0,)),
        (2, 0, 0, 0, 0, 0, 0, 0): MemoryPlan.by_hand(("offload", "keep"), config, 2),
        (2, 0, 0, 0, 1, 0, 1, 1): MemoryPlan.by_hand(
            ("offload", "keep"), config, 2, on_host=("embed_tokens", "layers.1", "norm")
        ),
    }
    ((of_apex,),) = measure_runs(config.replace(optimizer_impl="apex"), 2, pool)
    jobs = [pool.submit(measure, config, 2, 0, plan) for plan in cases.values()]
    plain, away, stays, sent, both = (job.result().worst for job in jobs)
    least = planner.plan((away.total - 1) / 2**30)
    monkeypatch.setattr(auto.dist, "broadcast_object_list", lambda told, src: None)
    monkeypatch.setattr(auto, "_get_default_store", torch.distributed.HashStore)
    here = Runtime(0, 2, 0, torch.device("cpu"))
    assert auto.host_bytes(config, here, cases[2, 0, 0, 0, 1, 0, 1, 1]) == [both.host], "of a plan by hand"
    assert of_apex.choices == runs.choices and not of_apex.states
    predicted = [(peaks.of(choice)[0], host.of(choice)[0]) for choice in cases]
    assert predicted[:2] == [(plain.total, 0), (away.total, away.host)] and away.host > 0
    assert plain.total - away.total > 2 * BLOCK
    assert predicted[3:] == [(sent.total, sent.host), (both.total, both.host)]
    assert both.host == away.host + sent.host and sent.host > 0
    assert sent.total - both.total == plain.total - away.total
    # a microbatch gathers block 0 once more if it is resharded; a rank hands in its half
    assert plain.counts[SENT] - stays.counts[SENT] == 2 * BLOCK // 2
    assert 0 <= predicted[2][0] - stays.total <= BLOCK
    ((_, there),) = held(config, 2, plan=cases[0, 0, 0, 0, 1, 0, 1, 1], page_locked=True)
    assert there == pytest.approx(away.host, rel=0.01)
    assert least.on_host and least.ranks[0].host > 0 and least.ranks[0].peak < away.total


def test_a_block_that_stays_gathered_as_codes_is_charged_for_these(pool):
    """In FP8 a byte a weight, and float32 scales of 128 x 128."""
    config = Config().replace(**{**OPTIONS, "hidden_size": 256, "ffn_hidden_size": 512, "precision": "fp8",
                                 "fp8_param_gather": True, "host_memory_gib": None})  # fmt: skip
    planner = Planner(config, 2, pool)
    plans = [MemoryPlan.by_hand(("keep",) * 2, config, 2, gathered=gathered) for gathered in ((), (0,))]
    plain, stays = (job.result().worst for job in [pool.submit(measure, config, 2, 0, plan) for plan in plans])
    (runs,), (peaks,) = planner.runs, planner.peaks
    weights, norms = 4 * 256**2 + 3 * 256 * 512, 2 * 2 * 256
    codes = weights + 4 * weights // 128**2 + norms
    assert runs.units.sent == {0: codes // 2, 1: codes // 2}
    assert codes <= runs.units.gathered[0] <= codes + 7 * 512, "rounded up"
    assert plain.counts[SENT] - stays.counts[SENT] == 2 * runs.units.sent[0]
    # in other phases block 0 is one buffer in flight, which is rounded up once
    assert -7 * 512 <= peaks.of((0, 0, 1, 0))[0] - stays.total <= runs.units.gathered[0]
    assert peaks.of((0, 0, 0, 0))[0] == plain.total
