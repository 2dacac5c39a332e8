"""What a probe predicts against brute force, on a small Llama with planted outliers (docs/numerics.md)."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from tests.dist.harness import run_ranks
from tests.validation.planted import measure

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_ranks(measure, 1, tmp_path_factory.mktemp("planted"), seconds=280.0)[0]


def test_model_learned_and_planting_keeps_the_function(measured):
    start, trained, plain, planted = measured["losses"]
    assert trained < start - 2.0
    assert planted == pytest.approx(plain, abs=1e-4)


def test_loss_divergence_ranks_linears_as_the_truth_does(measured):
    """Required: Spearman >= 0.85 with the even part of the true loss change, median true/predicted 0.5-2."""
    spearman = spearmanr(measured["predicted"], measured["truth"])[0]
    ratio = np.median(measured["truth"] / measured["predicted"])
    print(f"\nloss divergence: Spearman {spearman:.3f}, median true/predicted {ratio:.2f}")
    assert spearman >= 0.85
    assert 0.5 <= ratio <= 2.0


def test_own_term_is_the_update_error_of_wgrad(measured):
    """Required: Spearman >= 0.99, ratio 0.95-1.05 against wgrad alone in FP4."""
    spearman = spearmanr(measured["rho"], measured["rho_true"])[0]
    ratios = measured["rho_true"] / measured["rho"]
    print(f"\nown: Spearman {spearman:.4f}, true/predicted {ratios.min():.3f} to {ratios.max():.3f}")
    assert spearman >= 0.99
    assert ratios.min() >= 0.95 and ratios.max() <= 1.05
