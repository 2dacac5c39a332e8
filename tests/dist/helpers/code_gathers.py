"""What the tests of --fp8-param-gather run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from typing import Any

from megatron_snip.parallel.data import local_of
from megatron_snip.quant import LinearPrecision
from tests.dist.helpers.runs import make


def trained(options: dict[str, Any], formats: tuple[str, ...]) -> dict[str, Any]:
    """Train with a validation, a probe, a trial's pass and a change of plan in between.

    What each step told, the weights and moments of this rank, and how many linears gathered codes before each event.
    """
    config, parts = make({"num_layers": 2, "precision": "snip", **options})
    assert parts.coordinator is not None
    loader, size, stepper, told, coded = parts.train_loader, config.training.global_batch_size, parts.stepper, [], []

    def plan(first: int) -> None:
        for i, linear in enumerate(parts.linears.values(), first):
            linear.precision = LinearPrecision.parse(formats[i % len(formats)])

    def note(*what: Any) -> None:
        told.append(what)
        coded.append(sum(len(linear.codes) > 0 for linear in parts.linears.values()))

    def step(i: int) -> None:
        result = stepper.step(loader.batch((i - 1) * size), i)
        note(result.loss, result.grad_norm)

    plan(0)
    step(1)
    note(stepper.evaluate(loader.batch(0), 2))
    step(2)
    run_pass = stepper.pass_runner(loader.batch(2 * size), 3)
    stats = parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, 3, updates=False)
    note(float(stats.values.sum()))
    step(3)
    note(stepper.bf16_loss(loader.batch(0), 4))
    plan(1)
    note(stepper.trial_runner(loader.batch(0), 4)())
    step(4)
    loader.close()
    return {"told": told, "coded": coded, "tensors": {n: local_of(t).clone() for n, t in parts.tensors().items()}}
