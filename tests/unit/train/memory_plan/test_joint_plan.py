"""Joint plans by dry runs of a small model: what is predicted of a mixture is what a run of it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from megatron_snip.config import Config
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.options import check_choices, read_times, solve_request
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.planner import Planner
from megatron_snip.train.dry_run.measure import processes
from megatron_snip.train.memory_plan import joint
from megatron_snip.train.memory_plan.auto import choices_of
from megatron_snip.train.memory_plan.joint_plan import JointPlanner
from megatron_snip.train.memory_plan.plan_file import MemoryPlan
from megatron_snip.train.memory_plan.program import GIB
from megatron_snip.train.memory_plan.rates import rates_of
from megatron_snip.train.setup import snip_shapes
from tests.unit.snip.made_up import statistics

OPTIONS = {
    "num_layers": 2, "hidden_size": 512, "ffn_hidden_size": 1024, "num_attention_heads": 4, "seq_length": 4096,
    "vocab_size": 512, "micro_batch_size": 4, "global_batch_size": 4, "train_iters": 20, "mock_data": True,
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "data_parallel_sharding_strategy": "no_shard",
    "snip_options": "mxfp8,nvfp4", "snip_granularity": "linear", "snip_start": 1,
}  # fmt: skip
WORLD = 2


@dataclass(frozen=True)
class Drawn(Planner):
    """A planner whose quality loss is drawn."""

    def request(self, objective: str, seed: int = 0) -> Any:
        loss = np.random.default_rng(seed).lognormal(0, 1, (len(self.shapes), 2)) * [0.0, 1.0]
        return solve_request(self.config.snip, self.shapes, self.choices, loss, times=self.times)


@pytest.fixture(scope="module")
def planned():
    # what joint plans make no use of
    flags = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = Config().replace(**OPTIONS, memory_plan="auto", host_memory_gib=1.0, **flags)
    shapes = snip_shapes(config)
    stats = statistics(shapes, {}, np.ones(len(shapes)), {})
    planner = Drawn(config, stats, shapes, check_choices(config.snip, shapes), read_times(config.snip))
    with processes(2) as pool:
        yield JointPlanner(planner, WORLD, pool)


def test_a_mixture_takes_what_is_predicted(planned):
    shapes, options = planned.planner.shapes, planned.planner.choices.options
    chosen = np.random.default_rng(3).integers(0, 2, len(shapes))
    assert choices_of(planned.config) == ("keep", "selective", "full")
    assert planned.problem.ranks[0].inputs, "linears with a common input have two formats"
    precision = Plan.by_hand({s.name: options[o] for s, o in zip(shapes, chosen, strict=True)}, shapes)
    told, real = {}, {}
    for index, choice in enumerate(("keep", "selective", "full")):
        if choice != "selective":
            told[choice] = joint.given(planned.problem, chosen, [[index] * 2])
            memory = MemoryPlan.by_hand((choice,) * 2, planned.config, WORLD)
            real[choice] = planned.measured(precision, memory)[0].worst
            # where linears of one input differ, tp gathers rows, which are temporary tensors of neither uniform run
            assert told[choice].peaks[0] == pytest.approx(real[choice].total, rel=0.06)
    saved = told["keep"].peaks[0] - told["full"].peaks[0]
    assert saved == pytest.approx(real["keep"].total - real["full"].total, rel=1e-3)
    rates = rates_of(planned.config)
    more = rates.seconds(real["full"].counts) - rates.seconds(real["keep"].counts)
    assert told["full"].seconds[0] - told["keep"].seconds[0] == pytest.approx(more, rel=0.05)


def test_codes_of_four_bits_take_less(planned):
    keep, count = [[0] * 2], len(planned.planner.shapes)
    eight, four = (joint.given(planned.problem, np.full(count, o), keep).peaks[0] for o in (0, 1))
    rank = planned.problem.ranks[0]
    assert eight > four
    for one in rank.inputs:
        assert one.kept[0, 0] > one.kept[1, 0] > 0 and one.kept[0, 2] == 0
        assert one.mixed is not None and one.mixed[0] > one.kept[0, 0], "two formats keep this rank's rows"


def test_the_plan_fits_and_is_no_worse_than_one_after_the_other(planned):
    count = len(planned.planner.shapes)
    most, least = (joint.given(planned.problem, np.zeros(count, int), [[c] * 2]).peaks[0] for c in (0, 2))
    gib = (0.4 * most + 0.6 * least) / GIB
    made = planned.plan(gib)
    assert max(one.worst.total for one in made.measured) <= gib * GIB
    assert made.apart is not None and max(made.found.seconds) <= max(made.apart.seconds) * (1 + 1e-4)
    assert made.found.quality <= made.apart.quality * (1 + 1e-9) and set(made.memory.blocks) != {"full"}
    assert set(made.precision.linears.values()) <= {LinearPrecision.parse(name) for name in ("mxfp8", "nvfp4")}
    assert made.memory.memory_gib == gib and "less than" in made.told
    assert made.memory.gap == made.found.gap and made.precision.solver.gap == made.found.loss_gap
    made.memory.check(replace(planned.config), WORLD, "the plan")
