"""FLOPs of a training iteration, as Megatron-LM counts them for its throughput figure.

A multiply-add is two FLOPs; backward costs twice forward.  These are model FLOPs: the same whatever
precision a linear runs in, and recomputation is not counted.
"""

from __future__ import annotations

from megatron_snip.config import ModelConfig
from megatron_snip.model.spec import linear_shapes, spec_of


def linear_flops_per_token(m: ModelConfig) -> int:
    """FLOPs of one GEMM each of all quantisable linears, per token."""
    return sum(shape.gemm_flops for shape in linear_shapes(m))


def parameters(m: ModelConfig, *, tied: bool) -> int:
    """Parameters of the whole model, padding of the vocabulary included."""
    linears = sum(shape.out_features * shape.in_features for shape in linear_shapes(m))
    norms = m.num_layers * spec_of(m).more_parameters(m) + m.hidden_size
    return linears + norms + m.padded_vocab_size * m.hidden_size * (1 if tied else 2)


def iteration_flops(m: ModelConfig, sequences: int) -> float:
    """FLOPs of one iteration over this many sequences, forward and backward; causal attention counted half."""
    per_token = sum(shape.gemm_flops + shape.other_flops for shape in linear_shapes(m))
    return 3.0 * per_token * m.seq_length * sequences
