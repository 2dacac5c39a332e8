"""The core set of casts on a GPU, a test each; `benchmarks/gpu.py` runs the same set."""

from __future__ import annotations

import pytest

from tests.gpu import core


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(core.cases())), ids=[case.name for case in core.cases()])
def test_the_kernel_gives_the_specifications_bits(number):
    assert core.run(number, rehearse=False) == ""


@pytest.mark.gpu
def test_swiglus_gradients_and_rotary_positions_are_torchs():
    assert core.elementwise(rehearse=False) == []


def test_the_set_is_small_and_no_case_is_there_twice():
    names = [case.name for case in core.cases()]
    assert len(set(names)) == len(names) <= 150
