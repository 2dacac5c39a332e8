"""Parameters, and FLOPs of a training iteration, counted as Megatron-LM does for its throughput.

A multiply-add is two FLOPs, and backward costs twice forward.  These are model FLOPs: independent of precision and
without recomputation.
"""

from __future__ import annotations

from itertools import groupby

from megatron_snip.config import ModelConfig, ParallelConfig
from megatron_snip.model.spec import spec_of
from megatron_snip.model.stages import stage_blocks


def parameters(m: ModelConfig, *, tied: bool) -> int:
    """Parameters of the whole model, including vocabulary padding."""
    linears = sum(shape.out_features * shape.in_features for shape in spec_of(m).linear_shapes(m))
    norms = m.num_layers * spec_of(m).more_parameters(m) + m.hidden_size
    return linears + norms + m.padded_vocab_size * m.hidden_size * (1 if tied else 2)


def parameters_by_rank(m: ModelConfig, p: ParallelConfig, *, tied: bool) -> list[dict[str, int]]:
    """Name -> whole parameters of each pipeline rank, in order of use.  A block's parameters outside of its linears are
    one entry.
    """
    stages, pp, vocabulary = stage_blocks(m.num_layers, p), p.pipeline_model_parallel_size, m.padded_vocab_size
    found: list[dict[str, int]] = [{} for _ in range(pp)]
    found[0]["embed_tokens.weight"] = vocabulary * m.hidden_size
    home = {block: stage % pp for stage, blocks in enumerate(stages) for block in blocks}
    for block, shapes in groupby(spec_of(m).linear_shapes(m), lambda shape: shape.block):
        here = found[home[block]]
        here[f"layers.{block}.norms"] = spec_of(m).more_parameters(m)
        here |= {f"{shape.name}.weight": shape.out_features * shape.in_features for shape in shapes}
    found[-1]["norm.weight"] = m.hidden_size
    if not tied or pp > 1:  # the last stage holds a copy of a tied embedding under the first stage's name
        found[-1]["embed_tokens.weight" if tied else "lm_head.weight"] = vocabulary * m.hidden_size
    return found


def iteration_flops(m: ModelConfig, sequences: int) -> float:
    """FLOPs of forward and backward over this many sequences; causal attention counts half."""
    per_token = sum(shape.gemm_flops + shape.other_flops for shape in spec_of(m).linear_shapes(m))
    return 3.0 * per_token * m.seq_length * sequences
