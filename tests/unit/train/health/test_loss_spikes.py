"""What a spike is, and what is none."""

from __future__ import annotations

import json
import math
import random

import pytest

from megatron_snip.config import TrainingConfig
from megatron_snip.train.health.loss_spikes import LossWatch


def watch(*losses: float, **options) -> LossWatch:
    made = LossWatch(TrainingConfig(**{"spike_window": 8, "spike_deviations": 4.0, "spike_nats": 0.5, **options}))
    for loss in losses:
        assert not made.add(loss, 1.0)
    return made


QUIET, LOUD = [3.0, 3.01] * 4, [2.5, 3.5] * 4


@pytest.mark.parametrize("losses", [QUIET, LOUD])
def test_both_bounds_hold(losses):
    """In a quiet run nats decide, in a loud one deviations; the limit itself is no spike."""
    mean = sum(losses) / 8
    deviation = max(losses) - mean
    limit = watch(*losses).limit()
    assert limit == pytest.approx(mean + max(4 * deviation, 0.5))
    assert not watch(*losses).suspicious(limit, 1.0) and watch(*losses).suspicious(math.nextafter(limit, 9), 1.0)


def test_no_spike_before_the_window_is_full_but_never_a_nan():
    early = watch(*QUIET[:7])
    assert not early.suspicious(1e9, 1.0)
    for loss, norm in ((math.nan, 1.0), (math.inf, 1.0), (3.0, math.nan), (3.0, math.inf)):
        assert early.suspicious(loss, norm)


def test_spikes_are_left_out_of_the_mean_until_they_are_the_usual():
    one = watch(*QUIET)
    limit = one.limit()
    for _ in range(7):
        assert one.add(5.0, 1.0) and one.limit() == limit
    assert one.add(5.0, 1.0) and one.limit() == math.inf, "the eighth: it begins anew"
    assert not one.add(5.0, 1.0) and one.losses == [5.0]


def test_a_good_loss_ends_a_row():
    one = watch(*QUIET)
    assert one.add(5.0, 1.0) and not one.add(3.0, 1.0) and one.in_a_row == 0


def test_a_falling_noisy_loss_raises_no_alarm():
    draw = random.Random(3)
    for _ in range(20):
        one = watch(spike_window=64, spike_deviations=6.0)
        assert not any(one.add(3 + 7 * math.exp(-i / 60) + draw.gauss(0, 0.1), 1.0) for i in range(500))


def test_the_state_goes_through_json():
    one, other = watch(*LOUD), watch()
    one.add(9.0, 1.0)
    other.load_state(json.loads(json.dumps(one.state())))
    assert vars(other) == vars(one)
