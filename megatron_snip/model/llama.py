"""Llama, cut into pipeline stages, and the parts that other decoders share.  Source: arXiv 2302.13971, 2307.09288.

Parameters are named as Hugging Face names them, with the global layer index whatever the cut, so that a
plan and a checkpoint mean the same on every layout.  Weights are made on the meta device; `LlamaStage.allocate` gives
them memory once they are sharded, and `model.initial` or a checkpoint their values.
Shapes: B sequences, S tokens, H hidden, A query heads, G key/value heads, D channels of a head, F width of
the SwiGLU, V padded vocabulary; under tp the local A, G, F and V are a tp-th of the whole.  Under context parallelism
S is what a process has of a sequence, a cp-th of it, but for what attention reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_snip.config import ModelConfig
from megatron_snip.mesh import Mesh
from megatron_snip.model.recompute import NOTHING, Recompute, run_again
from megatron_snip.model.rotary import rotary_tables, rotate
from megatron_snip.model.spec import BlockLinear, ModelSpec, register, spec_of
from megatron_snip.parallel.context import causal_attention, gather_sequences, pieces, rows_of
from megatron_snip.parallel.documents import Documents
from megatron_snip.parallel.loss import vocab_parallel_cross_entropy
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.tensor import (
    ColumnParallelLinear,
    Region,
    RowParallelLinear,
    VocabParallelEmbedding,
    linears_of_one_input,
    local,
    make_parameter,
)
from megatron_snip.quant import LinearCall, LinearPrecision, RoundingKey, wide_linear
from megatron_snip.quant.linear_op import pack_key

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


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
    documents: Documents | None = None  # None where their ends mean nothing

    @property
    def spec(self) -> ModelSpec:
        """The kind of model."""
        return spec_of(self.model)

    def empty(self, *shape: int) -> Tensor:
        """A weight [...] without memory, which `LlamaStage.allocate` gives to what is left of it after sharding."""
        return torch.empty(shape, device="meta")

    def linear(self, name: str) -> ColumnParallelLinear | RowParallelLinear:
        """The parallel linear of this name."""
        linear = self.spec.linear_of(name)
        return linear.module(name, self.empty(*linear.size(self.model)), self.region, self.mesh.device_mesh)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim; computed in float32.  Source: arXiv 1910.07467."""

    weight: nn.Parameter

    def __init__(self, build: Build, *, of_heads: bool = False) -> None:
        """of_heads: over the channels of each head of this process, not over the residual stream's."""
        super().__init__()
        self.epsilon = build.model.norm_epsilon
        channels = build.model.head_dim if of_heads else build.model.hidden_size
        parameter = make_parameter(build.empty(channels), None, build.region.axis, build.mesh.device_mesh)
        tags = Tags("norm", None, "always" if of_heads else "sequence_parallel", weight_decay=False)
        add_parameter(self, "weight", parameter, tags)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H], or [..., D] of heads -> the same shape."""
        weight = local(self.weight)
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.epsilon)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        m = build.model
        self.region, self.head_dim, self.recompute = build.region, m.head_dim, build.recompute.of_part("core_attn")
        self.cp, self.pieces = build.mesh.cp, pieces(m.seq_length, build.mesh.cp)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            build.linear(f"{prefix}.{name}") for name in ATTENTION_LINEARS
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, key: RoundingKey | Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        q, k, v = linears_of_one_input([self.q_proj, self.k_proj, self.v_proj], x, key)
        if self.cp.size > 1:  # in one collective
            both = torch.cat([k, v], dim=-1)
            k, v = gather_sequences(both.double() if self.region.wide else both, self.cp).chunk(2, dim=-1)
        if self.recompute or self.region.wide:  # what is wide is not kept
            y = run_again(self.attend, q, k, v, cos, sin, mask, region=self.region)
        else:
            y = self.attend(q, k, v, cos, sin, mask)
        out: Tensor = self.o_proj(y, key)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, S, A D] -> [B, S, A D]; k and v [B, cp S, G D], cos and sin [cp S, D] of whole sequences.

        mask [B, 1, S, S]: which key a query sees; None: all that are not later.
        """
        if self.region.wide:  # so that the order of sums, which the pieces change, does not show
            q, k, v = q.double(), k.double(), v.double()
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        q, k = self.queries_and_keys(q, k)
        k = rotate(k, cos, sin)
        ys = [
            causal_attention(rotate(part, cos[..., piece, :], sin[..., piece, :]), k, v, piece.start, mask)
            for part, piece in zip(q.chunk(len(self.pieces), dim=2), self.pieces, strict=True)
        ]
        y = (ys[0] if len(ys) == 1 else torch.cat(ys, dim=2)).transpose(1, 2).flatten(2)
        return y.float() if self.region.wide else y

    def queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, A, S, D] and k [B, G, S, D] as they are rotated; a place for what other models do to them."""
        return q, k


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).  Source: arXiv 2002.05202."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (build.linear(f"{prefix}.{name}") for name in MLP_LINEARS)

    def forward(self, x: Tensor, key: RoundingKey | Tensor) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        gate, up = linears_of_one_input([self.gate_proj, self.up_proj], x, key)
        out: Tensor = self.down_proj(gate, key, up)
        return out


class Block(nn.Module):
    """One Transformer block: attention and SwiGLU, each behind a norm and around a residual."""

    def __init__(self, build: Build, index: int, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build)
        self.self_attn = attention(build, f"layers.{index}.self_attn")
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, key: RoundingKey, mask: Tensor | None = None) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        if self._compiled is not None and not self._observed():
            return self._compiled(x, cos, sin, pack_key(key), mask)
        return self._run(x, cos, sin, key, mask)

    def _observed(self) -> bool:
        """Whether a probe looks, which compiled code would not show anything."""
        attention, mlp = self.self_attn, self.mlp
        linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
                   mlp.gate_proj, mlp.up_proj, mlp.down_proj)  # fmt: skip
        return attention.region.wide or any(linear.observer is not None for linear in linears)

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor, key: RoundingKey | Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, key, mask)
        normed = self.post_attention_layernorm(x)
        y = run_again(self.mlp, normed, key, region=self.region) if self._recompute_mlp else self.mlp(normed, key)
        out: Tensor = x + y
        return out


class OutputLayer(nn.Module):
    """The weight [V, H] that turns the residual stream into logits, or a copy of the embedding; tp splits its rows."""

    weight: nn.Parameter

    def __init__(self, build: Build, shape: tuple[int, int], *, tied: bool = False) -> None:
        super().__init__()
        self.region = build.region
        parameter = make_parameter(build.empty(*shape), 0, build.region.axis, build.mesh.device_mesh)
        add_parameter(self, "weight", parameter, Tags("embedding" if tied else "output", 0))

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
        self.loss_tokens: int | Tensor = 1  # tokens of the global batch that count, by which the loss is divided
        vocab = (m.padded_vocab_size, m.hidden_size)
        # of the last of several stages the tied output layer: a copy, by whose name it is the first stage's weight
        self.embed_tokens: VocabParallelEmbedding | OutputLayer | None = None
        self.norm: RMSNorm | None = None
        self.lm_head: OutputLayer | None = None
        if first:
            weight = build.empty(*vocab)
            self.embed_tokens = VocabParallelEmbedding(weight, build.region, build.mesh.device_mesh, build.dtype)
        self.layers = nn.ModuleDict({str(i): build.spec.block(build, i) for i in layers})
        if last:
            self.norm = RMSNorm(build)
            if not tied:
                self.lm_head = OutputLayer(build, vocab)
            elif not first:
                self.embed_tokens = OutputLayer(build, vocab, tied=True)
        self.first, self.last = first, last
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(0, device="meta"), persistent=False)

    def allocate(self) -> None:
        """Give this process's parts of the parameters memory, not values, and make the rotary tables."""
        self.to_empty(device=self.build.device)
        self.cos, self.sin = rotary_tables(self.build.model, self.build.dtype, self.build.device)

    def blocks(self) -> dict[int, Block]:
        """The blocks of this stage by their number in the whole model."""
        return {int(index): block for index, block in self.layers.items() if isinstance(block, Block)}

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, row0: int = 0) -> Tensor:
        """What block ``index`` makes of q [T, A D] from row ``row0`` on, k and v [cp T, G D] being whole: [T, A D]."""
        length, cp = self.build.model.seq_length, self.build.mesh.cp.size
        q, k, v = q.unflatten(0, (-1, length // cp)), k.unflatten(0, (-1, length)), v.unflatten(0, (-1, length))
        return self.blocks()[index].self_attn.attend(q, k, v, *self._tables(row0 // length)).flatten(0, 1)

    def _tables(self, sample: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """cos, sin and the attention mask of the microbatch that begins with this sample."""
        documents = self.build.documents
        return (self.cos, self.sin, None) if documents is None else documents.tables(sample, self.cos, self.sin)

    def whole_sequences(self, x: Tensor) -> Tensor:
        """This process's part of sequences [T, C] -> the whole of them [cp T, C]; a collective over cp."""
        cp = self.build.mesh.cp
        return gather_sequences(x.unflatten(0, (-1, self.build.model.seq_length // cp.size)), cp).flatten(0, 1)

    def units(self) -> list[nn.Module]:
        """Parts of this stage that run once each, so that their weights are needed there alone, in forward's order."""
        ends = [module for module in (self.embed_tokens, self.lm_head) if module is not None]
        if self.first and self.last and self.lm_head is None:  # the embedding is needed at both ends
            ends = []
        return [*(end for end in ends if isinstance(end, VocabParallelEmbedding)), *self.layers.values(),
                *(end for end in ends if isinstance(end, OutputLayer))]  # fmt: skip

    def linears(self) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
        """The quantisable linears of this stage by name, in order."""
        kinds = (ColumnParallelLinear, RowParallelLinear)
        return {module.name: module for module in self.modules() if isinstance(module, kinds)}

    def hidden(self, x: Tensor, sample_index: Tensor) -> Tensor:
        """Tokens [B, S] (first stage) or residual stream [B, S/tp or S, H] -> residual stream.

        sample_index [B], on the CPU, holds the global, consecutive numbers of the sequences.
        """
        row0 = int(sample_index[0]) * self.build.model.seq_length
        rows = rows_of(self.build.model.seq_length, self.build.mesh.cp)
        key = RoundingKey(self.build.seed, self.iteration, stream=0, row0=row0, col0=0, rows=rows)
        x = self.embed_tokens(x) if self.first and self.embed_tokens is not None else _ContiguousGrad.apply(x)
        blocks = list(self.layers.values())
        cos, sin, mask = self._tables(int(sample_index[0]))

        def run(x: Tensor, members: range) -> Tensor:
            for i in members:
                x = blocks[i](x, cos, sin, key, mask)
            return x

        for members, again in self.build.recompute.runs(len(blocks)):
            x = run_again(run, x, members, region=self.build.region) if again else run(x, members)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream after the last block -> logits [B, S, V/tp] in the compute dtype."""
        assert self.norm is not None, "only the last stage has logits"
        x = self.build.region.enter(self.norm(x))
        head = self.lm_head or self.embed_tokens
        assert head is not None
        if isinstance(head, OutputLayer):
            logits: Tensor = head(x)
            return logits
        return _logits(x, local(head.weight), wide=self.build.region.wide)

    def forward(self, x: Tensor, sample_index: Tensor, labels: Tensor | None = None) -> Tensor:
        """The residual stream [B, S/tp or S, H], or on the last stage this microbatch's loss [1].

        labels [B, S] are needed on the last stage; its loss is the sum over tokens divided by the number
        of tokens of the whole global batch, so gradients add up over microbatches and processes.
        """
        x = self.hidden(x, sample_index)
        if not self.last:
            return x.clone()  # the schedule detaches its outputs in place, and a view cannot be
        return self._loss(self.logits(x), labels, sample_index)

    def _loss(self, logits: Tensor, labels: Tensor | None, sample_index: Tensor) -> Tensor:
        """This microbatch's share [1] of the loss: logits [B, S, V/tp], labels [B, S]."""
        assert labels is not None, "the last stage needs labels"
        region = self.build.region
        losses = vocab_parallel_cross_entropy(logits.flatten(0, 1), labels.flatten(), region.axis, wide=region.wide)
        if self.build.documents is None:
            return (losses.sum() / self.loss_tokens).reshape(1).clone()
        return self.build.documents.loss(losses, int(sample_index[0]), self.loss_tokens).reshape(1).clone()


def build_stages(
    build: Build, blocks: Sequence[range], *, tied: bool, of: Callable[[int], bool]
) -> dict[int, LlamaStage]:
    """The stages s with `of(s)` true, by their number; blocks: those of every stage, see `model.stages`."""
    last = len(blocks) - 1
    return {
        s: LlamaStage(build, layers, first=s == 0, last=s == last, tied=tied)
        for s, layers in enumerate(blocks)
        if of(s)
    }


def _queries(m: ModelConfig) -> tuple[int, int]:
    return m.num_attention_heads * m.head_dim, m.hidden_size


def _keys(m: ModelConfig) -> tuple[int, int]:
    return m.query_groups * m.head_dim, m.hidden_size


def _wide(m: ModelConfig) -> tuple[int, int]:
    return m.ffn_hidden_size, m.hidden_size


LLAMA = register(
    ModelSpec(
        name="llama",
        architecture="LlamaForCausalLM",
        block=Block,
        linears={
            "self_attn.q_proj": BlockLinear("q", "attention norm", ColumnParallelLinear, _queries),
            "self_attn.k_proj": BlockLinear("k", "attention norm", ColumnParallelLinear, _keys),
            "self_attn.v_proj": BlockLinear("v", "attention norm", ColumnParallelLinear, _keys),
            "self_attn.o_proj": BlockLinear("o", "attention", RowParallelLinear, lambda m: _queries(m)[::-1]),
            "mlp.gate_proj": BlockLinear("gate", "mlp norm", ColumnParallelLinear, _wide),
            "mlp.up_proj": BlockLinear("up", "mlp norm", ColumnParallelLinear, _wide),
            "mlp.down_proj": BlockLinear("down", "activation", RowParallelLinear, lambda m: _wide(m)[::-1]),
        },
        more_parameters=lambda m: 2 * m.hidden_size,
        # causal: half of all pairs of tokens, by queries and keys and by values
        attention_flops=lambda m: 2 * 2 * m.num_attention_heads * m.head_dim * m.seq_length // 2,
        names={part: f"model.{part}" for part in ("embed_tokens", "layers", "norm")} | {"lm_head": "lm_head"},
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    )
)
