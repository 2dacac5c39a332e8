"""What the distributed tests run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.footprint import Layout, footprint
from megatron_snip import runtime
from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import CheckedWriter, load_tensors
from megatron_snip.config import Config
from megatron_snip.mesh import build_mesh
from megatron_snip.parallel.data import local_of
from megatron_snip.parallel.tags import tags_of
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.measure import linear_probe
from megatron_snip.snip.measure.linear_probe import LinearProbe
from megatron_snip.snip.measure.probe import PassRunner, ProbeFailed
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.setup import Parts, build, check, snip_shapes

TINY = {
    "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 512, "untie_embeddings_and_output_weights": True, "micro_batch_size": 1,
    "global_batch_size": 4, "train_iters": 20, "lr": 2e-3, "lr_warmup_iters": 4, "mock_data": True,
    "snip_probe_tokens": 1, "snip_trial_tokens": 256,  # trials of 8192 tokens would take longer than all else
}  # fmt: skip
#: Options of each kind of model over TINY's.
MODELS = {
    "llama": {},
    # at TINY's learning rate one unit in the last place of the norms comes to 0.15 nats within 20 iterations
    "qwen3": {"model_name": "qwen3", "num_query_groups": 2, "kv_channels": 128, "lr": 1e-3},
}
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2 without sequence parallel": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2 interleaved": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "pp2 unequal": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3},
    "tp2 x pp2 interleaved": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True,
        "num_layers_per_virtual_pipeline_stage": 1,
    },
    "dp2": {},
    "tp2 x dp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2 x dp2": {"pipeline_model_parallel_size": 2},
    "tp2 x pp2 x dp2": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True
    },
}  # fmt: skip
DATA_PARALLEL = {"dp2": 2, "tp2 x dp2": 2, "pp2 x dp2": 2, "tp2 x pp2 x dp2": 2}


def world_of(layout: str) -> int:
    """Processes of a layout."""
    config = Config().replace(**LAYOUTS[layout])
    return config.model_parallel_size * DATA_PARALLEL.get(layout, 1)


def make(options: dict[str, Any]) -> tuple[Config, Parts]:
    """The parts of a run, on the ranks that are here."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config, plan = check(Config().replace(**{**TINY, **options}), world)
    return config, build(config, runtime.start("gloo", 1.0), plan)


def mixed_plan(path: Path, **options: Any) -> Path:
    """A plan file with FP4 and FP8 side by side, GEMM by GEMM too."""
    cycle = ["fp4", "fp8", "fp4/fp8/fp4", "fp8/fp4/fp8", "fp4"]
    shapes = snip_shapes(Config().replace(**{**TINY, **options}))
    Plan.by_hand({s.name: LinearPrecision.parse(cycle[i % 5]) for i, s in enumerate(shapes)}, shapes).save(path)
    return path


def losses(options: dict[str, Any], *, nudge: int | None = None, iterations: int = 20) -> dict[str, Any]:
    """Train: the losses, and after the first iteration's backward the loss and the whole gradients.

    nudge: before training, move the norms' weights, which no rounding hides, one unit in the last place up or down, as
    this seed draws it.
    """
    config, parts = make(options)
    if nudge is not None:
        draw = torch.Generator().manual_seed(nudge)
        tags = tags_of(*parts.stages.values())
        for name, parameter in parts.optimizer.parameters.items():
            if tags[name].kind == "norm":
                up = torch.randint(2, parameter.shape, generator=draw).bool()
                parameter.detach().copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf)))
    size = config.training.global_batch_size
    batch = parts.train_loader.batch(0)
    first, _ = parts.stepper.gradients(batch, 1)
    gradients = {name: _whole(p.grad) for name, p in parts.optimizer.parameters.items()}
    parts.optimizer.zero_grad()
    out = [parts.stepper.step(parts.train_loader.batch((i - 1) * size), i).loss for i in range(1, iterations + 1)]
    parts.train_loader.close()
    return {"losses": out, "first": first, "gradients": gradients}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def save_after(options: dict[str, Any], folder: Path, iterations: int) -> None:
    """Train some iterations and save a checkpoint."""
    config, parts = make(options)
    for i in range(1, iterations + 1):
        batch = parts.train_loader.batch((i - 1) * config.training.global_batch_size)
        parts.stepper.step(batch, i)
    parts.train_loader.close()
    saver = Saver(folder, config.checkpoint, parts.mesh, "0123456789abcdef", 0)
    saver.save(iterations, parts.tensors(), {"steps": parts.optimizer.steps}, finite=True, last=True)
    saver.close()


def _before_probe(options: dict[str, Any], folder: Path, iterations: int) -> tuple[Parts, PassRunner]:
    """A run that loads a checkpoint and may probe before the next iteration, and what its passes run with."""
    config, parts = make({**options, "precision": "snip", "snip_start": iterations + 1, "snip_apply_lag": 0})
    load_tensors(folder, iterations, parts.tensors())
    parts.optimizer.set_steps(iterations)
    batch = parts.train_loader.batch(iterations * config.training.global_batch_size)
    parts.train_loader.close()
    return parts, parts.stepper.pass_runner(batch, iterations + 1)


def plan_from(options: dict[str, Any], folder: Path, iterations: int) -> dict[str, Any]:
    """Load a checkpoint, probe, solve: the statistics, the plan's hash, and the precision it set."""
    parts, run_pass = _before_probe(options, folder, iterations)
    assert parts.coordinator is not None
    seen = []
    run = parts.coordinator.probe.run
    parts.coordinator.probe.run = lambda *args, **more: seen.append(run(*args, **more)) or seen[-1]
    metrics = parts.coordinator.before_step(iterations + 1, run_pass, parts.optimizer.zero_grad)
    return {
        "stats": seen[0],
        "hash": metrics["snip/plan_hash"],
        "precision": {name: str(linear.precision) for name, linear in parts.linears.items()},
    }


def statistics(options: dict[str, Any], folder: Path, iterations: int, rows: int | None = None) -> Statistics:
    """Load a checkpoint and probe; rows: enough of them for wgrad's error."""
    if rows is not None:
        linear_probe.ENOUGH_ROWS = rows
    parts, run_pass = _before_probe(options, folder, iterations)
    assert parts.coordinator is not None
    return parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, iterations + 1)


def trace(
    options: dict[str, Any], iterations: int, probed: set[int], failing: str = "", rank: int = 0, updates: bool = True
) -> dict[str, Any]:
    """Train in mixed precision with probes before some iterations: what was told, and what is left.

    failing: the method of LinearProbe that fails on a rank.
    """
    config, parts = make({**options, "precision": "snip"})
    assert parts.coordinator is not None
    for i, linear in enumerate(parts.linears.values()):
        linear.precision = LinearPrecision.parse(["fp4", "fp8/fp4/bf16"][i % 2])
    if failing and dist.get_rank() == rank:
        break_probes(failing)
    told, errors = [], []
    for i in range(1, iterations + 1):
        batch = parts.train_loader.batch((i - 1) * config.training.global_batch_size)
        if i in probed:
            try:
                run_pass = parts.stepper.pass_runner(batch, i)
                parts.coordinator.probe.run(run_pass, parts.optimizer.zero_grad, i, updates=updates)
            except ProbeFailed as error:
                errors.append(str(error))
        result = parts.stepper.step(batch, i)
        told.append((result.loss, result.grad_norm, result.skipped))
    parts.train_loader.close()
    tensors = {name: local_of(tensor) for name, tensor in parts.tensors().items()}
    return {"told": told, "tensors": tensors, "errors": errors}


def break_probes(method: str) -> None:
    """Let a method of LinearProbe fail in every call but the first of a probe."""
    plain, seen = getattr(LinearProbe, method), []

    def failing(self: LinearProbe, *args: Any, **more: Any) -> Any:
        seen.append(None)
        if len(seen) > 1:
            raise torch.OutOfMemoryError("no memory left")
        return plain(self, *args, **more)

    setattr(LinearProbe, method, failing)


def memory_and_timeouts(options: dict[str, Any]) -> dict[str, Any]:
    """Bytes that each parameter's shard keeps alive beyond its own, and the axes' time-outs in seconds."""
    _, parts = make({**options, "distributed_timeout_minutes": 3.0})
    parts.train_loader.close()
    surplus = {}
    for name, p in parts.optimizer.parameters.items():
        shard = p.to_local() if isinstance(p, DTensor) else p
        surplus[name] = shard.untyped_storage().nbytes() - shard.numel() * shard.element_size()
    axes = {name: getattr(parts.mesh, name).group for name in ("pp", "dp", "tp")}
    device = torch.device("cpu")
    return {
        "surplus": surplus,
        "timeouts": {n: g._get_backend(device).options._timeout.total_seconds() for n, g in axes.items()},
    }


def connections() -> list[tuple[str, int]]:
    """What this rank of one pipeline exchanges while the mesh is built: ("send" or "recv", with which rank)."""
    seen: list[tuple[str, int]] = []
    send, recv, reduce = dist.send, dist.recv, dist.all_reduce

    def sending(tensor: torch.Tensor, *, group_dst: int, group: Any) -> None:
        seen.append(("send", group_dst))
        send(tensor, group_dst=group_dst, group=group)

    def receiving(tensor: torch.Tensor, *, group_src: int, group: Any) -> None:
        seen.append(("recv", group_src))
        recv(tensor, group_src=group_src, group=group)

    def reducing(tensor: torch.Tensor, *, group: Any) -> None:
        seen.append(("all", dist.get_world_size(group)))
        reduce(tensor, group=group)

    dist.send, dist.recv, dist.all_reduce = sending, receiving, reducing  # type: ignore[assignment]
    build_mesh("cpu", pp=dist.get_world_size(), dp=1, tp=1)
    return seen


def disagreement(what: str) -> str:
    """What `agree_on` says when rank 1 sees another checkpoint or plan, or has other options; "" for agreement."""
    from megatron_snip.train.run.run_folder import Start
    from megatron_snip.train.setup import agree_on

    odd = dist.get_rank() == 1
    config = Config().replace(lr=0.5 if odd and what == "options" else 0.25, load="somewhere")
    iteration = 4 if odd and what == "checkpoint" else 6
    own = tempfile.TemporaryDirectory()
    if what == "plan":
        os.chdir(own.name)
        Path("plan.json").write_text(str(dist.get_rank()))
        config = config.replace(memory_plan="plan.json")
    try:
        agreed = agree_on(config, Start(iteration, None, None, iteration, f"id of rank {dist.get_rank()}"))
    except ValueError as error:
        return str(error)
    assert agreed.run_id == "id of rank 0"
    return ""


def train_run(options: dict[str, Any]) -> None:
    """A whole run of the program."""
    from megatron_snip.train import loop

    loop.train(Config().replace(**{**TINY, **options}))


def counted_probe(options: dict[str, Any]) -> dict[str, Any]:
    """Bytes that a probe holds in wgrad's errors, and that it hands to all-reduces beside an iteration, by axis."""
    config, parts = make({**options, "precision": "snip"})
    assert parts.coordinator is not None
    run_pass, probe = parts.stepper.pass_runner(parts.train_loader.batch(0), 1), parts.coordinator.probe
    axes = {getattr(parts.mesh, name).group: name for name in ("tp", "dp", "pp")}
    sent: Counter[str] = Counter()
    plain = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        sent[axes.get(more.get("group"), "world")] += tensor.numel() * tensor.element_size()
        return plain(tensor, *args, **more)

    held: list[int] = []
    add = LinearProbe.add_updates

    def holding(self: LinearProbe, *args: Any) -> None:
        held.append(sum(error.nbytes for error in self.weight_error.values()))
        add(self, *args)

    dist.all_reduce, LinearProbe.add_updates = counting, holding  # type: ignore[method-assign]
    probe.run(run_pass, parts.optimizer.zero_grad, 1)
    both = dict(sent)
    sent.clear()
    run_pass()
    parts.train_loader.close()
    shapes = parts.coordinator.shapes
    dp, tokens = parts.mesh.dp.size, config.model.seq_length
    layout = Layout(parts.mesh.tp.size, dp, tokens, config.num_microbatches(dp))
    return {
        "held": sum(held),
        "sent": {axis: both.get(axis, 0) - sent.get(axis, 0) for axis in ("tp", "dp", "pp")},
        "expected": footprint(shapes, len(probe.formats), layout, updates=True),
    }


def error_of_run(options: dict[str, Any]) -> str:
    """What the program says of bad input; empty if it runs to its end."""
    try:
        train_run(options)
    except ValueError as error:
        return str(error)
    return ""


def run_with_full_disk(options: dict[str, Any], rank: int, saves: set[int]) -> list[str]:
    """The program, the rank's disk being full in some of its saves, counted from 1; what it warned of on this rank."""
    import logging

    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_snip").addHandler(handler)
    write, calls = CheckedWriter.write_data, [0]

    def full(self: CheckedWriter, *args: Any) -> Any:
        calls[0] += 1
        if dist.get_rank() == rank and calls[0] in saves:
            raise OSError(28, "No space left on device")
        return write(self, *args)

    CheckedWriter.write_data = full  # type: ignore[method-assign]
    train_run(options)
    return [line for line in told if "failed on rank" in line]
