"""A small Llama trained on real text, with outlier channels planted, and the truth that predictions face.

A tiny plain model hardly notices FP4.  Outliers are planted without changing the function: a norm's weight
(and up_proj's rows) times a factor for a few channels, the next linears' columns divided by it.
"""

from __future__ import annotations

import sysconfig
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDatasetBuilder
from megatron_snip.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megatron_snip.quant import LinearPrecision, fake_quantize
from megatron_snip.snip.divergence import loss_divergence, own_divergence, prop_divergence
from megatron_snip.snip.probes import adam_update
from megatron_snip.train.setup import Parts, build, check

OPTIONS = {
    "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 640, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 256, "untie_embeddings_and_output_weights": True, "micro_batch_size": 8, "global_batch_size": 8,
    "lr": 2e-3, "min_lr": 2e-4, "lr_warmup_iters": 20, "adam_beta2": 0.95, "weight_decay": 0.1, "train_iters": 200,
}  # fmt: skip
PLANTED_CHANNELS = 4
ITERATIONS = 120
FP4 = [LinearPrecision.uniform("fp4")]


def write_bytes_of_stdlib(prefix: Path, limit: int) -> None:
    """CPython's own sources, one byte a token, as an indexed dataset."""
    with IndexedDatasetBuilder(prefix, np.uint8) as builder:
        total = 0
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            data = path.read_bytes()[: 1 << 16]
            builder.add_document(np.frombuffer(data, np.uint8))
            total += len(data)
            if total > limit:
                break


def make_parts(folder: Path, **options: Any) -> tuple[Config, Parts]:
    """A run over the bytes of the standard library, in this process."""
    prefix = folder / "bytes"
    if not prefix.with_suffix(".idx").is_file():
        write_bytes_of_stdlib(prefix, 3_000_000)
    config, plan = check(Config().replace(**{**OPTIONS, "data_path": (str(prefix),), **options}), 1)
    return config, build(config, runtime.start("gloo", 1.0), plan)


def train(config: Config, parts: Parts, first: int, last: int) -> float:
    """Iterations first..last; the last one's loss."""
    loss = float("nan")
    for i in range(first, last + 1):
        loss = parts.stepper.step(parts.train_loader.batch((i - 1) * config.training.global_batch_size), i).loss
    return loss


@torch.no_grad()
def plant(parts: Parts, seed: int = 0) -> None:
    """Plant outliers in every block: factors of 8 to 60 in a few channels of both norms and of up_proj."""
    draw = np.random.RandomState(seed)
    (stage,) = parts.stages.values()
    for block in stage.layers.values():
        attention, mlp = block.self_attn, block.mlp
        after_input = [attention.q_proj, attention.k_proj, attention.v_proj]
        after_attention = [mlp.gate_proj, mlp.up_proj]
        for weight, nexts in (
            (block.input_layernorm.weight, after_input),
            (block.post_attention_layernorm.weight, after_attention),
            (mlp.up_proj.weight, [mlp.down_proj]),
        ):
            channels = torch.from_numpy(draw.choice(len(weight), PLANTED_CHANNELS, replace=False))
            factors = torch.from_numpy(np.exp(draw.uniform(np.log(8), np.log(60), PLANTED_CHANNELS))).float()
            weight[channels] *= factors if weight.ndim == 1 else factors[:, None]
            for linear in nexts:
                linear.weight[:, channels] /= factors


def linears_of(parts: Parts) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """The quantisable linears by name."""
    (stage,) = parts.stages.values()
    return stage.linears()


@contextmanager
def shifted(linear: ColumnParallelLinear | RowParallelLinear, fmt: str, sign: float):
    """Inside, the linear gives Y + sign * dY with dY = Q(X) Q(W)^T - X W^T."""
    plain = type(linear)._local_linear

    def forward(x: Tensor, key: Any, casts: Any = None) -> Tensor:
        y = plain(linear, x, key)
        flat, w = x.flatten(0, 1), linear.weight
        qx = fake_quantize(flat, fmt, role="input", dim=1)
        qw = fake_quantize(w.detach(), fmt, role="weight", dim=1)
        return y + sign * (qx @ qw.T - flat @ w.T).view_as(y)

    linear._local_linear = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del linear._local_linear


def even_truth(parts: Parts, batches: list[Any], fmt: str) -> dict[str, float]:
    """[L(+dY) + L(-dY)]/2 - L0 of each linear, nats, over batches that gave no statistics."""

    def loss() -> float:
        return float(np.mean([parts.stepper.evaluate(batch, 1) for batch in batches]))

    base, truth = loss(), {}
    for name, linear in linears_of(parts).items():
        both = []
        for sign in (1.0, -1.0):
            with shifted(linear, fmt, sign):
                both.append(loss())
        truth[name] = sum(both) / 2 - base
    return truth


def measure(folder: Path) -> dict[str, Any]:
    """Everything the tests look at, from one trained and planted model in float32 compute."""
    config, parts = make_parts(folder, precision="snip", snip_start=10**6)
    start = parts.stepper.evaluate(parts.train_loader.make(0), 1)
    trained = train(config, parts, 1, ITERATIONS)
    size = config.training.global_batch_size
    batch, *others = (parts.train_loader.make((ITERATIONS + i) * size) for i in range(5))
    plain = parts.stepper.evaluate(others[0], 1)
    plant(parts)
    planted = parts.stepper.evaluate(others[0], 1)
    iteration = ITERATIONS + 1
    stats = parts.coordinator.probe.run(
        parts.stepper.pass_runner(batch, iteration), parts.optimizer.zero_grad, iteration
    )
    names = list(stats.linears)
    truth = even_truth(parts, others, "fp4")
    return {
        "losses": (start, trained, plain, planted),
        "names": names,
        "predicted": loss_divergence(stats, names, FP4)[:, 0],
        "truth": np.array([truth[name] for name in names]),
        "rho": np.sqrt(own_divergence(stats, names, FP4)[:, 0]),
        "rho_true": np.array(update_truth(parts, batch, iteration, names, LinearPrecision("bf16", "bf16", "fp4"))),
        "prop": np.sqrt(prop_divergence(stats, names, FP4)[:, 0]),
        "prop_true": np.array(update_truth(parts, batch, iteration, names, LinearPrecision("bf16", "fp4", "bf16"))),
    }


def update_truth(parts: Parts, batch: Any, iteration: int, names: list[str], precision: LinearPrecision) -> list[float]:
    """|u - u0|_F / U over all linears when one of them alone runs in a precision, by a real backward with it."""
    adam = parts.coordinator.probe.adam

    def updates() -> dict[str, Tensor]:
        parts.stepper.gradients(batch, iteration)
        out = {}
        for name in names:
            m, v = parts.optimizer.moments(f"{name}.weight")
            grad = parts.optimizer.gradient(f"{name}.weight") * clip
            out[name] = adam_update(grad, m, v, parts.optimizer.steps + 1, adam)
        parts.optimizer.zero_grad()
        return out

    def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return float(torch.stack([(a[name] - b[name]).double().square().sum() for name in names]).sum().sqrt())

    clip = parts.stepper.gradients(batch, iteration)[0].clip
    parts.optimizer.zero_grad()
    base = updates()
    whole = distance(base, {name: torch.zeros_like(u) for name, u in base.items()})
    found = []
    for name in names:
        linear = linears_of(parts)[name]
        linear.precision = precision
        found.append(distance(updates(), base) / whole)
        linear.precision = LinearPrecision.uniform("bf16")
    return found
