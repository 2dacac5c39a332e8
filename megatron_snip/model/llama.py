"""Llama's blocks, and the pipeline stages that all decoders are cut into.  Source: arXiv 2302.13971, 2307.09288.

Parameters are named as Hugging Face names them, with the global layer index whatever the cut, so that a
plan and a checkpoint mean the same on every layout.  Weights are made on the meta device; `LlamaStage.allocate` gives
them memory once they are sharded, and `model.initial` or a checkpoint their values.
Shapes: B sequences, S tokens, H hidden, A query heads, G key/value heads, D channels of a head, F width of
the SwiGLU, V padded vocabulary; under tp the local A, G, F and V are a tp-th of the whole, and under context
parallelism S is a cp-th of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_snip.config import ModelConfig
from megatron_snip.model.attention import Attention
from megatron_snip.model.build import Build, RMSNorm
from megatron_snip.model.recompute import run_again
from megatron_snip.model.rotary import rotary_tables
from megatron_snip.model.spec import BlockLinear, ModelSpec, register
from megatron_snip.model.swiglu import swiglu
from megatron_snip.parallel.context import gather_sequences, rows_of
from megatron_snip.parallel.loss import vocab_parallel_cross_entropy
from megatron_snip.parallel.tags import Tags, add_parameter
from megatron_snip.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linears_of_one_input,
    local,
    make_parameter,
)
from megatron_snip.quant import LinearCall, LinearPrecision, RoundingKey, wide_linear
from megatron_snip.quant.linear_op import pack_key

MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


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
