"""What plans predict of states on the host and of gathered blocks is what dry runs of them count."""

from __future__ import annotations

from megatron_snip.config import Config
from megatron_snip.train.dry_run.measure import measure, processes
from megatron_snip.train.memory_plan.auto import Planner, measure_runs
from megatron_snip.train.memory_plan.plan_file import MemoryPlan

OPTIONS = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 512, "global_batch_size": 4, "train_iters": 1, "bf16": True, "compile": True,
    "data_parallel_sharding_strategy": "optim_grads_params", "memory_plan": "auto", "host_memory_gib": 1.0,
}  # fmt: skip
BLOCK = 2 * (4 * 128**2 + 3 * 128 * 256 + 2 * 128)  # bytes in BF16
SENT = "bytes", "dp", "all-gather"


def test_predictions_are_what_a_dry_run_counts():
    config = Config().replace(**OPTIONS)
    with processes(2) as pool:
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
    assert least.on_host and least.ranks[0].host > 0 and least.ranks[0].peak < away.total
