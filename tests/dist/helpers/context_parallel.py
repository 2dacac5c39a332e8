"""What tests of context parallelism run on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.mesh import build_mesh
from megatron_snip.parallel.context_parallel import causal_attention, gather_sequences, own_tokens, pieces, rows_of, triangles
from megatron_snip.parallel.tensor import ColumnParallelLinear, Region, RowParallelLinear
from megatron_snip.quant import LinearPrecision, RoundingKey, StepContext
from megatron_snip.quant.kernels.dispatch import cast
from megatron_snip.quant.linears.operands import LinearCall

B, S, A, G, D = 2, 1024, 4, 2, 16
K = 256


def draw(*shape: int, seed: int) -> Tensor:
    """The same numbers on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention_of_pieces() -> dict[str, float]:
    """How far output and gradients are from those of whole sequences, relative to their largest."""
    cp = build_mesh("cpu", pp=1, dp=1, tp=1, cp=dist.get_world_size()).cp
    tensors = [draw(B, S, heads * D, seed=seed).requires_grad_() for seed, heads in enumerate((A, G, G))]
    cotangent = draw(B, S, A * D, seed=9)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, D)).transpose(1, 2)

    q, k, v = map(heads, tensors)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    expected = [y, *torch.autograd.grad(y, tensors, cotangent)]
    parts = [own_tokens(x.detach().transpose(1, 2), cp).transpose(1, 2).requires_grad_() for x in tensors]
    k, v = (heads(gather_sequences(x, cp)) for x in parts[1:])
    places = pieces(S, cp)
    ys = [
        causal_attention(q, k, v, place.start, triangle)
        for q, place, triangle in zip(
            heads(parts[0]).chunk(len(places), dim=2), places, triangles(places, q.device), strict=True
        )
    ]
    y = torch.cat(ys, dim=2).transpose(1, 2).flatten(2)
    found = [y, *torch.autograd.grad(y, parts, own_tokens(cotangent.transpose(1, 2), cp).transpose(1, 2))]
    names = ("output", "q", "k", "v")
    return {
        name: float((got - own_tokens(whole.transpose(1, 2), cp).transpose(1, 2)).abs().max() / whole.abs().max())
        for name, got, whole in zip(names, found, expected, strict=True)
    }


def casts_of_pieces() -> dict[str, bool]:
    """Whether the codes and scales of each operand of tokens are those of whole sequences."""
    mesh = build_mesh("cpu", pp=1, dp=1, tp=1, cp=dist.get_world_size())
    cp, same = mesh.cp, {}
    region = Region(mesh.tp, False, mesh.tp_cp)
    own = RoundingKey(7, 5, 0, row0=3 * S, rows=rows_of(S, cp))
    operands = {"input": draw(B, S, K, seed=1).bfloat16(), "grad_output": draw(B, S, K, seed=2).bfloat16()}
    for number, module in enumerate((ColumnParallelLinear, RowParallelLinear)):
        linear = module(f"layers.{number}.self_attn.q_proj", draw(K, K, seed=3), region, mesh.device_mesh)
        for fmt in ("fp8", "fp4", "mxfp4", "nvfp4_plain", "nvfp4"):
            linear.precision = LinearPrecision.uniform(fmt)
            call = linear.linear_call(StepContext(key=own))
            plain = LinearCall(linear.precision, RoundingKey(7, 5, call.key.stream, row0=3 * S))
            for gemm, role in (("fprop", "input"), ("dgrad", "grad_output"), ("wgrad", "grad_output"), ("wgrad", "input")):
                x = operands[role]
                part = own_tokens(x.transpose(1, 2), cp).transpose(1, 2)
                reduce = call.reduce_amax.get(role)
                (got,) = cast(part.flatten(0, 1), [call.form(gemm, role)], reduce)
                (whole,) = cast(x.flatten(0, 1), [plain.form(gemm, role)])
                wanted = own_tokens(whole.data.unflatten(0, (B, S)).transpose(1, 2), cp).transpose(1, 2)
                same[f"{module.__name__} {fmt} {gemm} {role}"] = torch.equal(got.data, wanted.flatten(0, 1))
    return same
