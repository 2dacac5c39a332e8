"""Ten iterations in float32 give one process's losses on every layout: a pairwise covering array of them."""

from __future__ import annotations

import functools
from itertools import product

import numpy as np
import pytest

from tests.dist.covering import FACTORS, covering, name_of, options_of, pairs, valid_cases, world_of
from tests.dist.harness import run_ranks
from tests.dist.runs import losses

SMALL = {"hidden_size": 128, "ffn_hidden_size": 256}
CASES = {name_of(case): case for case in covering()}
ten_losses = functools.partial(losses, iterations=10)


def test_every_two_values_meet():
    """Each value is in a case with each value of another factor, but where no valid case has both."""
    met = set().union(*map(pairs, CASES.values()))
    assert met == set().union(*map(pairs, valid_cases()))
    apart = {("tp", 1): {("sequence_parallel", True)}, ("pp", 1): {("interleaved", True), ("uneven", True)},
             ("dp", 1): {("strategy", value) for value in FACTORS["strategy"][1:]}}  # fmt: skip
    names = list(FACTORS)
    for (i, one), other in product(enumerate(names), names):
        for a, b in product(FACTORS[one], FACTORS[other]) if other in names[i + 1 :] else ():
            assert (((one, a), (other, b)) in met) != ((other, b) in apart.get((one, a), ()))


@functools.cache
def alone(tied: bool):
    """Losses and gradients of one process."""
    options = {"num_layers": 8, "untie_embeddings_and_output_weights": not tied}
    return run_ranks(ten_losses, 1, {**SMALL, **options})[0]


#: In CI, the one that has the most at once and no more than four processes.
FIRST = [name for name, case in CASES.items() if case["tied"] and case["interleaved"] and world_of(case) <= 4][:1]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.slow) for n in CASES])
def test_losses_and_gradients_are_those_of_one_process(name):
    case = CASES[name]
    expected, seen = alone(case["tied"]), set()
    assert expected["losses"][-1] < expected["losses"][0] - 0.02, "the run must learn for the comparison to mean much"
    for got in run_ranks(ten_losses, world_of(case), {**SMALL, **options_of(case)}, seconds=400.0):
        assert np.abs(np.subtract(got["losses"], expected["losses"])).max() <= 1e-4
        assert got["first"].grad_norm == pytest.approx(expected["first"].grad_norm, rel=1e-5)
        seen |= got["gradients"].keys()
        for parameter, grad in got["gradients"].items():
            reference = expected["gradients"][parameter]
            assert (grad - reference).abs().max() <= 1e-5 * reference.abs().max(), parameter
    assert seen == expected["gradients"].keys()
