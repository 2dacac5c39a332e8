"""What the tests of --fp8-param-gather run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.model.llama import Block
from megatron_snip.parallel.data import local_of
from megatron_snip.quant import LinearPrecision
from megatron_snip.train.preflight import preflight
from megatron_snip.train.setup import Parts
from tests.dist.helpers.runs import make


def _plan(parts: Parts, formats: tuple[str, ...], first: int = 0) -> None:
    for i, linear in enumerate(parts.linears.values(), first):
        linear.precision = LinearPrecision.parse(formats[i % len(formats)])


def _state(parts: Parts) -> dict[str, Any]:
    return {name: local_of(tensor).clone() for name, tensor in parts.tensors().items()}


def trained(options: dict[str, Any], formats: tuple[str, ...], probed: bool) -> dict[str, Any]:
    """Train with a validation, a probe, a trial's pass and a change of plan in between.

    What each event told, how many linears had gathered codes in it, and this rank's weights and moments.
    """
    config, parts = make({"num_layers": 2, "precision": "snip", "bf16": True, **options})
    assert parts.coordinator is not None
    loader, size, stepper, told, coded = parts.train_loader, config.training.global_batch_size, parts.stepper, [], []

    def note(*what: Any) -> None:
        told.append(what)
        coded.append(sum(len(linear.codes) > 0 for linear in parts.linears.values()))

    def step(i: int) -> None:
        result = stepper.step(loader.batch((i - 1) * size), i)
        note(result.loss, result.grad_norm)

    _plan(parts, formats)
    step(1)
    note(stepper.evaluate(loader.batch(0), 2))
    if probed:
        run_pass = stepper.pass_runner(loader.batch(size), 2)
        stats = parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, 2, updates=False)
        note(stats.values.tolist())
    step(2)
    note(stepper.bf16_loss(loader.batch(0), 3))
    _plan(parts, formats, 1)
    note(stepper.trial_runner(loader.batch(0), 3)().tolist())
    step(3)
    loader.close()
    gathers = stepper.pipeline.gathers
    more = [LinearPrecision.parse(name) for name in ("nvfp4_4over6", "fp4/fp8_rowwise/fp8")]
    told_of = {name: [linear.precision, *more] for name, linear in parts.linears.items()}
    lines = gathers.told(told_of) if gathers else []
    return {"told": told, "coded": coded, "tensors": _state(parts), "lines": lines}


def with_and_without(
    options: dict[str, Any], formats: tuple[str, ...], probed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`trained` with codes gathered and without.  Blocks are compiled without a backend, which would take minutes."""
    plain = Block.compile_run
    Block.compile_run = lambda self: plain(self, "aot_eager")  # type: ignore[method-assign]
    return trained({**options, "fp8_param_gather": True}, formats, probed), trained(options, formats, probed)


def resumed(options: dict[str, Any], formats: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """Train two iterations, save, train a third: its state, and that of a run with codes that loads the checkpoint."""
    found = []
    for more in ({}, {"fp8_param_gather": True}):
        config, parts = make({"num_layers": 2, "precision": "fp8", "bf16": True, **options, **more})
        _plan(parts, formats)
        loader, size = parts.train_loader, config.training.global_batch_size
        if more:
            load_tensors(folder, 2, parts.tensors())
            parts.optimizer.set_steps(2)
        else:
            for i in (1, 2):
                parts.stepper.step(loader.batch((i - 1) * size), i)
            saver = Saver(folder, config.checkpoint, parts.mesh, "0123456789abcdef", 0)
            saver.save(2, parts.tensors(), {"steps": 2}, finite=True, last=True)
            saver.close()
        loss = parts.stepper.step(loader.batch(2 * size), 3).loss
        loader.close()
        found.append({"loss": loss, **_state(parts)})
    return found


def after_a_preflight(options: dict[str, Any]) -> list[list[float]]:
    """Losses of an iteration in BF16 and one in FP8 behind a preflight without a probe, without codes and with."""
    found = []
    for more in ({}, {"fp8_param_gather": True}):
        config, parts = make(
            {"num_layers": 2, "precision": "snip", "snip_objective": "layer_id", "bf16": True, **options, **more}
        )
        preflight(config, parts)
        losses = []
        for i, precision in ((1, "bf16"), (2, "fp8")):
            _plan(parts, (precision,))
            batch = parts.train_loader.batch((i - 1) * config.training.global_batch_size)
            losses.append(parts.stepper.step(batch, i).loss)
        parts.train_loader.close()
        found.append(losses)
    return found
