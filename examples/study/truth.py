"""The truth behind predictions of the loss, by brute force: losses with changed outputs of linears."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from examples.study.planted import linears_of
from megatron_snip.model import attention, llama
from megatron_snip.parallel.tensor import linears_of_one_input
from megatron_snip.quant import LinearPrecision, fake_quantize
from megatron_snip.quant.casts.cast import swiglu_product
from megatron_snip.train.setup import Parts

BF16 = LinearPrecision.uniform("bf16")


@dataclass(frozen=True)
class Sequences:
    """Some sequences as one batch of one microbatch."""

    tokens: Tensor  # [1, B, S]
    labels: Tensor
    sample_index: Tensor


def batches(parts: Parts, first: int, count: int, each: int) -> list[Sequences]:
    """``count`` batches of ``each`` sequences from sample ``first`` on; ``each`` divides the run's own batch."""
    found: list[Sequences] = []
    while len(found) < count:
        batch = parts.train_loader.make(first)
        tokens, labels, index = (t.flatten(0, 1) for t in (batch.tokens, batch.labels, batch.sample_index))
        first += len(tokens)
        found += [
            Sequences(tokens[i : i + each][None], labels[i : i + each][None], index[i : i + each][None])
            for i in range(0, len(tokens), each)
        ]
    return found[:count]


def loss_of(parts: Parts, over: Sequence[Any]) -> float:
    """Mean loss in nats per token, in the precisions that are set."""
    return float(np.mean(losses_of(parts, over)))


def losses_of(parts: Parts, over: Sequence[Any]) -> np.ndarray:
    """Loss of each batch [B] in nats per token."""
    return np.array([parts.stepper.evaluate(batch, 1) for batch in over])


@contextmanager
def precisions(parts: Parts, chosen: Mapping[str, LinearPrecision]) -> Iterator[None]:
    """Give linears these precisions within the block."""
    before = {name: linear.precision for name, linear in linears_of(parts).items()}
    for name, precision in chosen.items():
        linears_of(parts)[name].precision = precision
    try:
        yield
    finally:
        for name, linear in linears_of(parts).items():
            linear.precision = before[name]


@contextmanager
def shifted(linear: Any, fmt: str, sign: float) -> Iterator[None]:
    """Within the block, let a linear return Y + sign * dY, where dY = Q(X) Q(W)^T - X W^T."""

    def shift(x: Tensor, y: Tensor) -> Tensor:
        flat, w = x.flatten(0, 1), linear.weight
        qx = fake_quantize(flat, fmt, role="input", dim=1)
        qw = fake_quantize(w.detach(), fmt, role="weight", dim=1)
        return y + sign * (qx @ qw.T - flat @ w.T).view_as(y)

    def of_group(linears: Sequence[Any], x: Tensor, context: Any) -> list[Tensor]:
        ys = linears_of_one_input(linears, x, context)
        return [shift(x, y) if one is linear else y for one, y in zip(linears, ys, strict=True)]

    def of_module(module: Any, given: tuple[Any, ...], y: Tensor) -> Tensor:
        x, _, *up = given
        return shift(swiglu_product(x, *up) if up else x, y)  # down_proj is given gate and up

    hook = linear.register_forward_hook(of_module)
    try:
        with (
            mock.patch.object(attention, "linears_of_one_input", of_group),
            mock.patch.object(llama, "linears_of_one_input", of_group),
        ):
            yield
    finally:
        hook.remove()


@contextmanager
def streams_kept(parts: Parts, streams: dict[int, list[Tensor]]) -> Iterator[None]:
    """Within the block, keep the residual stream that each block reads, one entry per evaluated batch."""
    (stage,) = parts.stages.values()

    def keep(index: int) -> Any:
        return lambda block, args: streams.setdefault(index, []).append(args[0])

    hooks = [block.register_forward_pre_hook(keep(index)) for index, block in stage.blocks().items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def begun_at(parts: Parts, index: int, streams: Mapping[int, Sequence[Tensor]]) -> Iterator[None]:
    """Within the block, skip the blocks before ``index``, which reads what was kept: the same bits in less time."""
    (stage,) = parts.stages.values()
    coming, earlier = iter(streams[index]), [block for i, block in stage.blocks().items() if i < index]
    hook = stage.blocks()[index].register_forward_pre_hook(lambda block, args: (next(coming), *args[1:]))
    for block in earlier:
        block.forward = lambda x, *rest: x
    try:
        yield
    finally:
        hook.remove()
        for block in earlier:
            del block.forward


def even_truth(parts: Parts, over: Sequence[Any], fmt: str, names: Sequence[str]) -> np.ndarray:
    """[L(+dY) + L(-dY)]/2 - L0 of each linear [L], in nats, over batches that no probe has read."""
    streams: dict[int, list[Tensor]] = {}
    with streams_kept(parts, streams):
        base = loss_of(parts, over)
    assert parts.coordinator is not None
    blocks = {shape.name: shape.block for shape in parts.coordinator.shapes}
    truth = []
    for name in names:
        both = []
        for sign in (1.0, -1.0):
            with begun_at(parts, blocks[name], streams), shifted(linears_of(parts)[name], fmt, sign):
                both.append(loss_of(parts, over))
        truth.append(sum(both) / 2 - base)
    return np.array(truth)
