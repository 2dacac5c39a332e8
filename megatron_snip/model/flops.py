"""FLOPs of a training iteration, counted as Megatron-LM does for its throughput.

A multiply-add is two FLOPs, and backward costs twice forward.  These are model FLOPs: independent of precision and
without recomputation.
"""

from __future__ import annotations

from megatron_snip.config import ModelConfig
from megatron_snip.model.spec import spec_of


def parameters(m: ModelConfig, *, tied: bool) -> int:
    """Parameters of the whole model, including vocabulary padding."""
    linears = sum(shape.out_features * shape.in_features for shape in spec_of(m).linear_shapes(m))
    norms = m.num_layers * spec_of(m).more_parameters(m) + m.hidden_size
    return linears + norms + m.padded_vocab_size * m.hidden_size * (1 if tied else 2)


def iteration_flops(m: ModelConfig, sequences: int) -> float:
    """FLOPs of forward and backward over this many sequences; causal attention counts half."""
    per_token = sum(shape.gemm_flops + shape.other_flops for shape in spec_of(m).linear_shapes(m))
    return 3.0 * per_token * m.seq_length * sequences
