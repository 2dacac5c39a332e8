"""Which blocks each pipeline stage holds.

All pp ranks hold the same number of blocks, unless options set the first and the last; the others then share the rest
equally.  Interleaved ranks hold their blocks in chunks of equal length: stage s is chunk s // pp of rank s % pp, and
blocks are assigned to stages in order.
Source of names and meanings: Megatron-LM core 0.16.1, get_num_layers_to_build and get_transformer_layer_offset.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from megatron_snip.config import ParallelConfig
from megatron_snip.errors import UserError


def stage_blocks(num_layers: int, p: ParallelConfig) -> list[range]:
    """The blocks of every stage, in order.  Raises UserError if the options do not divide them."""
    held = _blocks_of_processes(num_layers, p)
    chunks, pp = _chunks(held, p), len(held)
    counts = [held[stage % pp] // chunks for stage in range(pp * chunks)]
    counts[0] -= p.account_for_embedding_in_pipeline_split
    counts[-1] -= p.account_for_loss_in_pipeline_split
    return [range(start, end) for start, end in pairwise(accumulate(counts, initial=0))]


def is_interleaved(num_layers: int, p: ParallelConfig) -> bool:
    """Whether a pp rank holds several stages."""
    return len(stage_blocks(num_layers, p)) > p.pipeline_model_parallel_size


def _blocks_of_processes(num_layers: int, p: ParallelConfig) -> list[int]:
    """Blocks of each pp rank, including an embedding or loss that counts as one."""
    pp, ends = p.pipeline_model_parallel_size, (p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers)
    given = [end for end in ends if end is not None]
    counted = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
    if not given:
        with_what = " with embedding or loss counted as layers" if counted else ""
        return [quotient(num_layers + counted, pp, f"--num-layers{with_what} by pipeline parallel", "change one")] * pp
    words = " ".join(
        f"--decoder-{name}-pipeline-num-layers {end}" for name, end in zip(("first", "last"), ends) if end is not None
    )
    if counted:
        raise UserError(f"{words} already divides the blocks; drop it or --account-for-...-in-pipeline-split")
    stages, left = pp - len(given), num_layers - sum(given)
    if min(given) < 1 or stages < 0 or left < 0 or bool(stages) != bool(left) or (stages and left % stages):
        raise UserError(
            f"{words} leaves {left} of {num_layers} blocks to {stages} other stages; give the first and the last stage "
            "1 or more, and the others equal shares of the rest"
        )
    first, last = ([end] if end is not None else [] for end in ends)
    return [*first, *([left // stages] * stages if stages else []), *last]


def _chunks(held: list[int], p: ParallelConfig) -> int:
    """Number of chunks per pp rank."""
    each, chunks = p.num_layers_per_virtual_pipeline_stage, p.num_virtual_stages_per_pipeline_rank
    if each is None and chunks is None:
        return 1
    by_layers, by_chunks = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    if each is not None and chunks is not None:
        raise UserError(f"{by_layers} {each} and {by_chunks} {chunks} mean the same; drop one")
    option, value = (by_layers, each) if each is not None else (by_chunks, chunks)
    assert value is not None
    if len(held) == 1 or value < 1:
        raise UserError(
            f"{option} is {value} and --pipeline-model-parallel-size {len(held)}; "
            "give at least 1 and 2, or drop the first"
        )
    if chunks is not None:
        for blocks in held:
            quotient(blocks, chunks, "layers a stage by virtual stages", f"change {option}")
        return chunks
    if len(set(held)) > 1 or p.decoder_first_pipeline_num_layers or p.decoder_last_pipeline_num_layers:
        raise UserError(f"{option} is {value}, and the first or last stage has its own length; use {by_chunks}")
    return quotient(held[0], value, "layers a stage by layers a virtual stage", f"change {option}")


def quotient(value: int, among: int, what: str, way_out: str) -> int:
    """value / among.  Raises UserError unless it is an integer."""
    if among < 1 or value % among:
        raise UserError(f"{what}: {value} is not a multiple of {among}; {way_out}")
    return value // among
