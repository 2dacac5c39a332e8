"""A small Llama trained on real text, with outlier channels planted.

A tiny plain model hardly notices FP4.  Outliers are planted without changing the function: a norm's weight
(and up_proj's rows) times a factor for a few channels, the next linears' columns divided by it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_snip import runtime
from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDatasetBuilder
from megatron_snip.errors import UserError
from megatron_snip.model.initial import standard_deviation
from megatron_snip.parallel.tags import tags_of
from megatron_snip.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megatron_snip.train.setup import Parts, build, check

OPTIONS = {
    "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 640, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 256, "untie_embeddings_and_output_weights": True, "micro_batch_size": 8, "global_batch_size": 8,
    "lr": 2e-3, "min_lr": 2e-4, "lr_warmup_iters": 20, "adam_beta2": 0.95, "weight_decay": 0.1, "train_iters": 300,
}  # fmt: skip
PLANTED_CHANNELS = 4
#: Where outliers stand, as (block, place): a quarter of the linears' FLOPs reads them.  Place 0 is the norm before
#: attention, 1 the norm before the SwiGLU, 2 up_proj's rows.
PLANTED = ((0, 2), (1, 0), (2, 1), (3, 0))
TEXT = ("torch", "distributed")


def write_bytes_of(prefix: Path, package: str, folder: str, limit: int) -> None:
    """Write a package's sources as an indexed dataset, one byte per token.  The text does not depend on the Python.

    It leaves out tests, and takes the first 64 KiB of each file, until it has ``limit`` bytes.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise UserError(f"package {package!r} of the setting's text is not installed; install the dev extra")
    root, total = Path(found.origin).parent / folder, 0
    with IndexedDatasetBuilder(prefix, np.uint8) as builder:
        for path in sorted(root.rglob("*.py")):
            data = path.read_bytes()[: 1 << 16]
            if "tests" not in path.relative_to(root).parts:
                builder.add_document(np.frombuffer(data, np.uint8))
                total += len(data)
            if total > limit:
                break


def make_parts(
    folder: Path, text: tuple[str, str] = TEXT, limit: int = 3_000_000, **options: Any
) -> tuple[Config, Parts]:
    """A run over bytes of a package's sources (package, folder in it), in this process."""
    prefix = folder / "bytes"
    if not prefix.with_suffix(".idx").is_file():
        write_bytes_of(prefix, *text, limit)
    config, plan = check(Config().replace(**{**OPTIONS, "data_path": (str(prefix),), **options}), 1)
    parts = build(config, runtime.start("gloo", 1.0), plan, draw=False)
    draw_measured_weights(config, parts)
    return config, parts


@torch.no_grad()
def draw_measured_weights(config: Config, parts: Parts) -> None:
    """Draw the initial weights of the models in docs/evidence.md and docs/numerics.md.

    Training drew them like this until 2026-11-22: with torch's normal deviates, from one generator per parameter.  With
    other weights, the published figures would be others.
    """
    tags = tags_of(*parts.stages.values())
    for name, parameter in parts.optimizer.parameters.items():
        if tags[name].kind == "norm":
            parameter.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(runtime.seed_of(config.training.seed, name.removesuffix(".weight")))
        std = standard_deviation(tags[name], config.model)
        parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))


def train(config: Config, parts: Parts, first: int, last: int) -> float:
    """Train the iterations from first to last.  Returns the loss of the last."""
    loss = float("nan")
    for i in range(first, last + 1):
        loss = parts.stepper.step(parts.train_loader.batch((i - 1) * config.training.global_batch_size), i).loss
    return loss


@torch.no_grad()
def plant(parts: Parts, seed: int = 0, places: Sequence[Sequence[int]] = PLANTED) -> None:
    """Plant outliers: multiply a few channels by 8 to 60, and divide the weights that read them by the same."""
    draw = np.random.RandomState(seed)
    (stage,) = parts.stages.values()
    for index, place in places:
        block = stage.blocks()[index]
        attention, mlp = block.self_attn, block.mlp
        weight, nexts = (
            (block.input_layernorm.weight, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (block.post_attention_layernorm.weight, [mlp.gate_proj, mlp.up_proj]),
            (mlp.up_proj.weight, [mlp.down_proj]),
        )[place]
        channels = torch.from_numpy(draw.choice(len(weight), PLANTED_CHANNELS, replace=False))
        factors = torch.from_numpy(np.exp(draw.uniform(np.log(8), np.log(60), PLANTED_CHANNELS))).float()
        weight[channels] *= factors if weight.ndim == 1 else factors[:, None]
        for linear in nexts:
            linear.weight[:, channels] /= factors


def linears_of(parts: Parts) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """The quantisable linears by name."""
    (stage,) = parts.stages.values()
    return stage.linears()


class State:
    """A copy of weights and moments, for this run or another of the same model."""

    def __init__(self, parts: Parts) -> None:
        self.steps = parts.optimizer.steps
        self.tensors = {name: tensor.clone() for name, tensor in parts.tensors().items()}

    @torch.no_grad()
    def restore(self, parts: Parts) -> None:
        """Write the copy into a run."""
        for name, tensor in parts.tensors().items():
            tensor.copy_(self.tensors[name])
        parts.optimizer.set_steps(self.steps)
