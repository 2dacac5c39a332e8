"""What the tests of sharding strategies run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from megatron_snip.parallel.data import local_of
from megatron_snip.quant import LinearPrecision
from megatron_snip.train.dry_run.counts import Tracker
from tests.dist.helpers.dry_runs import collectives
from tests.dist.helpers.runs import make


class _Order(Tracker):
    """The ops of an iteration, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func._schema.name)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_given_numbers(stage: Any, given: Any, named: dict[str, Any]) -> None:
    assert isinstance(named["sample_index"], list), "on a GPU reading a tensor would wait"


def an_iteration(options: dict[str, Any]) -> dict[str, Any]:
    """What the second iteration of a run sends, and the ops of it in order."""
    config, parts = make(options)
    loader, size = parts.train_loader, config.training.global_batch_size
    loader.close()
    parts.stepper.step(loader.make(0), 1)
    for stage in parts.stages.values():
        stage.register_forward_pre_hook(_is_given_numbers, with_kwargs=True)
    order = _Order()
    order.name_axes(parts.mesh)
    with order:
        parts.stepper.step(loader.make(size), 2)
    weights = sum(p.numel() for p in parts.optimizer.parameters.values())
    return {"collectives": collectives(order.counts), "ops": order.ops, "weights": weights}


def sent_over_dp(counts: Counter[Any]) -> dict[str, tuple[int, int]]:
    """(how often, bytes) of each collective over dp."""
    kinds = {what[2] for what in counts if what[1] == "dp"}
    return {kind: (counts["count", "dp", kind], counts["bytes", "dp", kind]) for kind in sorted(kinds)}


def tensors_after(options: dict[str, Any], iterations: int) -> dict[str, torch.Tensor]:
    """Train; this process's parts of weights and moments."""
    config, parts = make(options)
    loader, size = parts.train_loader, config.training.global_batch_size
    for i in range(iterations):
        parts.stepper.step(loader.batch(i * size), i + 1)
    loader.close()
    return {name: local_of(t).clone() for name, t in parts.tensors().items()}


def gathered(options: dict[str, Any], *, frees: bool) -> dict[str, Any]:
    """Train with a probe before and a validation after each step; what it told, and weights' memory between microbatches.

    frees: as runs do; else what was gathered stays beside its casts.  Memory is that of each linear's weight, as a share
    of the weight.
    """
    config, parts = make({**options, "precision": "snip"})
    assert parts.coordinator is not None
    for i, linear in enumerate(parts.linears.values()):
        linear.precision = LinearPrecision.parse(["fp4", "fp8/fp4/bf16", "bf16"][i % 3])
        linear.weight_casts.frees &= frees
    shares: dict[str, list[float]] = {name: [] for name in parts.linears}

    def look(*_: Any) -> None:
        for name, linear in parts.linears.items():
            weight = local_of(linear.weight)
            shares[name].append(weight.untyped_storage().size() / (weight.numel() * weight.itemsize))

    told = []
    for i in (1, 2):
        batch = parts.train_loader.batch((i - 1) * config.training.global_batch_size)
        parts.coordinator.probe.run(parts.stepper.pass_runner(batch, i), parts.optimizer.zero_grad, i)
        hooks = [stage.register_forward_pre_hook(look) for stage in parts.stages.values()]
        told.append(parts.stepper.step(batch, i).loss)
        for hook in hooks:
            hook.remove()
        told.append(parts.stepper.evaluate(batch, i))
    parts.train_loader.close()
    tensors = {name: local_of(tensor).clone() for name, tensor in parts.tensors().items()}
    return {"told": told, "tensors": tensors, "shares": shares}
