"""What the solver is asked, and the planner's regret: by how much plans of other tokens are worse."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_snip.config import Config
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.options import read_choices
from megatron_snip.snip.planner import Planner, ask
from tests.unit.snip.made_up import statistics
from tests.unit.train.recorded import MODEL, SHAPES

LINEARS = SHAPES[:7]


def batches(noise: float, count: int) -> list[Statistics]:
    """Linears of one size that cost 1 to 7 nats in FP4 and nothing in FP8, times the noise of a batch."""
    draw = np.random.default_rng(1)
    ones = [1.0] * len(LINEARS)
    found = []
    for _ in range(count):
        costs = 2 * np.arange(1, 8) * np.exp(noise * draw.standard_normal(7))  # dL = tokens / 2 * column
        token = {"fp8": [0.0] * 7, "fp4": costs.tolist()}
        found.append(statistics(LINEARS, token, ones, dict.fromkeys(token, ones), tokens=1))
    return found


def regret(each: list[Statistics], target=0.5) -> float | None:
    config = Config().replace(
        **{**MODEL, "num_layers": 1}, snip_target=target, snip_options="fp8,fp4", snip_granularity="linear"
    )
    planner = Planner.of(config, Statistics.mean(each), LINEARS)
    return planner.regret(planner.solve("snip"), each)


def test_plans_of_like_batches_are_no_worse():
    assert regret(batches(0.0, 4)) == 0.0


def test_it_grows_with_the_noise_of_a_batch():
    little, much = regret(batches(0.3, 8)), regret(batches(1.5, 8))
    assert 0.0 <= little < much


def test_it_shrinks_with_their_number():
    assert regret(batches(1.0, 64)) < regret(batches(1.0, 4))


def test_it_is_the_same_again_and_nothing_where_all_plans_are_one():
    each = batches(1.0, 4)
    assert regret(each) == regret(each) > 0
    assert regret(each, target=1.0) == pytest.approx(0.0, abs=1e-12)


def test_one_batch_tells_nothing():
    assert regret(batches(1.0, 1)) is None


def test_a_linear_is_not_held_at_a_format_of_others():
    """Its statistics are not finite; FP8 is only for the one that is fixed to it."""
    snip = Config().replace(snip_options="mxfp8,mxfp4", snip_fix=f"{LINEARS[0].name}=fp8", snip_target=0.2).snip
    ones, choices = [1.0] * 7, read_choices(snip, LINEARS)
    token = {"fp8": ones, "mxfp8": ones, "mxfp4": [1.0, np.nan, *ones[2:]]}
    stats = statistics(LINEARS, token, ones, dict.fromkeys(token, ones))
    choice = ask(snip, LINEARS, choices, stats)[0].solve().choice
    assert [str(choices.options[option]) for option in choice[:2]] == ["fp8", "mxfp8"]
