"""Llama, cut into pipeline stages.  Source: arXiv 2302.13971, 2307.09288, 2407.21783 (RoPE scaling).

Parameters are named as Hugging Face names them, with the global layer index whatever the cut, so that a
plan and a checkpoint mean the same on every layout.  Weights are made on the meta device; `LlamaStage.allocate` gives
them memory once they are sharded, and `model.initial` or a checkpoint their values.
Shapes: B sequences, S tokens, H hidden, A query heads, G key/value heads, D channels of a head, F width of
the SwiGLU, V padded vocabulary; under tp the local A, G, F and V are a tp-th of the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_snip.config import ModelConfig
from megatron_snip.mesh import Mesh
from megatron_snip.model.recompute import NOTHING, Recompute, run_again
from megatron_snip.model.swiglu import swiglu
from megatron_snip.parallel.loss import vocab_parallel_cross_entropy
from megatron_snip.parallel.tensor import (
    ColumnParallelLinear,
    Region,
    RowParallelLinear,
    VocabParallelEmbedding,
    linears_of_one_input,
    local,
    make_parameter,
)
from megatron_snip.quant import LinearCall, LinearPrecision, LinearShape, RoundingKey, wide_linear
from megatron_snip.quant.linear_op import pack_key

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
#: Linears of these kinds leave the tensor parallel region: tp cuts their input channels, the others' output channels.
ROW_PARALLEL = ("o", "down")


#: Module of a linear in its block -> (kind, what it reads).
_PLACES = {
    **{f"self_attn.{kind}_proj": (kind, "attention norm") for kind in "qkv"},
    "self_attn.o_proj": ("o", "attention"),
    **{f"mlp.{kind}_proj": (kind, "mlp norm") for kind in ("gate", "up")},
    "mlp.down_proj": ("down", "activation"),
}


def linear_names(num_layers: int) -> list[str]:
    """Names of all quantisable linears, in order."""
    return [f"layers.{block}.{module}" for block in range(num_layers) for module in _PLACES]


def linear_place(name: str) -> tuple[int, str, str] | None:
    """(block, kind, what it reads) of a quantisable linear by its name; None for other names.

    A block has at most four digits, so that no file can ask for a picture of 10^9 blocks; --num-layers keeps to it.
    """
    layers, block, module = [*name.split(".", 2), "", ""][:3]
    if layers != "layers" or not re.fullmatch(r"[0-9]{1,4}", block) or module not in _PLACES:
        return None
    kind, reads = _PLACES[module]
    return int(block), kind, f"{block}: {reads}"


def linear_shapes(m: ModelConfig) -> list[LinearShape]:
    """Every quantisable linear of the whole model, in order, all on stage 0."""
    q, kv = m.num_attention_heads * m.head_dim, m.query_groups * m.head_dim
    h, f = m.hidden_size, m.ffn_hidden_size
    sizes = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q), "gate": (f, h), "up": (f, h), "down": (h, f)}
    shapes = []
    for name in linear_names(m.num_layers):
        place = linear_place(name)
        assert place is not None
        block, kind, reads = place
        shapes.append(LinearShape(name, *sizes[kind], block=block, kind=kind, reads=reads))
    return shapes


@dataclass(frozen=True)
class Build:
    """What every part of the model is built with."""

    model: ModelConfig
    mesh: Mesh
    region: Region
    seed: int
    dtype: torch.dtype  # of the compute, not of the parameters
    device: torch.device
    recompute: Recompute = NOTHING

    @cached_property
    def shapes(self) -> dict[str, LinearShape]:
        """The quantisable linears of the whole model by name."""
        return {shape.name: shape for shape in linear_shapes(self.model)}

    def empty(self, *shape: int) -> Tensor:
        """A weight [...] without memory, which `LlamaStage.allocate` gives to what is left of it after sharding."""
        return torch.empty(shape, device="meta")

    def linear(self, name: str) -> ColumnParallelLinear | RowParallelLinear:
        """The parallel linear of this name."""
        shape = self.shapes[name]
        weight = self.empty(shape.out_features, shape.in_features)
        module = RowParallelLinear if shape.kind in ROW_PARALLEL else ColumnParallelLinear
        return module(name, weight, self.region, self.mesh.device_mesh)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim; computed in float32.  Source: arXiv 1910.07467."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.epsilon = build.model.norm_epsilon
        weight = build.empty(build.model.hidden_size)
        self.weight = make_parameter(weight, None, build.region.axis, build.mesh.device_mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        weight = local(self.weight)
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.epsilon)


def rotary_frequencies(m: ModelConfig) -> Tensor:
    """Angle per position of each channel pair, [D/2] float32, with Llama 3's scaling if asked."""
    freq = 1.0 / m.rotary_base ** (torch.arange(0, m.head_dim, 2, dtype=torch.float32) / m.head_dim)
    if not m.use_rope_scaling:
        return freq
    original = m.rope_original_max_position_embeddings
    turns = original * freq / (2 * math.pi)  # turns that a channel makes over the original length
    low, high = m.rope_low_freq_factor, m.rope_high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretch fully, 1: leave alone
    return keep * freq + (1 - keep) * freq / m.rope_scaling_factor


def rotary_tables(m: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and channel, [S, D] each."""
    angles = torch.outer(torch.arange(m.seq_length, dtype=torch.float32), rotary_frequencies(m))
    angles = torch.cat([angles, angles], dim=-1).to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-split channel order: x [B, A, S, D], cos and sin [S, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        m = build.model
        self.region, self.head_dim, self.recompute = build.region, m.head_dim, build.recompute.of_part("core_attn")
        self.grouped = m.query_groups != m.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            build.linear(f"{prefix}.{name}") for name in ATTENTION_LINEARS
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, key: RoundingKey | Tensor) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        q, k, v = linears_of_one_input([self.q_proj, self.k_proj, self.v_proj], x, key)
        if self.recompute:
            y = run_again(self.attend, q, k, v, cos, sin, region=self.region)
        else:
            y = self.attend(q, k, v, cos, sin)
        out: Tensor = self.o_proj(y, key)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """q [B, S, A D], k and v [B, S, G D] of whole sequences -> [B, S, A D]."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.grouped
        )
        return y.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).  Source: arXiv 2002.05202."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (build.linear(f"{prefix}.{name}") for name in MLP_LINEARS)

    def forward(self, x: Tensor, key: RoundingKey | Tensor) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        gate, up = linears_of_one_input([self.gate_proj, self.up_proj], x, key)
        out: Tensor = self.down_proj(swiglu(gate, up), key)
        return out


class Block(nn.Module):
    """One Transformer block: attention and SwiGLU, each behind a norm and around a residual."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build)
        self.self_attn = Attention(build, f"layers.{index}.self_attn")
        self.post_attention_layernorm = RMSNorm(build)
        self.mlp = MLP(build, f"layers.{index}.mlp")
        self._compiled: Callable[..., Tensor] | None = None
        self._recompute_mlp, self.region = build.recompute.of_part("mlp"), build.region

    def compile_run(self, backend: str = "inductor") -> None:
        """Compile the block by torch.compile; linears that read the same tensor stay one operator each."""
        # a graph for each: with and without gradients, and which linears have wgrad in bf16
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
        # not ``forward``: FSDP's hooks, and a probe's way past, stay outside
        self._compiled = torch.compile(self._run, backend=backend, fullgraph=True, dynamic=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, key: RoundingKey) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        if self._compiled is not None and not self._observed():
            return self._compiled(x, cos, sin, pack_key(key))
        return self._run(x, cos, sin, key)

    def _observed(self) -> bool:
        """Whether a probe looks, which compiled code would not show anything."""
        attention, mlp = self.self_attn, self.mlp
        linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
                   mlp.gate_proj, mlp.up_proj, mlp.down_proj)  # fmt: skip
        return attention.region.wide or any(linear.observer is not None for linear in linears)

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor, key: RoundingKey | Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, key)
        normed = self.post_attention_layernorm(x)
        y = run_again(self.mlp, normed, key, region=self.region) if self._recompute_mlp else self.mlp(normed, key)
        out: Tensor = x + y
        return out


class OutputLayer(nn.Module):
    """The weight [V, H] that turns the residual stream into logits; its rows are split over tp."""

    def __init__(self, build: Build, shape: tuple[int, int]) -> None:
        super().__init__()
        self.region, weight = build.region, build.empty(*shape)
        self.weight = make_parameter(weight, 0, build.region.axis, build.mesh.device_mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> logits [B, S, V/tp] in the compute dtype."""
        return _logits(x, local(self.weight), wide=self.region.wide)


def _logits(x: Tensor, weight: Tensor, *, wide: bool) -> Tensor:
    """x [B, S, H] by weight [V/tp, H]: [B, S, V/tp]; wide: each sum rounded to float32 once."""
    if not wide:
        return F.linear(x, weight.to(x.dtype))
    call = LinearCall(LinearPrecision.uniform("bf16"), key=None)
    return wide_linear(x.flatten(0, 1), weight, call, torch.float32).unflatten(0, x.shape[:2])


class _ContiguousGrad(torch.autograd.Function):
    """Identity whose gradient is contiguous: pipeline communication sends the raw memory."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class LlamaStage(nn.Module):
    """The blocks of one pipeline stage, with the embedding before the first and the loss after the last."""

    cos: Tensor
    sin: Tensor

    def __init__(self, build: Build, layers: range, *, first: bool, last: bool, tied: bool):
        super().__init__()
        m = build.model
        self.build, self.iteration = build, 0
        self.loss_tokens = 1  # tokens of the global batch, by which the loss is divided
        vocab = (m.padded_vocab_size, m.hidden_size)
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.norm: RMSNorm | None = None
        self.lm_head: OutputLayer | None = None
        if first:
            weight = build.empty(*vocab)
            self.embed_tokens = VocabParallelEmbedding(weight, build.region, build.mesh.device_mesh, build.dtype)
        self.layers = nn.ModuleDict({str(i): Block(build, i) for i in layers})
        if last:
            self.norm = RMSNorm(build)
            if not tied:
                self.lm_head = OutputLayer(build, vocab)
        self.last = last
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(0, device="meta"), persistent=False)

    def allocate(self) -> None:
        """Give this process's parts of the parameters memory, not values, and make the rotary tables."""
        self.to_empty(device=self.build.device)
        self.cos, self.sin = rotary_tables(self.build.model, self.build.dtype, self.build.device)

    def blocks(self) -> dict[int, Block]:
        """The blocks of this stage by their number in the whole model."""
        return {int(index): block for index, block in self.layers.items() if isinstance(block, Block)}

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What block ``index`` makes of q [T, A D], k and v [T, G D] of whole sequences: [T, A D]."""
        q, k, v = (x.unflatten(0, (-1, self.build.model.seq_length)) for x in (q, k, v))
        return self.blocks()[index].self_attn.attend(q, k, v, self.cos, self.sin).flatten(0, 1)

    def linears(self) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
        """The quantisable linears of this stage by name, in order."""
        kinds = (ColumnParallelLinear, RowParallelLinear)
        return {module.name: module for module in self.modules() if isinstance(module, kinds)}

    def hidden(self, x: Tensor, sample_index: Tensor) -> Tensor:
        """Tokens [B, S] (first stage) or residual stream [B, S/tp or S, H] -> residual stream.

        sample_index [B], on the CPU, holds the global, consecutive numbers of the sequences.
        """
        row0 = int(sample_index[0]) * self.build.model.seq_length
        key = RoundingKey(self.build.seed, self.iteration, stream=0, row0=row0, col0=0)
        x = self.embed_tokens(x) if self.embed_tokens is not None else _ContiguousGrad.apply(x)
        blocks = list(self.layers.values())

        def run(x: Tensor, members: range) -> Tensor:
            for i in members:
                x = blocks[i](x, self.cos, self.sin, key)
            return x

        for members, again in self.build.recompute.runs(len(blocks)):
            x = run_again(run, x, members, region=self.build.region) if again else run(x, members)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream after the last block -> logits [B, S, V/tp] in the compute dtype."""
        assert self.norm is not None, "only the last stage has logits"
        x = self.build.region.enter(self.norm(x))
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(x)
            return logits
        assert self.embed_tokens is not None
        return _logits(x, local(self.embed_tokens.weight), wide=self.build.region.wide)

    def forward(self, x: Tensor, sample_index: Tensor, labels: Tensor | None = None) -> Tensor:
        """The residual stream [B, S/tp or S, H], or on the last stage this microbatch's loss [1].

        labels [B, S] are needed on the last stage; its loss is the sum over tokens divided by the number
        of tokens of the whole global batch, so gradients add up over microbatches and processes.
        """
        x = self.hidden(x, sample_index)
        if not self.last:
            return x.clone()  # the schedule detaches its outputs in place, and a view cannot be
        return self._loss(self.logits(x), labels)

    def _loss(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        """This microbatch's share [1] of the loss: logits [B, S, V/tp], labels [B, S]."""
        assert labels is not None, "the last stage needs labels"
        region = self.build.region
        losses = vocab_parallel_cross_entropy(logits.flatten(0, 1), labels.flatten(), region.axis, wide=region.wide)
        return (losses.sum() / self.loss_tokens).reshape(1).clone()


def build_stages(build: Build, *, num_stages: int, tied: bool, of: Callable[[int], bool]) -> dict[int, LlamaStage]:
    """The stages s with `of(s)` true, by their number; blocks are dealt out evenly in order."""
    each = build.model.num_layers // num_stages
    return {
        s: LlamaStage(
            build,
            range(s * each, (s + 1) * each),
            first=s == 0,
            last=s == num_stages - 1,
            tied=tied,
        )
        for s in range(num_stages)
        if of(s)
    }
