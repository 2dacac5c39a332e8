"""AdamW on BF16 weights on a GPU: the Triton kernel's bits are the specification's on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_snip.quant.adamw.kernels import adamw
from megatron_snip.quant.adamw.step import Scalars, reference
from tests.unit.quant.adamw.numbers_of import STORED, copy_of, differences, parameter, tensors_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(1031, 2571), (4096, 1024), (1, 5)], ids=str)
@pytest.mark.parametrize("precision", STORED)
def test_an_update_gives_the_specifications_bits(precision, shape):
    for step, (lr, decay, clip) in enumerate([(1e-1, 0.1, 1.0), (1e-3, 0.0, 0.3), (1e-5, 0.1, 1.0)], 1):
        stored, grad = parameter(precision, step, *shape)
        s = Scalars.of(step, lr, decay, (0.9, 0.999), 1e-8, clip)
        made = replace(stored, **{name: tensor.cuda() for name, tensor in tensors_of(stored).items()})
        adamw(made, grad.cuda(), s)
        expected = copy_of(stored)
        reference(expected, grad, s)
        back = replace(made, **{name: tensor.cpu() for name, tensor in tensors_of(made).items()})
        assert differences(back, expected) == []
