"""How well a probe's tokens determine what it predicts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.divergence import loss_divergence
from megatron_snip.snip.predict.sampling import (
    MOST_TOKENS,
    batches_of,
    cost_error,
    standard_error,
    suffices,
    top_token,
)

NAMES = [f"layers.{i}.mlp.{kind}_proj" for i in range(2) for kind in ("gate", "down")]
SHAPES = [LinearShape(name, 128, 128, block=i // 2, kind=("gate", "down")[i % 2]) for i, name in enumerate(NAMES)]
OPTIONS = [LinearPrecision.uniform(name) for name in ("fp8", "fp4")]
TOKENS = 4096


def of_tokens(squares, tokens: int = TOKENS) -> Statistics:
    """Statistics of token sums' squares [L, T] in FP4; FP8 costs a hundredth."""
    squares = np.asarray(squares)
    columns = {}
    for fmt, scale in (("fp4", 1.0), ("fp8", 0.01)):
        mine = scale * squares
        columns |= {f"token/{fmt}": mine.sum(1), f"spread/{fmt}": (mine**2).sum(1), f"top_token/{fmt}": mine.max(1)}
    values = np.stack(list(columns.values()), axis=1)
    return Statistics(7, 2.0, tokens, tuple(SHAPES), tuple(columns), values)


def drawn(seed: int, tokens: int = TOKENS, heavy: float = 0.0):
    """Squares [4, T] of normal token sums, as of a loss that is a mean over T; heavy: a log-normal factor's sigma."""
    random = np.random.default_rng(seed)
    sums = random.normal(size=(4, tokens)) * np.array([[4.0], [3.0], [2.0], [1.0]])
    return (sums * np.exp(heavy * random.normal(size=(4, tokens))) / tokens) ** 2


@pytest.mark.parametrize("heavy", [0.0, 0.8])
def test_the_standard_error_is_what_draws_differ_by(heavy):
    """Over a hundred probes of other tokens."""
    probes = [of_tokens(drawn(seed, heavy=heavy)) for seed in range(100)]
    costs = np.array([loss_divergence(one, OPTIONS) for one in probes])
    predicted = np.sqrt(np.mean([standard_error(one, OPTIONS) ** 2 for one in probes], axis=0))
    ratio = predicted / costs.std(axis=0)
    assert (ratio > 0.8).all() and (ratio < 1.6).all(), "a little too large where tails are light"


def test_the_mean_of_batches_is_as_well_known_as_all_their_tokens():
    """Of unequal sizes too; G has 1 / T of its batch."""
    sizes = (4096, 1024)
    parts = [drawn(seed, size) for seed, size in enumerate(sizes)]
    mean = Statistics.mean([of_tokens(part, size) for part, size in zip(parts, sizes)])
    share = np.concatenate([part[:, :] * size / 2 / len(sizes) for part, size in zip(parts, sizes)], axis=1)
    assert loss_divergence(mean, OPTIONS)[:, 1] == pytest.approx(share.sum(1), rel=1e-12)
    assert standard_error(mean, OPTIONS)[:, 1] == pytest.approx(np.sqrt((share**2).sum(1)), rel=1e-12)
    assert top_token(mean, OPTIONS)[:, 1] == pytest.approx(share.max(1) / share.sum(1), rel=1e-12)


def test_a_token_s_share():
    squares = np.ones((4, 100))
    squares[2, 5] = 297.0
    squares[3] = 0.0
    found = top_token(of_tokens(squares), [*OPTIONS, LinearPrecision.uniform("bf16")])
    assert found[:, 1] == pytest.approx([0.01, 0.01, 0.75, 0.0])
    assert found[:, 0] == pytest.approx(found[:, 1]) and found[:, 2].tolist() == [0.0] * 4


def test_what_is_not_finite_is_not_known():
    squares = np.ones((4, 100))
    squares[1, 3] = math.nan
    found = top_token(of_tokens(squares), OPTIONS)
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2, 3]]).all()


def request(stats: Statistics, target: float) -> SolveRequest:
    saved = np.tile([0.0, 0.25], (4, 1))
    return SolveRequest(loss_divergence(stats, OPTIONS), saved, target)


def test_only_the_plan_s_linears_count():
    """The costliest has all of its sum in one token, but the plan for a half leaves it in FP8."""
    squares = drawn(0)
    squares[0] = 0.0
    squares[0, 7] = 1.0
    stats = of_tokens(squares)
    half, whole = (cost_error(stats, OPTIONS, request(stats, target)) for target in (0.5, 1.0))
    assert whole == pytest.approx(1.0, rel=0.01)
    cost, error = loss_divergence(stats, OPTIONS), standard_error(stats, OPTIONS)
    chosen = [0, 0, 1, 1]
    rows = range(4)
    assert half == pytest.approx(error[rows, chosen].sum() / cost[rows, chosen].sum())


def test_enough_is_a_tenth():
    """Reached by more tokens, however heavy the tails."""
    for heavy, tokens, enough in ((0.0, 8192, True), (1.5, 1024, False), (1.0, 65536, True)):
        stats = of_tokens(drawn(3, tokens, heavy), tokens)
        assert suffices(stats, OPTIONS, request(stats, 0.75)) == enough, (heavy, tokens)


def test_without_a_plan_or_a_cost_nothing_is_missing():
    stats = of_tokens(drawn(0))
    assert cost_error(stats, OPTIONS, request(stats, 2.0)) is None, "no plan reaches it"
    nothing = of_tokens(np.zeros((4, 100)))
    assert cost_error(nothing, OPTIONS, request(nothing, 0.5)) is None and suffices(
        nothing, OPTIONS, request(nothing, 0.5)
    )


@pytest.mark.parametrize("time", [None, np.tile([2.0, 1.0], (4, 1))])
def test_stages_and_time_do_not_matter(time):
    """The plan is one for the whole, and the same on every process; that of stages is another."""
    stats = of_tokens(drawn(0))
    plain = request(stats, 0.5)
    staged = dataclasses.replace(plain, stage=np.array([0, 0, 1, 1]), time=time)
    assert staged.solve().choice.tolist() != plain.solve().choice.tolist()
    assert cost_error(stats, OPTIONS, staged) == cost_error(stats, OPTIONS, plain)


@pytest.mark.parametrize(("tokens", "a_batch", "batches"), [(8192, 1000, 9), (1, 8, 1), ("auto", MOST_TOKENS // 4, 4)])
def test_batches_that_a_probe_may_take(tokens, a_batch, batches):
    assert batches_of(SnipConfig(snip_probe_tokens=tokens), a_batch) == batches
