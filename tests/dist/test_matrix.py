"""On a pairwise covering array of layouts, one process's losses over six iterations in float32, and its plan."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.dist.helpers.covering import FACTORS, covering, length_of, name_of, options_of, pairs, valid_cases, world_of
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import losses, mixed_plan, plan_from, save_after
from tests.dist.test_layouts import unlike

SMALL = {"hidden_size": 128, "ffn_hidden_size": 256}
SECONDS = 400.0
CASES = {name_of(case): case for case in covering()}
six_losses = functools.partial(losses, iterations=6)


def test_every_two_values_meet():
    """Each value is in a case with each value of another factor, but where no valid case has both."""
    met = set().union(*map(pairs, CASES.values()))
    assert met == set().union(*map(pairs, valid_cases()))
    apart = {("tp", 1): {("sequence_parallel", True)}, ("pp", 1): {("interleaved", True), ("uneven", True)}}
    names = list(FACTORS)
    for (i, one), other in product(enumerate(names), names):
        for a, b in product(FACTORS[one], FACTORS[other]) if other in names[i + 1 :] else ():
            assert (((one, a), (other, b)) in met) != ((other, b) in apart.get((one, a), ()))


def lone_options(tied: bool, length: int):
    """The same model on one process."""
    return {"num_layers": 8, "untie_embeddings_and_output_weights": not tied, "seq_length": length}


@functools.cache
def alone(tied: bool, length: int):
    """Losses and gradients of one process."""
    return run_ranks(six_losses, 1, {**SMALL, **lone_options(tied, length)}, seconds=SECONDS)[0]


@functools.cache
def planned_alone(tied: bool, length: int, folder: Path):
    """A checkpoint of one process, and its statistics and plan."""
    checkpoint = folder / f"{tied}_{length}"
    run_ranks(save_after, 1, lone_options(tied, length), checkpoint, 6, seconds=SECONDS)
    return checkpoint, run_ranks(plan_from, 1, lone_options(tied, length), checkpoint, 6, seconds=SECONDS)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


#: In CI, one that has much at once and no more than four processes.
FIRST = [name for name, case in CASES.items() if case["tied"] and case["uneven"] and world_of(case) <= 4][:1]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.slow) for n in CASES])
def test_losses_and_gradients_are_those_of_one_process(name):
    case = CASES[name]
    expected, seen = alone(case["tied"], length_of(case)), set()
    assert expected["losses"][-1] < expected["losses"][0] - 0.02, "the run must learn for the comparison to mean much"
    for got in run_ranks(six_losses, world_of(case), {**SMALL, **options_of(case)}, seconds=SECONDS):
        assert np.abs(np.subtract(got["losses"], expected["losses"])).max() <= 1e-4
        assert got["first"].grad_norm == pytest.approx(expected["first"].grad_norm, rel=1e-5)
        seen |= got["gradients"].keys()
        for parameter, grad in got["gradients"].items():
            reference = expected["gradients"][parameter]
            assert (grad - reference).abs().max() <= 1e-5 * reference.abs().max(), parameter
    assert seen == expected["gradients"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_checkpoint_gives_one_plan_and_its_statistics(name, folder):
    case = CASES[name]
    checkpoint, expected = planned_alone(case["tied"], length_of(case), folder)
    assert len(set(expected["precision"].values())) > 1, "a plan of one precision proves little"
    options = {**options_of(case), "snip_stage_constraint": "none"}  # as one stage is planned
    planned = {}
    for got in run_ranks(plan_from, world_of(case), options, checkpoint, 6, seconds=SECONDS):
        assert got["hash"] == expected["hash"]
        assert not unlike(got["stats"], expected["stats"], split=True)
        planned |= got["precision"]
    assert planned == expected["precision"]


@functools.cache
def under_a_plan(length: int, folder: Path):
    """Options of a mixed plan, one process's losses, and how far four draws of a unit in the last place take them."""
    plan = mixed_plan(folder / f"{length}.json", **lone_options(False, length))
    options = {"precision": "plan", "precision_plan": str(plan)}
    lone = {**lone_options(False, length), **options}
    expected = run_ranks(losses, 1, lone, seconds=SECONDS)[0]["losses"]
    nudged = [
        run_ranks(functools.partial(losses, nudge=seed), 1, lone, seconds=SECONDS)[0]["losses"] for seed in range(4)
    ]
    return options, expected, float(np.mean([np.abs(np.subtract(one, expected)).mean() for one in nudged]))


@pytest.mark.slow
@pytest.mark.timeout(900)  # eight processes of twenty iterations, and five runs of one to compare with
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if world_of(case) > 2 and not case["tied"]])
def test_losses_under_a_plan_agree_up_to_the_order_of_sums(name, folder):
    """Of several axes, by the bound of test_layouts.py; a tied embedding is not quantised, and says nothing here."""
    case = CASES[name]
    plan, expected, chaos = under_a_plan(length_of(case), folder)
    got = run_ranks(losses, world_of(case), {**options_of(case), **plan}, seconds=SECONDS)[-1]["losses"]
    assert np.abs(np.subtract(got, expected)).mean() <= 2.0 * chaos
    assert chaos > 0.0
