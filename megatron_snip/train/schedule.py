"""What changes over a run by a schedule: learning rate, weight decay.

Source: Megatron-LM core 0.16.1, optimizer_param_scheduler.py and get_optimizer_param_scheduler of training.py; the
values are equal to Megatron's, to the last bit.
Convention: schedules run over the samples behind the updates made so far.  The first update has the rate at 0 samples,
and an iteration without an update moves nothing.  What is given in iterations counts as whole batches of
--global-batch-size samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_snip.config import TrainingConfig

#: --lr-wsd-decay-style -> share of the way from --min-lr up to --lr, by the share of the decay that is behind.
WSD_STYLES = {
    "linear": lambda behind: 1.0 - behind,
    "cosine": lambda behind: 0.5 * (math.cos(math.pi * behind) + 1.0),
    "exponential": lambda behind: 2.0 * math.pow(0.5, behind) - 1.0,
    "minus_sqrt": lambda behind: 1.0 - math.sqrt(behind),
}


@dataclass(frozen=True)
class _Spans:
    """How long the parts of a schedule take, in samples."""

    warmup: float  # a fraction of the decay need not be whole
    decay: int  # from 0 on, warm-up included
    wsd: int  # the end of the decay
    training: int


def _spans(t: TrainingConfig) -> _Spans:
    batch, decay = t.global_batch_size, t.lr_decay_iters or t.train_iters
    wsd = t.lr_wsd_decay_iters or max(1, decay // 10)
    warmup: float = t.lr_warmup_iters * batch
    if t.lr_warmup_fraction is not None:
        warmup = t.lr_warmup_fraction * (decay * batch)
    return _Spans(warmup, decay * batch, wsd * batch, t.train_iters * batch)


def learning_rate(t: TrainingConfig, samples: int) -> float:
    """Rate of the update that so many samples are behind: linear warm-up, then the decay style's curve."""
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
    """Share of the way from --min-lr up to --lr, of the styles that have one."""
    if t.lr_decay_style == "WSD":
        begin = spans.decay - spans.wsd
        return 1.0 if samples <= begin else WSD_STYLES[t.lr_wsd_decay_style](float(samples - begin) / float(spans.wsd))
    behind = float(samples - spans.warmup) / float(spans.decay - spans.warmup)
    return WSD_STYLES[t.lr_decay_style](behind)


def weight_decay(t: TrainingConfig, samples: int) -> float:
    """Weight decay of the update that so many samples are behind."""
    if t.weight_decay_incr_style == "constant":
        return t.weight_decay
    start, end, training = t.start_weight_decay or 0.0, t.end_weight_decay or 0.0, _spans(t).training
    if samples > training:
        return end
    behind = float(samples) / float(training)
    if t.weight_decay_incr_style == "cosine":
        behind = 0.5 * (math.cos(math.pi * (1 - behind)) + 1.0)
    return start + behind * (end - start)
