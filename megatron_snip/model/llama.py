"""Llama's blocks, and the pipeline stages of all decoders.  Source: arXiv 2302.13971, 2307.09288.

Parameters have Hugging Face's names with the global layer index, so plans and checkpoints mean the same on every
layout.  Weights are created on the meta device.  After sharding, `LlamaStage.allocate` gives them memory, and
`model.initial` or a checkpoint gives them values.
Shapes: B sequences, S tokens, H hidden, A query heads, G key/value heads, D channels per head, F SwiGLU width, V padded
vocabulary.  Under tp, the local A, G, F and V are a tp-th of the whole.  Under context parallelism, S is a cp-th of a
sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron_snip.config import ModelConfig
from megatron_snip.model.attention import Attention
from megatron_snip.model.build import Build, RMSNorm
from megatron_snip.model.offload import Sent
from megatron_snip.model.output import OutputLayer, logits_of
from megatron_snip.model.recompute import run_again
from megatron_snip.model.rotary import rotary_tables
from megatron_snip.model.spec import BlockLinear, ModelSpec, register
from megatron_snip.parallel.context_parallel import gather_sequences, rows_of
from megatron_snip.parallel.loss import Share, output_loss
from megatron_snip.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linears_of_one_input,
    local,
)
from megatron_snip.quant import PLAIN, RoundingKey, StepContext
from megatron_snip.quant.linears.linear_op import pack

MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).  Source: arXiv 2002.05202."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (build.linear(f"{prefix}.{name}") for name in MLP_LINEARS)

    def forward(self, x: Tensor, context: StepContext | Tensor) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        gate, up = linears_of_one_input([self.gate_proj, self.up_proj], x, context)
        out: Tensor = self.down_proj(gate, context, up)
        return out


class Block(nn.Module):
    """One Transformer block: attention and MLP, each after a norm and with a residual connection."""

    def __init__(
        self, build: Build, index: int, attention: type[Attention] = Attention, mlp: type[nn.Module] = MLP
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build)
        self.self_attn = attention(build, f"layers.{index}.self_attn")
        self.post_attention_layernorm = RMSNorm(build)
        self.mlp = mlp(build, f"layers.{index}.mlp")
        self._compiled: Callable[..., Tensor] | None = None
        self._recompute_mlp, self.region = build.recompute.of_part("mlp"), build.region

    def compile_run(self, backend: str = "inductor") -> None:
        """Compile the block with torch.compile.  Linears with a common input stay one custom operator."""
        # one graph each with and without gradients, and for each set of linears with wgrad in bf16
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
        # not ``forward``: FSDP's hooks and the probe's eager path stay outside the graph
        self._compiled = torch.compile(self._run, backend=backend, fullgraph=True, dynamic=False)

    def weights(self) -> list[Tensor]:
        """The weights that this rank computes with now, and what linears keep of them for a step."""
        linears = [one for one in self.modules() if isinstance(one, (ColumnParallelLinear, RowParallelLinear))]
        return [*map(local, self.parameters()), *(part for one in linears for part in one.kept_of_weight())]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: StepContext, mask: Tensor | None = None) -> Tensor:
        """x [B, S/tp or S, H] -> the same shape."""
        if self._compiled is not None and not context.observed:
            return self._compiled(x, cos, sin, pack(context), mask)
        return self._run(x, cos, sin, context, mask)

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor, context: StepContext | Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, mask)
        normed = self.post_attention_layernorm(x)
        if self._recompute_mlp:
            return x + run_again(self.mlp, normed, context, region=self.region)
        out: Tensor = x + self.mlp(normed, context)
        return out


class _ContiguousGrad(torch.autograd.Function):
    """Identity whose gradient is contiguous: pipeline communication sends the raw memory."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class LlamaStage(nn.Module):
    """The blocks of one pipeline stage, with the embedding on the first stage and the loss on the last."""

    cos: Tensor
    sin: Tensor

    def __init__(self, build: Build, layers: range, *, first: bool, last: bool, tied: bool):
        super().__init__()
        m = build.model
        self.build = build
        vocab = (m.padded_vocab_size, m.hidden_size)
        # the last of several stages holds a copy of a tied embedding as output layer, under the first stage's name
        self.embed_tokens: VocabParallelEmbedding | OutputLayer | None = None
        self.norm: RMSNorm | None = None
        self.lm_head: OutputLayer | None = None
        if first:
            weight = build.empty(*vocab)
            self.embed_tokens = VocabParallelEmbedding(weight, build.region, build.mesh.device_mesh, build.dtype)
        self.layers = nn.ModuleDict({str(i): build.spec.block(build.of_block(i), i) for i in layers})
        if last:
            self.norm = RMSNorm(build)
            if not tied:
                self.lm_head = OutputLayer(build, vocab)
            elif not first:
                self.embed_tokens = OutputLayer(build, vocab, tied=True)
        wanted = {f"layers.{i}.{module}" for i in layers for module in build.spec.linears}
        assert (odd := wanted ^ self.linears().keys()) == set(), f"{min(odd)} is in the spec or in the block alone"
        self.held, self.first, self.last = layers, first, last
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(0, device="meta"), persistent=False)

    def allocate(self) -> None:
        """Allocate this rank's shards of the parameters, without values, and compute the rotary tables."""
        self.to_empty(device=self.build.device)
        self.cos, self.sin = rotary_tables(self.build.model, self.build.dtype, self.build.device)

    def blocks(self) -> dict[int, Block]:
        """The blocks of this stage by global index."""
        return {int(index): block for index, block in self.layers.items() if isinstance(block, Block)}

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, row0: int = 0) -> Tensor:
        """Attention of block ``index``: q [T, A D] from row ``row0`` on, whole k and v [cp T, G D] -> [T, A D]."""
        length, cp = self.build.model.seq_length, self.build.mesh.cp.size
        q, k, v = q.unflatten(0, (-1, length // cp)), k.unflatten(0, (-1, length)), v.unflatten(0, (-1, length))
        tables = self._tables(row0 // length)
        return self.blocks()[index].self_attn.attend(q, k, v, *tables).flatten(0, 1)

    def _tables(self, sample: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """cos, sin and the attention mask of the microbatch that starts with this sample."""
        documents = self.build.documents
        return (self.cos, self.sin, None) if documents is None else documents.tables(sample, self.cos, self.sin)

    def whole_sequences(self, x: Tensor) -> Tensor:
        """All-gather over cp: this rank's shard of sequences [T, C] -> whole sequences [cp T, C]."""
        cp = self.build.mesh.cp
        return gather_sequences(x.unflatten(0, (-1, self.build.model.seq_length // cp.size)), cp).flatten(0, 1)

    def units(self) -> list[nn.Module]:
        """Submodules that run once each, so that FSDP can gather their weights one by one, in forward order."""
        ends = [module for module in (self.embed_tokens, self.lm_head) if module is not None]
        if self.first and self.last and self.lm_head is None:  # a tied embedding is needed at both ends
            ends = []
        return [*(end for end in ends if isinstance(end, VocabParallelEmbedding)), *self.layers.values(),
                *(end for end in ends if isinstance(end, OutputLayer))]  # fmt: skip

    def linears(self) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
        """The quantisable linears of this stage by name, in order."""
        kinds = (ColumnParallelLinear, RowParallelLinear)
        return {module.name: module for module in self.modules() if isinstance(module, kinds)}

    def hidden(self, x: Tensor, sample_index: Sequence[int], context: StepContext = PLAIN) -> Tensor:
        """Tokens [B, S] (first stage) or residual stream [B, S/tp or S, H] -> residual stream.

        sample_index [B]: global, consecutive sequence numbers.
        """
        row0 = sample_index[0] * self.build.model.seq_length
        rows = rows_of(self.build.model.seq_length, self.build.mesh.cp)
        key = RoundingKey(self.build.seed, context.iteration, stream=0, row0=row0, col0=0, rows=rows)
        context = dataclasses.replace(context, key=key)
        x = self.embed_tokens(x) if self.first and self.embed_tokens is not None else _ContiguousGrad.apply(x)
        blocks = list(self.blocks().values())
        cos, sin, mask = self._tables(sample_index[0])

        def run(x: Tensor, members: range) -> Tensor:
            for i in members:
                x = blocks[i](x, cos, sin, context, mask)
            return x

        offload = self.build.offload if torch.is_grad_enabled() else None
        sent: Sent | None = None
        for members, again in self.build.recompute.runs(self.held):
            before, sent = sent, None
            if again:
                x = run_again(run, x, members, region=self.build.region)
            elif offload is not None and self.build.recompute.offloads(self.held[members.start]):
                # the pipeline holds what it received until backward
                stays = (cos, sin, mask, None if self.first or members.start else x)
                x, sent = offload.run(run, x, members, stays=stays, weights=blocks[members.start].weights)
            else:
                x = run(x, members)
            if offload is not None:
                offload.after(x, before, sent)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream after the last block -> logits [B, S, V/tp] in the compute dtype."""
        head, x = self._head(x)
        logits: Tensor = head(x) if isinstance(head, OutputLayer) else logits_of(x, local(head.weight))
        return logits

    def loss(self, x: Tensor, labels: Tensor, share: Share) -> tuple[Tensor, Tensor]:
        """Residual stream after the last block, labels [B, S] -> share [] and losses [B S], without whole logits."""
        head, x = self._head(x)
        x, labels = x.flatten(0, 1), labels.flatten()
        found: tuple[Tensor, Tensor]
        if isinstance(head, OutputLayer):
            found = head(x, labels, share)
        else:
            found = output_loss(x, local(head.weight), labels, share, self.build.region.axis)
        return found

    def _head(self, x: Tensor) -> tuple[VocabParallelEmbedding | OutputLayer, Tensor]:
        """The module with the output weight, and its input: whole and behind the norm, [B, S, H]."""
        head = self.lm_head or self.embed_tokens
        assert self.norm is not None and head is not None, "only the last stage has logits"
        return head, self.build.region.enter(self.norm(x))

    def forward(
        self, x: Tensor, sample_index: Sequence[int], labels: Tensor | None = None, context: StepContext = PLAIN
    ) -> Tensor:
        """The residual stream [B, S/tp or S, H], or on the last stage the loss [1] of this microbatch.

        The last stage needs labels [B, S].  Its loss is the sum over tokens divided by the tokens of the whole global
        batch, so gradients add up over microbatches and ranks.
        """
        x = self.hidden(x, sample_index, context)
        if not self.last:
            return x.clone()  # the schedule detaches its outputs in place, which a view does not allow
        assert labels is not None, "the last stage needs labels"
        documents = self.build.documents

        def share(losses: Tensor) -> Tensor:
            if documents is None:
                return losses.sum() / context.loss_tokens
            return documents.loss(losses, sample_index[0], context.loss_tokens)

        loss, losses = self.loss(x, labels, share)
        if context.token_losses is not None:
            counted = losses if documents is None else documents.counted(losses, sample_index[0])
            context.token_losses.append(counted)
        return loss.reshape(1).clone()


def build_stages(
    build: Build, blocks: Sequence[range], *, tied: bool, of: Callable[[int], bool]
) -> dict[int, LlamaStage]:
    """The stages s for which `of(s)` is true, by number.  blocks: those of every stage, see `model.stages`."""
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
        # causal: half of all token pairs, for both QK^T and the product with V
        attention_flops=lambda m: 2 * 2 * m.num_attention_heads * m.head_dim * m.seq_length // 2,
        names={part: f"model.{part}" for part in ("embed_tokens", "layers", "norm")} | {"lm_head": "lm_head"},
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    )
)
