"""What a probe predicts against brute force, on small Llamas with planted outliers (docs/numerics.md).

`python -m pytest tests/validation/test_divergence.py -s --figures FILE` prints what it finds and writes it to a file.
Figures in brackets are required.
"""

from __future__ import annotations

import json
import platform
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tests.dist.helpers.harness import run_ranks
from tests.validation.predictions import CHECKPOINTS, RANDOM_PLANS, TARGETS, measure

pytestmark = pytest.mark.timeout(1800)
#: The checkpoint that is quick to get to; others are slow.
QUICK = "narrow"
#: Where plans are made of the wider model: of several seeds and ages.
WIDE = tuple(name for name in CHECKPOINTS if name not in (QUICK, "early"))

#: Where the oracle's plan itself had more than a quarter of random's loss increase, as it has on some machines: models
#: differ from machine to machine by what the order of sums does to 150 or 300 iterations (docs/evidence.md).
BEYOND_REACH = (("mid", 0.8), ("late", 0.8))


def at(*checkpoints: str) -> pytest.MarkDecorator:
    """A test at each of some checkpoints."""
    cases = [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in checkpoints]
    return pytest.mark.parametrize("checkpoint", cases)


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """What was found at each checkpoint, by runs of one thread, two at a time; that of "late" repeats another."""
    runs = [(QUICK,)]
    if request.config.getoption("--all"):
        runs += [("late",), ("early", "mid"), *((name,) for name in WIDE if "seed" in name)]
    folders = [tmp_path_factory.mktemp("planted") for _ in runs]

    def one(folder, checkpoints):
        return run_ranks(measure, 1, folder, checkpoints, seconds=1750.0)[0]

    with ThreadPoolExecutor(2) as pool:
        return {name: found for run in pool.map(one, folders, runs) for name, found in run.items()}


@pytest.fixture(scope="module")
def figures(request):
    """What was measured, by name; written to --figures at the end."""
    found: dict[str, float] = {}
    yield found
    if path := request.config.getoption("--figures"):
        about = {"torch": torch.__version__, "python": platform.python_version(), "date": date.today().isoformat()}
        Path(path).write_text(json.dumps({**about, "figures": found}, indent=1) + "\n")


def compared(measured, figures, checkpoint: str, what: str) -> tuple[float, np.ndarray]:
    """Spearman's coefficient of prediction and truth, and true / predicted of each linear; printed."""
    predicted, truth = measured[checkpoint][what]
    spearman, ratios = float(spearmanr(predicted, truth)[0]), truth / predicted
    figures |= {f"{checkpoint}: {what}, Spearman": spearman}
    figures |= {f"{checkpoint}: {what}, true/predicted, {name}": float(function(ratios))
                for name, function in (("median", np.median), ("least", np.min), ("most", np.max))}  # fmt: skip
    print(f"\n{checkpoint}, {what}: Spearman {spearman:.3f}, true/predicted median {np.median(ratios):.2f}, "
          f"{ratios.min():.2f} to {ratios.max():.2f}")  # fmt: skip
    return spearman, ratios


@at(*CHECKPOINTS)
def test_model_learned_and_planting_keeps_the_function(measured, checkpoint):
    start, trained = measured[checkpoint]["training"]
    plain, planted = measured[checkpoint]["losses"]
    assert trained < start - 1.5
    assert planted == pytest.approx(plain, abs=1e-4)


@at(*CHECKPOINTS)
def test_loss_divergence_ranks_linears_as_the_truth_does(measured, figures, checkpoint):
    """[Spearman >= 0.85 with the even part of the true loss change, median true/predicted 0.5 to 2]"""
    for probe in ("dL", "dL, all tokens"):
        spearman, ratios = compared(measured, figures, checkpoint, probe)
        assert spearman >= 0.85, probe
        assert 0.5 <= np.median(ratios) <= 2.0, probe


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["nvfp4_plain", "mxfp4_floor"])
def test_loss_divergence_of_other_formats(measured, figures, fmt):
    """[Spearman >= 0.85]"""
    assert compared(measured, figures, "late", fmt)[0] >= 0.85


@at(*CHECKPOINTS)
def test_regret_of_the_plan(measured, figures, checkpoint):
    """[(plan - best) / (all FP4 - best) <= 0.10 at 75%]"""
    figures[f"{checkpoint}: regret"] = measured[checkpoint]["regret"]
    print(f"\n{checkpoint}, regret {measured[checkpoint]['regret']:.3f}")
    assert measured[checkpoint]["regret"] <= 0.10


@at(*CHECKPOINTS)
def test_own_term_is_the_update_error_of_wgrad(measured, figures, checkpoint):
    """[Spearman >= 0.99, ratio 0.95 to 1.05 against wgrad alone in FP4]"""
    spearman, ratios = compared(measured, figures, checkpoint, "own")
    assert spearman >= 0.99
    assert ratios.min() >= 0.95 and ratios.max() <= 1.05


def increases(measured, figures, checkpoint: str, target: float) -> dict[str, float]:
    """Loss increase in nats of each plan, and the mean of random ones as "random"; printed."""
    found = measured[checkpoint]["end to end"]
    increase = {key.rsplit(" ", 1)[0]: value for key, value in found.items() if key.endswith(f" {target}")}
    means = {plan: float(values.mean()) for plan, values in increase.items()}
    figures |= {f"{checkpoint}: {target:.0%} FP4, {plan}, nats": mean for plan, mean in means.items()}
    figures[f"{checkpoint}: all FP4, nats"] = found["all fp4"].mean()
    print(f"\n{checkpoint}, {target:.0%} FP4, nats: " + ", ".join(f"{k} {v:.4f}" for k, v in means.items())
          + f", all FP4 {found['all fp4'].mean():.4f}")  # fmt: skip
    return {**means, "random": float(np.mean([v for k, v in means.items() if k.startswith("random_")]))}


@at(QUICK, *WIDE)
@pytest.mark.parametrize("target", TARGETS)
def test_plans_end_to_end(measured, figures, checkpoint, target):
    """[at most 1.5 times the oracle's loss increase, below every rule's]"""
    means = increases(measured, figures, checkpoint, target)
    rules = ("abs_err", "rel_err", "layer_id", "layer_type")
    others = [mean for plan, mean in means.items() if plan in rules or plan.startswith("random_")]
    assert len(others) == len(rules) + RANDOM_PLANS[checkpoint] and means["snip"] < min(others)
    assert means["snip"] <= 1.5 * means["oracle"]


@at(QUICK, *WIDE)
@pytest.mark.parametrize("target", TARGETS)
def test_plans_cost_a_quarter_of_random_ones(measured, figures, checkpoint, target):
    """[at most 0.25 times random's loss increase; in two cases only where the oracle's plan has no more]"""
    means = increases(measured, figures, checkpoint, target)
    if (checkpoint, target) in BEYOND_REACH and means["oracle"] > 0.25 * means["random"]:
        pytest.xfail("the oracle's plan has more than a quarter, too")
    assert means["snip"] <= 0.25 * means["random"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_plans_end_to_end_summed_over_models(measured, figures, target):
    """[at most 1.5 times the oracle's loss increase, 0.25 times random's]"""
    each = [increases(measured, figures, checkpoint, target) for checkpoint in WIDE]
    total = {plan: sum(means[plan] for means in each) for plan in ("snip", "oracle", "random")}
    print(f"{len(WIDE)} models: " + ", ".join(f"{k} {v:.4f}" for k, v in total.items()))
    assert total["snip"] <= 0.25 * total["random"]
    assert total["snip"] <= 1.5 * total["oracle"]
