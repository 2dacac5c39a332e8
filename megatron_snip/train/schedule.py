"""Schedules of learning rate, weight decay and batch size.

Source: Megatron-LM core 0.16.1, optimizer_param_scheduler.py and get_optimizer_param_scheduler of training.py; the
values equal Megatron's, to the last bit.
Convention: schedules are functions of the number of samples in the updates so far.  The first update has the rate at 0
samples, and a skipped update does not advance a schedule.  Options in iterations count full batches of
--global-batch-size samples; with --train-samples all options are in samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_snip.config import Config, TrainingConfig
from megatron_snip.errors import UserError
from megatron_snip.snip.plan.final import Final

#: --lr-wsd-decay-style -> height between --min-lr and --lr, by the fraction of the decay that is done.
WSD_STYLES = {
    "linear": lambda behind: 1.0 - behind,
    "cosine": lambda behind: 0.5 * (math.cos(math.pi * behind) + 1.0),
    "exponential": lambda behind: 2.0 * math.pow(0.5, behind) - 1.0,
    "minus_sqrt": lambda behind: 1.0 - math.sqrt(behind),
}


@dataclass(frozen=True)
class _Spans:
    """Lengths of a schedule's parts, in samples."""

    warmup: float  # as a fraction of the decay it may not be an integer
    decay: int  # from 0 on, including warm-up
    wsd: int  # final decay of WSD
    training: int


def _spans(t: TrainingConfig) -> _Spans:
    if t.train_samples is not None:
        unit, training, warmup = 1, t.train_samples, float(t.lr_warmup_samples)
        decay, wsd = t.lr_decay_samples or training, t.lr_wsd_decay_samples
    else:
        unit, training, warmup = t.global_batch_size, t.train_iters, float(t.lr_warmup_iters)
        decay, wsd = t.lr_decay_iters or training, t.lr_wsd_decay_iters
    warmup = warmup * unit if t.lr_warmup_fraction is None else t.lr_warmup_fraction * (decay * unit)
    return _Spans(warmup, decay * unit, (wsd or 0) * unit, training * unit)


def learning_rate(t: TrainingConfig, samples: int) -> float:
    """Learning rate of the update after this many samples: linear warm-up, then the decay style's curve."""
    spans = _spans(t)
    if spans.warmup > 0 and samples <= spans.warmup:
        return t.lr_warmup_init + (t.lr - t.lr_warmup_init) * float(samples) / float(spans.warmup)
    if t.lr_decay_style == "constant":
        return t.lr
    if samples > spans.decay:
        return t.min_lr
    if t.lr_decay_style == "inverse-square-root":
        return max(t.min_lr, t.lr * max(spans.warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
    return t.min_lr + _height(t, spans, samples) * (t.lr - t.min_lr)


def _height(t: TrainingConfig, spans: _Spans, samples: int) -> float:
    """Height between --min-lr and --lr, for the styles that have one."""
    if t.lr_decay_style == "WSD":
        begin = spans.decay - spans.wsd
        return 1.0 if samples <= begin else WSD_STYLES[t.lr_wsd_decay_style](float(samples - begin) / float(spans.wsd))
    behind = float(samples - spans.warmup) / float(spans.decay - spans.warmup)
    return WSD_STYLES[t.lr_decay_style](behind)


def decay_start(t: TrainingConfig) -> int | None:
    """The first iteration of WSD's final decay, where the rate falls below its peak; None for other styles.

    Does not foresee skipped updates, which shift the schedule.
    """
    if t.lr_decay_style != "WSD":
        return None
    spans = _spans(t)
    begin, consumed, iteration = spans.decay - spans.wsd, 0, 1
    ramp = t.rampup_batch_size[2] if t.rampup_batch_size else -1
    while consumed <= min(begin, ramp):
        consumed += t.batch_size(consumed)
        iteration += 1
    return iteration + max(0, begin - consumed + t.global_batch_size) // t.global_batch_size


def final_switch(config: Config) -> Final | None:
    """When and to what --snip-final-precision switches; None without it.  Raises UserError for impossible values."""
    text, count, t = config.snip.snip_final_precision, config.snip.snip_final_iters, config.training
    if text is None:
        return None
    start = decay_start(t) if count == "decay" else t.train_iters - count + 1
    if start is None:
        raise UserError(
            f"--snip-final-precision {text}: --lr-decay-style {t.lr_decay_style} has no final decay; give "
            "--snip-final-iters a number of iterations, or use --lr-decay-style WSD"
        )
    if start < 1:
        raise UserError(f"--snip-final-iters is {count}, but --train-iters {t.train_iters}; give fewer")
    return Final.parse(text, start)


def weight_decay(t: TrainingConfig, samples: int) -> float:
    """Weight decay of the update after this many samples."""
    if t.weight_decay_incr_style == "constant":
        return t.weight_decay
    start, end, training = t.start_weight_decay or 0.0, t.end_weight_decay or 0.0, _spans(t).training
    if samples > training:
        return end
    behind = float(samples) / float(training)
    if t.weight_decay_incr_style == "cosine":
        behind = 0.5 * (math.cos(math.pi * (1 - behind)) + 1.0)
    return start + behind * (end - start)


def check_batches(t: TrainingConfig) -> None:
    """Raise UserError if --rampup-batch-size does not reach --global-batch-size, or the run has less than one batch."""
    ramp, samples = t.rampup_batch_size, t.train_samples
    if samples is not None and not ramp and 0 < samples < t.global_batch_size:
        raise UserError(
            f"--train-samples is {samples}, less than --global-batch-size {t.global_batch_size}; change one"
        )
    if ramp and (len(ramp) != 3 or min(ramp) < 1 or len(t.batch_sizes) < 2 or t.batch_sizes[-1] != t.global_batch_size):
        raise UserError(
            f"--rampup-batch-size is {' '.join(map(str, ramp))}; give START INCREMENT SAMPLES, with START below "
            f"--global-batch-size {t.global_batch_size} and a whole number of increments up to it"
        )


def check_samples(config: Config) -> None:
    """Raise UserError for a mix of options in iterations and in samples.

    A saved run has both --train-samples and the resulting --train-iters, so both are allowed if they agree.
    """
    t = config.training
    if t.train_samples is None:
        for name in ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples", "rampup_batch_size"):
            if getattr(t, name):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} counts samples; give --train-samples, or drop it")
        return
    for name in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"):
        if getattr(t, name):
            raise UserError(
                f"--{name.replace('_', '-')} counts iterations, but --train-samples is given; "
                f"give --{name.replace('_iters', '_samples').replace('_', '-')}"
            )
    follow = config.replace(train_iters=0).with_iterations().training.train_iters
    if t.train_iters != follow:
        raise UserError(
            f"--train-iters is {t.train_iters}, but --train-samples {t.train_samples} makes {follow}; drop one"
        )


def check_schedule(t: TrainingConfig) -> None:
    """Raise UserError for contradictory rates and decays."""
    if t.min_lr > t.lr and t.lr_decay_style != "constant":
        raise UserError(
            f"--min-lr {t.min_lr:g} is above --lr {t.lr:g}, but the rate decays from --lr to --min-lr; change one"
        )
    if t.lr_warmup_init > t.lr:
        raise UserError(f"--lr-warmup-init {t.lr_warmup_init:g} is above --lr {t.lr:g}, where warm-up ends; lower it")
    for unit in ("iters", "samples"):
        if t.lr_warmup_fraction is not None and getattr(t, f"lr_warmup_{unit}"):
            raise UserError(f"--lr-warmup-fraction and --lr-warmup-{unit} mean the same; drop one")
        decay, spans = getattr(t, f"lr_decay_{unit}"), _spans(t)
        if decay and spans.decay <= spans.warmup < spans.training and t.lr_decay_style != "constant":
            kind = unit if t.lr_warmup_fraction is None else "fraction"
            raise UserError(
                f"--lr-decay-{unit} {decay} leaves nothing after the warm-up of --lr-warmup-{kind} "
                f"{getattr(t, f'lr_warmup_{kind}'):g}; raise the first or lower the second"
            )
        if getattr(t, f"lr_wsd_decay_{unit}") is not None and t.lr_decay_style != "WSD":
            raise UserError(
                f"--lr-wsd-decay-{unit} is given, but --lr-decay-style is {t.lr_decay_style}; use WSD or drop the first"
            )
    wsd = "lr_wsd_decay_iters" if t.train_samples is None else "lr_wsd_decay_samples"
    if t.lr_decay_style == "WSD" and getattr(t, wsd) is None:
        raise UserError(f"--lr-decay-style WSD needs --{wsd.replace('_', '-')}, the length of its final decay; give it")
    ends, style = (t.start_weight_decay, t.end_weight_decay), t.weight_decay_incr_style
    if style == "constant" and ends != (None, None):
        raise UserError(
            "--start-weight-decay and --end-weight-decay need a weight decay that grows, but "
            "--weight-decay-incr-style is constant; give linear or cosine, or --weight-decay alone"
        )
    if style != "constant" and None in ends:
        raise UserError(
            f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay; give both"
        )
    if style != "constant" and (ends[0] or 0.0) > (ends[1] or 0.0):
        raise UserError(f"--start-weight-decay {ends[0]} is above --end-weight-decay {ends[1]}; change one")
