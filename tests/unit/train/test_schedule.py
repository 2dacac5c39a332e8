"""Learning rate and weight decay: by hand, and equal to megatron-core's over whole schedules."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from types import SimpleNamespace

import pytest

from megatron_snip.config import Config, TrainingConfig
from megatron_snip.train.schedule import decay_start, final_switch, learning_rate, weight_decay

BATCH = 4
SCHEDULE = {"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 10, "train_iters": 110, "global_batch_size": BATCH}


def rates(t: TrainingConfig, iterations) -> dict[int, float]:
    """Iteration, counted from 1 -> the rate of its update, where none before was skipped."""
    return {i: learning_rate(t, (i - 1) * t.global_batch_size) for i in iterations}


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        # update 1 has the rate at 0, update 11 that of the end of warm-up, 61 is the middle of the decay, 111 its end
        ("constant", {1: 0.0, 2: 0.1, 11: 1.0, 12: 1.0, 61: 1.0, 500: 1.0}),
        ("linear", {1: 0.0, 2: 0.1, 11: 1.0, 36: 0.775, 61: 0.55, 111: 0.1, 112: 0.1, 500: 0.1}),
        ("cosine", {1: 0.0, 6: 0.5, 11: 1.0, 36: 0.55 + 0.225 * math.sqrt(2), 61: 0.55, 111: 0.1, 500: 0.1}),
        ("inverse-square-root", {1: 0.0, 11: 1.0, 41: 0.5, 91: 1 / 3, 112: 0.1}),
        # the last tenth of 110 iterations decays, by halves as it goes: 2 x 0.5^(1/11) - 1 of 0.9 is left after one
        ("WSD", {1: 0.0, 11: 1.0, 61: 1.0, 100: 1.0, 101: 0.1 + 0.9 * (2 * 0.5 ** (1 / 11) - 1), 111: 0.1, 112: 0.1}),
    ],
)  # fmt: skip
def test_schedules(style, expected):
    t = TrainingConfig(lr_decay_style=style, lr_wsd_decay_iters=11 if style == "WSD" else None, **SCHEDULE)
    assert rates(t, expected) == pytest.approx(expected, rel=1e-12)


def test_decay_iterations_may_end_before_training():
    linear = TrainingConfig(lr_decay_style="linear", lr_decay_iters=60, **SCHEDULE)
    assert list(rates(linear, (36, 61, 62, 111)).values()) == pytest.approx([0.55, 0.1, 0.1, 0.1])
    wsd = TrainingConfig(
        lr_decay_style="WSD", lr_wsd_decay_style="linear", lr_decay_iters=60, lr_wsd_decay_iters=20, **SCHEDULE
    )
    assert list(rates(wsd, (41, 51, 61, 62)).values()) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_without_warm_up_the_first_update_has_the_whole_rate():
    t = TrainingConfig(lr=1.0, lr_decay_style="linear", train_iters=10, global_batch_size=BATCH)
    assert list(rates(t, (1, 6, 10, 11)).values()) == pytest.approx([1.0, 0.5, 0.1, 0.0])


def test_warm_up_begins_where_it_is_told_and_may_be_a_fraction():
    t = TrainingConfig(lr=1.0, lr_warmup_fraction=0.25, lr_warmup_init=0.2, train_iters=40, global_batch_size=BATCH)
    assert list(rates(t, (1, 6, 11)).values()) == pytest.approx([0.2, 0.6, 1.0])
    assert rates(t, (12,))[12] < 1.0


@pytest.fixture(scope="module")
def scheduler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        return pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler


def megatrons(scheduler, t: TrainingConfig, batches: list[int]) -> list[tuple[float, float]]:
    """(rate, weight decay) of each update, made as Megatron-LM's get_optimizer_param_scheduler makes its scheduler."""
    batch, group = t.global_batch_size, {"params": []}
    decay = (t.lr_decay_iters or t.train_iters) * batch
    warmup = t.lr_warmup_iters * batch if t.lr_warmup_fraction is None else t.lr_warmup_fraction * decay
    constant = t.weight_decay_incr_style == "constant"
    one = scheduler(
        SimpleNamespace(param_groups=[group]), t.lr_warmup_init, t.lr, t.min_lr, warmup, decay, t.lr_decay_style,
        t.weight_decay if constant else t.start_weight_decay, t.weight_decay if constant else t.end_weight_decay,
        t.train_iters * batch, t.weight_decay_incr_style, False, False,
        t.lr_wsd_decay_iters * batch if t.lr_wsd_decay_iters else None, t.lr_wsd_decay_style,
    )  # fmt: skip
    found = []
    for size in batches:
        found.append((group["lr"], group["weight_decay"]))
        one.step(size)
    return found


def ours(t: TrainingConfig, batches: list[int]) -> list[tuple[float, float]]:
    behind = itertools.accumulate(batches[:-1], initial=0)
    return [(learning_rate(t, samples), weight_decay(t, samples)) for samples in behind]


WARM_UPS = {
    "none": {},
    "warm-up": {"lr_warmup_iters": 37},
    "from a rate": {"lr_warmup_iters": 37, "lr_warmup_init": 1e-7},
    "a fraction": {"lr_warmup_fraction": 0.0137},
}
STYLES = [
    *({"lr_decay_style": style} for style in ("constant", "linear", "cosine", "inverse-square-root")),
    *({"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 91}
      for style in ("exponential", "linear", "cosine", "minus_sqrt")),
]  # fmt: skip


@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
@pytest.mark.parametrize("warm_up", WARM_UPS.values(), ids=WARM_UPS)
@pytest.mark.parametrize("decay_iters", [None, 501], ids=["", "ends early"])
def test_rates_are_megatrons_to_the_last_bit(style, warm_up, decay_iters, scheduler):
    t = TrainingConfig(
        lr=3e-4, min_lr=2.9e-5, train_iters=700, global_batch_size=24, lr_decay_iters=decay_iters, **style, **warm_up
    )
    batches = [24] * 720  # and past the end
    assert ours(t, batches) == megatrons(scheduler, t, batches)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decays_are_megatrons_to_the_last_bit(style, scheduler):
    grows = {} if style == "constant" else {"start_weight_decay": 0.033, "end_weight_decay": 0.1}
    t = TrainingConfig(train_iters=300, global_batch_size=6, weight_decay_incr_style=style, weight_decay=0.07, **grows)
    batches = [6] * 310
    found = ours(t, batches)
    assert found == megatrons(scheduler, t, batches)
    assert len({decay for _, decay in found}) == (1 if style == "constant" else 301)


RAMPS = [(8, 8, 1000), (4, 12, 77), (2, 2, 5), (16, 16, 33)]  # to 64; the third grows at every sample or so


@pytest.fixture(scope="module")
def calculator():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        return pytest.importorskip("megatron.core.num_microbatches_calculator").RampupBatchsizeNumMicroBatchesCalculator


def megatrons_batches(calculator, t: TrainingConfig) -> list[int]:
    """The batch of each iteration, and how many there are, as Megatron-LM's update_train_iters counts them."""
    one, sizes, consumed = calculator(t.global_batch_size, 1, 1, False, 0, *t.rampup_batch_size), [], 0
    while consumed <= t.rampup_batch_size[2] and consumed <= t.train_samples:
        one.update(consumed, False)
        sizes.append(one.get_current_global_batch_size())
        consumed += sizes[-1]
    return sizes + [t.global_batch_size] * (max(0, t.train_samples - consumed) // t.global_batch_size)


@pytest.mark.parametrize("ramp", RAMPS)
@pytest.mark.parametrize("samples", [500, 5000])
def test_batches_and_rates_of_a_ramp_are_megatrons(ramp, samples, calculator, scheduler):
    t = TrainingConfig(
        lr=3e-4, min_lr=1e-5, global_batch_size=64, rampup_batch_size=ramp, train_samples=samples, lr_warmup_samples=41,
        lr_decay_style="WSD", lr_decay_samples=400, lr_wsd_decay_samples=150,
    )  # fmt: skip
    sizes = megatrons_batches(calculator, t)
    t = Config(training=t).with_iterations().training
    assert t.train_iters == len(sizes)
    behind = list(itertools.accumulate(sizes, initial=0))
    assert [t.batch_size(consumed) for consumed in behind] == [*sizes, t.batch_size(behind[-1])]
    group = {"params": []}
    theirs = scheduler(
        SimpleNamespace(param_groups=[group]), 0.0, t.lr, t.min_lr, 41, 400, "WSD", 0.0, 0.0, samples, "constant",
        False, False, 150, t.lr_wsd_decay_style,
    )  # fmt: skip
    for consumed, size in zip(behind, sizes, strict=False):
        assert learning_rate(t, consumed) == group["lr"]
        theirs.step(size)


def test_samples_without_a_ramp_are_whole_batches():
    t = TrainingConfig(global_batch_size=64, train_samples=1000)
    assert Config(training=t).with_iterations().training.train_iters == 15 and t.batch_size(10**6) == 64


@pytest.mark.parametrize("ramp", [(), (2, 2, 11)])
@pytest.mark.parametrize(("batch", "decay", "final"), list(itertools.product((4, 6), (20, 33), (3, 7))))
def test_the_decay_begins_with_the_first_lower_rate(batch, decay, final, ramp):
    t = TrainingConfig(lr=1.0, global_batch_size=batch, lr_decay_style="WSD", rampup_batch_size=ramp)
    length = {"train_samples": decay * batch, "lr_wsd_decay_samples": final * batch}
    t = dataclasses.replace(t, **length if ramp else {"train_iters": decay, "lr_wsd_decay_iters": final})
    consumed, iteration = 0, 1
    while learning_rate(t, consumed) >= 1.0:
        consumed, iteration = consumed + t.batch_size(consumed), iteration + 1
    assert decay_start(t) == iteration
    assert decay_start(dataclasses.replace(t, lr_decay_style="cosine")) is None


def test_when_the_late_switch_comes():
    wsd = {"train_iters": 20, "global_batch_size": 2, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 5}
    late = Config().replace(snip_final_precision="bf16/plan/plan", **wsd)
    assert final_switch(late).start == 17 and final_switch(late.replace(snip_final_iters=3)).start == 18
    assert final_switch(late.replace(snip_final_iters=20, lr_decay_style="cosine")).start == 1
    assert final_switch(Config()) is None
