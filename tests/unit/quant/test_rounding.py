"""Random bits: Philox's published vectors, positions, and keys."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_snip.quant import RoundingKey, name_stream
from megatron_snip.quant.casts.rounding import Rows, mix64, philox, random_bits

ONES = 0xFFFFFFFF
# Known-answer vectors of Random123 (kat_vectors, philox4x32 7): counter, key, output.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_known_answers(counter, key, expected):
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == expected


def test_mix64_known_answers():
    # SplitMix64 seeded with 0 gives these first two outputs; its state grows by the golden ratio.
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_an_elements_word_is_the_documented_one():
    key = RoundingKey(seed=3, iteration=9, stream=5, row0=2**32 - 1, col0=6)
    bits = random_bits(key, 3, 11)
    for i, j in itertools.product(range(3), range(11)):
        row, col = key.row0 + i, key.col0 + j
        counter = tuple(torch.tensor([word]) for word in (col >> 3, row & ONES, row >> 32, 9))
        word = int(philox(counter, key.words)[(col & 7) >> 1])
        assert int(bits[i, j]) == (word >> 16 if col & 1 else word & 0xFFFF)


def test_a_part_has_the_bits_of_its_place_in_the_whole():
    whole = random_bits(RoundingKey(1, 2, 3), 20, 30)
    for row0, col0, rows, cols in [(0, 0, 20, 30), (5, 3, 7, 9), (19, 29, 1, 1), (4, 8, 0, 5), (4, 8, 5, 0)]:
        part = random_bits(RoundingKey(1, 2, 3, row0, col0), rows, cols)
        assert torch.equal(part, whole[row0 : row0 + rows, col0 : col0 + cols])


def test_two_pieces_of_each_sequence_have_the_bits_of_their_places():
    """Two sequences of eight rows, of which a process has rows 2, 3 and 4, 5 of each."""
    whole = random_bits(RoundingKey(1, 2, 3, row0=2**32 - 5), 16, 9)
    parts = random_bits(RoundingKey(1, 2, 3, row0=2**32 - 5, rows=Rows(2, 8, 2, 4)), 8, 9)
    assert torch.equal(parts, whole[[2, 3, 4, 5, 10, 11, 12, 13]])


def test_every_field_changes_the_bits():
    base = RoundingKey(1, 2, 3, 4, 8)
    others = [
        RoundingKey(2, 2, 3, 4, 8),
        RoundingKey(1, 3, 3, 4, 8),
        RoundingKey(1, 2, 4, 4, 8),
        RoundingKey(1, 2, 3, 5, 8),
        RoundingKey(1, 2, 3, 4, 12),
        *(base.for_operand(role) for role in ("input", "weight", "grad_output")),
    ]
    draws = [random_bits(key, 4, 8) for key in (base, *others)]
    for a, b in itertools.combinations(draws, 2):
        assert (a == b).float().mean() < 0.1


def test_bits_are_16_and_uniform():
    bits = random_bits(RoundingKey(0, 0, 0), 500, 500)
    assert int(bits.min()) >= 0 and int(bits.max()) < 2**16
    counts = torch.bincount((bits >> 8).flatten(), minlength=256).double()
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert 150 < chi2 < 380  # 255 degrees of freedom: 255 +- 5 standard deviations


def test_an_operands_key_keeps_or_replaces_the_position():
    key = RoundingKey(1, 2, 3, 4, 5)
    kept, moved = key.for_operand("weight"), key.for_operand("weight", row0=7, col0=0)
    assert (kept.row0, kept.col0, moved.row0, moved.col0) == (4, 5, 7, 0)
    assert kept.stream == moved.stream != key.stream


def test_name_streams_are_stable_and_apart():
    assert name_stream("layers.0.self_attn.q_proj") == 0xAB847550
    projections = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    names = [f"layers.{i}.{p}" for i in range(200) for p in projections]
    assert len({name_stream(name) for name in names}) == len(names)


def test_bad_keys_raise():
    with pytest.raises(ValueError, match="iteration=-1"):
        RoundingKey(0, -1, 0)
    with pytest.raises(ValueError, match="row0=-2"):
        RoundingKey(0, 0, 0, row0=-2)
    with pytest.raises(ValueError, match="'bias'"):
        RoundingKey(0, 0, 0).for_operand("bias")
