"""Norms of gradients; sums over processes are in tests/dist."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megatron_snip.parallel.data import gradient_square_sum, local_gradients, sum_gradients_over_tp
from megatron_snip.parallel.tags import Tags, add_parameter


class Axis:
    """As much of an axis as a norm needs."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.is_first = size, rank, rank == 0


class Mesh:
    def __init__(self, size: int, rank: int, instance: int = 0) -> None:
        self.tp, self.replicate = Axis(size, rank), Axis(2, instance)


@pytest.fixture
def module():
    one = nn.ModuleDict({"input_layernorm": nn.RMSNorm(3), "up_proj": nn.Linear(3, 2, bias=False)})
    add_parameter(one["input_layernorm"], "weight", one["input_layernorm"].weight, Tags("norm"))
    add_parameter(one["up_proj"], "weight", one["up_proj"].weight, Tags("linear", 0))
    one["input_layernorm"].weight.grad = torch.tensor([1.0, 2.0, 2.0])
    one["up_proj"].weight.grad = torch.full((2, 3), 2.0)
    return one


def test_replicated_gradients_count_once(module):
    assert gradient_square_sum([module], Mesh(1, 0)) == pytest.approx(9.0 + 24.0)
    assert gradient_square_sum([module], Mesh(2, 0)) == pytest.approx(9.0 + 24.0)
    assert gradient_square_sum([module], Mesh(2, 1)) == pytest.approx(24.0)
    assert gradient_square_sum([module, module], Mesh(2, 1)) == pytest.approx(48.0)
    assert gradient_square_sum([module], Mesh(1, 0, instance=1)) == 0.0


def test_no_gradients_have_norm_0(module):
    module.zero_grad()
    assert gradient_square_sum([module], Mesh(1, 0)) == 0.0 and list(local_gradients([module])) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(bad, module):
    module["up_proj"].weight.grad[1, 2] = bad
    assert not math.isfinite(gradient_square_sum([module], Mesh(1, 0)))


def test_one_process_sums_nothing(module, lone_mesh):
    before = {name: grad.clone() for name, _, grad in local_gradients([module])}
    sum_gradients_over_tp([module], lone_mesh, sequence_parallel=True)
    assert all(torch.equal(before[name], grad) for name, _, grad in local_gradients([module]))
