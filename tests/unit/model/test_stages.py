"""Blocks are dealt out to pipeline stages as Megatron-LM deals them out."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron_snip.config import ParallelConfig
from megatron_snip.errors import UserError
from megatron_snip.model.stages import stage_blocks

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
CHUNKS, EACH = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"


def lengths(num_layers: int, pp: int, **options: object) -> list[int]:
    blocks = stage_blocks(num_layers, ParallelConfig(pipeline_model_parallel_size=pp, **options))
    assert [block for stage in blocks for block in stage] == list(range(num_layers))
    return [len(stage) for stage in blocks]


@pytest.mark.parametrize(
    ("num_layers", "pp", "options", "expected"),
    [
        (4, 1, {}, [4]),
        (8, 2, {}, [4, 4]),
        (8, 2, {EACH: 2}, [2, 2, 2, 2]),
        (8, 2, {CHUNKS: 4}, [1] * 8),
        (10, 3, {FIRST: 2}, [2, 4, 4]),
        (10, 3, {LAST: 4}, [3, 3, 4]),
        (10, 2, {FIRST: 7}, [7, 3]),
        (10, 2, {FIRST: 7, LAST: 3}, [7, 3]),
        (11, 4, {FIRST: 2, LAST: 1}, [2, 4, 4, 1]),
        (12, 2, {FIRST: 8, CHUNKS: 2}, [4, 2, 4, 2]),
        (7, 2, {LOSS: True}, [4, 3]),
        (6, 4, {EMBEDDING: True, LOSS: True}, [1, 2, 2, 1]),
        (2, 4, {EMBEDDING: True, LOSS: True}, [0, 1, 1, 0]),
        (14, 4, {EMBEDDING: True, LOSS: True, EACH: 2}, [1, 2, 2, 2, 2, 2, 2, 1]),
    ],
)
def test_blocks_of_stages(num_layers, pp, options, expected):
    assert lengths(num_layers, pp, **options) == expected


def test_they_are_megatrons():
    """By Megatron's own functions, for every combination that both take; neither takes what the other refuses."""
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer")
    config = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    taken = refused = 0
    numbers = (None, 2, 3)
    for pp, num_layers, first, last, ends, chunks in product(
        (2, 3, 4), (2, 6, 8, 11), numbers, numbers, product((False, True), repeat=2), (None, 2)
    ):
        options = {FIRST: first, LAST: last, EMBEDDING: ends[0], LOSS: ends[1], CHUNKS: chunks}
        try:
            theirs = config(
                num_layers=num_layers, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=chunks, num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last, account_for_embedding_in_pipeline_split=ends[0],
                account_for_loss_in_pipeline_split=ends[1], pipeline_dtype=torch.bfloat16,
            )  # fmt: skip
            expected = [
                range(start := layer.get_transformer_layer_offset(theirs, chunk, rank),
                      start + block.get_num_layers_to_build(theirs, chunk, rank))
                for chunk in range(chunks or 1) for rank in range(pp)
            ]  # fmt: skip
            assert theirs.num_layers == sum(map(len, expected)), "it lets a stage have fewer than none"
        except ZeroDivisionError:
            continue  # it cannot place chunks where no stage is in the middle
        except (AssertionError, ValueError):
            refused += 1
            with pytest.raises(UserError):
                lengths(num_layers, pp, **options)
            continue
        taken += 1
        got = stage_blocks(num_layers, ParallelConfig(pipeline_model_parallel_size=pp, **options))
        assert [(r.start, len(r)) for r in got] == [(r.start, len(r)) for r in expected], options
    assert taken > 50 and refused > 100


@pytest.mark.parametrize(
    ("num_layers", "pp", "options", "told"),
    [
        (7, 2, {}, "--num-layers by pipeline parallel: 7 is not a multiple of 2; change one"),
        (7, 0, {}, "--num-layers by pipeline parallel: 7 is not a multiple of 0; change one"),
        (8, 2, {LOSS: True}, "--num-layers with embedding or loss counted as layers by pipeline parallel: 9 is not"),
        (8, 2, {FIRST: 0}, "--decoder-first-pipeline-num-layers 0 leaves 8 of 8 blocks to 1 other stages; give"),
        (8, 2, {FIRST: 8}, "--decoder-first-pipeline-num-layers 8 leaves 0 of 8 blocks to 1 other stages; give"),
        (
            8,
            2,
            {FIRST: 2, LAST: 2},
            "num-layers 2 --decoder-last-pipeline-num-layers 2 leaves 4 of 8 blocks to 0 other",
        ),
        (8, 4, {LAST: 1}, "--decoder-last-pipeline-num-layers 1 leaves 7 of 8 blocks to 3 other stages; give"),
        (8, 1, {LAST: 1, FIRST: 7}, "leaves 0 of 8 blocks to -1 other stages"),
        (8, 2, {LAST: 1, LOSS: True}, "drop it or --account-for-...-in-pipeline-split"),
        (8, 2, {EACH: 2, CHUNKS: 2}, f"--{EACH.replace('_', '-')} 2 and --{CHUNKS.replace('_', '-')} 2 mean the same"),
        (8, 2, {EACH: 1, FIRST: 6}, "use --num-virtual-stages-per-pipeline-rank"),
        (8, 2, {CHUNKS: 3}, "layers a stage by virtual stages: 4 is not a multiple of 3; change --num-virtual"),
        (8, 2, {CHUNKS: 0}, "--num-virtual-stages-per-pipeline-rank is 0 and --pipeline-model-parallel-size 2; give"),
        (8, 1, {CHUNKS: 2}, "--num-virtual-stages-per-pipeline-rank is 2 and --pipeline-model-parallel-size 1; give"),
    ],
)
def test_what_cannot_be_dealt_out(num_layers, pp, options, told):
    with pytest.raises(UserError) as error:
        lengths(num_layers, pp, **options)
    assert told in str(error.value) and "\n" not in str(error.value)
