"""Memory plans change no bit of a run."""

from __future__ import annotations

import json
import random

import pytest

from megatron_snip.errors import UserError
from megatron_snip.model.recompute import CHOICES
from megatron_snip.train.dry_run.measure import processes
from megatron_snip.train.memory_plan.auto import Planner
from megatron_snip.train.memory_plan.plan_file import MemoryPlan
from megatron_snip.train.run.metrics import read_metrics
from tests.dist.helpers.dry_runs import options_of
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.memory_plans import losses_of_each, planned_slowly, real_peaks, refused, trained, write_plan
from tests.dist.helpers.runs import LAYOUTS

SMALL = {"hidden_size": 128, "ffn_hidden_size": 256, "global_batch_size": 2, "bf16": True, "precision": "fp4"}
CASES = {
    "tp2 x pp2": (4, {**LAYOUTS["tp2 x pp2 interleaved"], "num_layers_per_virtual_pipeline_stage": None}),
    "dp2": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "cp2": (2, {"context_parallel_size": 2, "seq_length": 512}),
    "pp2 interleaved": (2, LAYOUTS["pp2 interleaved"]),
}
#: What is planned for, of as many microbatches as a pipeline of two is filled by, and one more.
PIPELINE = {
    "bf16": True, "precision": "fp8", "seq_length": 256, "pipeline_model_parallel_size": 2, "global_batch_size": 3,
    "distributed_backend": "gloo",
}  # fmt: skip
PLANS = [
    ("full", "offload", "offload", "selective"),
    ("offload", "keep", "selective", "offload"),
]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_without_a_plan(case, tmp_path):
    world, options = CASES[case]
    options = {**SMALL, **options}
    more = [{}, {"on_host": ("layers.1", "layers.2", "norm"), **({"gathered": (1, 2)} if case == "dp2" else {})}]
    planned = [write_plan(tmp_path / f"{i}.json", plan, options, world, **more[i]) for i, plan in enumerate(PLANS)]
    done = [[] for _ in PLANS]
    for plain, *others in run_ranks(losses_of_each, world, [options, *planned]):
        assert set(plain[2]) == {"keep"}
        for i, other in enumerate(others):
            assert other[:2] == plain[:2]
            done[i] += other[2]
    for i, plan in enumerate(PLANS):
        assert set(done[i]) == set(plan)


@pytest.fixture(scope="module")
def planner():
    with processes(2) as pool:
        return Planner(options_of({**PIPELINE, "host_memory_gib": 1.0, "memory_plan": "auto"}), 2, pool)


def test_auto_trains_under_a_plan_that_fits(planner, tmp_path):
    """Rank 0 plans for both; the run folder and the checkpoint have the plan, and losses are those without it."""
    options, full = {**PIPELINE, "train_iters": 2}, CHOICES.index("full")
    all_keep, all_full = (max(one.of([choice] * 2)[0] for one in planner.peaks) for choice in (0, full))
    gib = (all_keep + all_full) / 2 / 2**30
    auto = {**options, "memory_plan": "auto", "memory_gib": gib}
    for name, each in (("plain", options), ("auto", auto)):
        run_ranks(trained, 2, {**each, "run_dir": str(tmp_path / name)}, seconds=200.0)
    plan = MemoryPlan.load(tmp_path / "auto/memory_plan.json")
    assert {"keep"} < set(plan.blocks) and plan.status == "optimal" and plan.memory_gib == pytest.approx(gib)
    assert all(rank.peak <= gib * 2**30 for rank in plan.ranks)
    (state,) = (json.loads(path.read_text()) for path in (tmp_path / "auto").rglob("iter_0000002/state.json"))
    assert MemoryPlan.from_dict(state["memory_plan"]) == plan
    losses = [[row["lm loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("plain", "auto")]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    with pytest.raises(UserError, match=r"--memory-plan auto: pipeline rank 0 needs at least .* GiB short"):
        planner.plan(all_full / 2**31)


def test_every_rank_is_told_that_no_plan_fits():
    assert run_ranks(refused, 2, {}) == ["no plan fits"] * 2


def test_ranks_wait_for_a_plan_for_longer_than_for_each_other():
    assert len(set(run_ranks(planned_slowly, 2, {}))) == 1


def test_predicted_peaks_are_those_of_a_run(planner, tmp_path):
    """Of six plans on a pipeline of two, in real tensors; and the bytes on the host."""
    draw = random.Random(3)
    plans = [tuple(draw.choice(CHOICES) for _ in range(4)) for _ in range(6)]
    variants = [write_plan(tmp_path / f"{i}.json", plan, PIPELINE, 2) for i, plan in enumerate(plans)]
    real = run_ranks(real_peaks, 2, variants, seconds=400.0)
    for runs, peaks, host, found in zip(planner.runs, planner.peaks, planner.host_peaks, real, strict=True):
        chosen = [[CHOICES.index(plan[b]) for b in runs.blocks] for plan in plans]
        assert [peaks.of(one)[0] for one in chosen] == pytest.approx([here for here, _ in found], rel=0.02)
        assert [host.of(one)[0] for one in chosen] == [there for _, there in found] and any(there for _, there in found)
    # copies back hide behind the backward of a later block, which the last of the first rank does not have
    assert planner.seconds[0][1, -1] > planner.seconds[0][0, -1]
    # the backward of the last of all begins before anything has left
    keep, offload = CHOICES.index("keep"), CHOICES.index("offload")
    last = planner.peaks[1]
    assert last.of([offload, offload])[0] == last.of([offload, keep])[0] < last.of([keep, keep])[0]
