"""What a probe predicts against brute force, on a small Llama with planted outliers (docs/numerics.md).

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

from tests.dist.harness import run_ranks
from tests.validation.predictions import ITERATIONS, RANDOM_PLANS, TARGETS, measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CHECKPOINTS = pytest.mark.parametrize("checkpoint", list(ITERATIONS))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What was found at each checkpoint, by two runs of the same bits; one thread each, which waits for no other."""
    halves = [("early", "mid"), ("late",)]
    folders = [tmp_path_factory.mktemp("planted") for _ in halves]

    def one(folder, checkpoints):
        return run_ranks(measure, 1, folder, checkpoints, seconds=850.0)[0]

    with ThreadPoolExecutor(len(halves)) as pool:
        return {name: found for half in pool.map(one, folders, halves) for name, found in half.items()}


@pytest.fixture(scope="module")
def figures(request):
    """What was measured, by name; written to --figures at the end."""
    found: dict[str, float] = {}
    yield found
    if path := request.config.getoption("--figures"):
        about = {"torch": torch.__version__, "python": platform.python_version(), "date": date.today().isoformat()}
        Path(path).write_text(json.dumps({**about, "figures": found}, indent=1) + "\n")


def compared(measured, figures, checkpoint: str, what: str, later_blocks: bool = False) -> tuple[float, np.ndarray]:
    """Spearman's coefficient of prediction and truth, and true / predicted of each linear; printed."""
    found = measured[checkpoint]
    rows = [i for i, name in enumerate(found["names"]) if not later_blocks or int(name.split(".")[1]) >= 1]
    predicted, truth = (np.asarray(values)[rows] for values in found[what])
    spearman, ratios = float(spearmanr(predicted, truth)[0]), truth / predicted
    figures |= {f"{checkpoint}: {what}, Spearman": spearman}
    figures |= {f"{checkpoint}: {what}, true/predicted, {name}": float(function(ratios))
                for name, function in (("median", np.median), ("least", np.min), ("most", np.max))}  # fmt: skip
    print(f"\n{checkpoint}, {what}: Spearman {spearman:.3f}, true/predicted median {np.median(ratios):.2f}, "
          f"{ratios.min():.2f} to {ratios.max():.2f}")  # fmt: skip
    return spearman, ratios


@CHECKPOINTS
def test_model_learned_and_planting_keeps_the_function(measured, checkpoint):
    start, trained = measured[checkpoint]["training"]
    plain, planted = measured[checkpoint]["losses"]
    assert trained < start - 1.5
    assert planted == pytest.approx(plain, abs=1e-4)


@CHECKPOINTS
def test_loss_divergence_ranks_linears_as_the_truth_does(measured, figures, checkpoint):
    """[Spearman >= 0.85 with the even part of the true loss change, median true/predicted 0.5 to 2]"""
    spearman, ratios = compared(measured, figures, checkpoint, "dL")
    assert spearman >= 0.85
    assert 0.5 <= np.median(ratios) <= 2.0


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_loss_divergence_of_other_formats(measured, figures, fmt):
    """[Spearman >= 0.85]"""
    assert compared(measured, figures, "late", fmt)[0] >= 0.85


@CHECKPOINTS
def test_regret_of_the_plan(measured, figures, checkpoint):
    """[(plan - best) / (all FP4 - best) <= 0.10 at 75%]"""
    figures[f"{checkpoint}: regret"] = measured[checkpoint]["regret"]
    print(f"\n{checkpoint}, regret {measured[checkpoint]['regret']:.3f}")
    assert measured[checkpoint]["regret"] <= 0.10


@CHECKPOINTS
def test_own_term_is_the_update_error_of_wgrad(measured, figures, checkpoint):
    """[Spearman >= 0.99, ratio 0.95 to 1.05 against wgrad alone in FP4]"""
    spearman, ratios = compared(measured, figures, checkpoint, "own")
    assert spearman >= 0.99
    assert ratios.min() >= 0.95 and ratios.max() <= 1.05


@CHECKPOINTS
def test_prop_term_is_the_update_error_of_dgrad(measured, figures, checkpoint):
    """[Spearman >= 0.85, median ratio 0.7 to 1.5 against dgrad alone in FP4, linears of blocks >= 1]"""
    spearman, ratios = compared(measured, figures, checkpoint, "prop", later_blocks=True)
    assert spearman >= 0.85
    assert 0.7 <= np.median(ratios) <= 1.5


@CHECKPOINTS
def test_weight_divergence_ranks_linears_by_their_true_update_error(measured, figures, checkpoint):
    """[Spearman >= 0.75 of rho against all three GEMMs in FP4; the ratio is ours to keep]"""
    spearman, ratios = compared(measured, figures, checkpoint, "rho")
    assert spearman >= 0.75
    assert 0.5 <= np.median(ratios) <= 2.0


@CHECKPOINTS
def test_weight_divergence_without_fwd_is_that_of_dgrad_and_wgrad(measured, figures, checkpoint):
    """[Spearman >= 0.75, and ours to keep: median ratio 0.9 to 1.1]

    Against all three GEMMs it ranks nothing: with tiles along tokens own does not feel outlier channels, and fwd leads.
    """
    spearman, ratios = compared(measured, figures, checkpoint, "rho without fwd, of dgrad and wgrad")
    assert spearman >= 0.75
    assert 0.9 <= np.median(ratios) <= 1.1
    compared(measured, figures, checkpoint, "rho without fwd")


def test_weight_divergence_without_fwd_as_the_prototype_tiled(measured, figures):
    """[Spearman >= 0.75 against all three GEMMs in FP4, with wgrad's tiles along channels]

    At the mid checkpoint 0.78 to 0.80 on four models.  At the late one 0.66 to 0.80: a CPU that rounds to another model
    than that of docs/numerics.md's tables may miss it there.
    """
    found = {
        name: compared(measured, figures, name, "rho without fwd, tiles along channels")[0] for name in ("mid", "late")
    }
    assert min(found.values()) >= 0.75


@CHECKPOINTS
def test_backward_noise(measured, figures, checkpoint):
    """[gradients scale with sigma, to 1%; gain in BF16 by that in float32 0.85 to 1.15]"""
    found = {
        "gain in BF16": measured[checkpoint]["bf16 gain"],
        "three times sigma": measured[checkpoint]["noise by sigma"],
    }
    for what, ratios in found.items():
        figures |= {f"{checkpoint}: {what}, least": ratios.min(), f"{checkpoint}: {what}, most": ratios.max()}
        print(f"\n{checkpoint}, backward noise, {what}: {ratios.min():.4f} to {ratios.max():.4f}")
    gains, scaled = found.values()
    assert gains.min() >= 0.85 and gains.max() <= 1.15
    assert scaled.min() >= 3 * 0.99 and scaled.max() <= 3 * 1.01


@pytest.mark.parametrize("checkpoint", ["mid", "late"])
@pytest.mark.parametrize("target", TARGETS)
def test_plans_end_to_end(measured, figures, checkpoint, target):
    """[75%: at most 1.5 times the oracle's loss increase, 0.25 times random's; snip_loss below every other]

    [snip at most 1.3 times snip_loss]
    """
    found = measured[checkpoint]["end to end"]
    increase = {key.rsplit(" ", 1)[0]: value for key, value in found.items() if key.endswith(f" {target}")}
    means = {plan: float(values.mean()) for plan, values in increase.items()}
    figures |= {f"{checkpoint}: {target:.0%} FP4, {plan}, nats": mean for plan, mean in means.items()}
    figures[f"{checkpoint}: all FP4, nats"] = found["all fp4"].mean()
    print(f"\n{checkpoint}, {target:.0%} FP4, nats: " + ", ".join(f"{k} {v:.4f}" for k, v in means.items())
          + f", all FP4 {found['all fp4'].mean():.4f}")  # fmt: skip
    random = [f"random_{seed}" for seed in range(RANDOM_PLANS)]
    others = ("abs_err", "rel_err", "paper", *random)
    assert means["snip_loss"] < min(means[other] for other in others)
    assert means["snip_loss"] <= 0.25 * np.mean([means[seed] for seed in random])
    assert means["snip_loss"] <= 1.5 * means["oracle"]
    assert means["snip"] <= 1.3 * means["snip_loss"]
