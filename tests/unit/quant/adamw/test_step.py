"""A step of AdamW on BF16 weights: against float64, its random bits, and the C++ kernel's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_snip.quant import RoundingKey
from megatron_snip.quant.adamw import kernels
from megatron_snip.quant.adamw.step import Scalars, Stored, reference, stochastic
from megatron_snip.quant.kernels import cpu
from tests.unit.quant.adamw.numbers_of import STORED, copy_of, differences, parameter, tensors_of

with_kernel = pytest.mark.skipif(cpu.library() is None, reason="the CPU kernel is not built")


def scalars(step: int, lr: float = 1e-3, decay: float = 0.1, beta2: float = 0.95, clip: float = 1.0) -> Scalars:
    return Scalars.of(step, lr, decay, (0.9, beta2), 1e-8, clip)


@with_kernel
@pytest.mark.parametrize("isa", [0, 1, 2])
@pytest.mark.parametrize("precision", STORED)
def test_the_kernel_gives_the_specifications_bits(precision, isa):
    for step, shape in enumerate([(37, 513), (1, 5), (3, 4100), (300, 7), (64, 1)], 1):
        stored, grad = parameter(precision, step, *shape)
        s = scalars(
            step, lr=10.0**-step, decay=0.1 * (step % 2), beta2=(0.95, 0.999)[step % 2], clip=(1, 0.3)[step % 2]
        )
        expected, made = copy_of(stored), copy_of(stored)
        reference(expected, grad, s)
        kernels.run_on_cpu(made, grad, s, isa)
        assert not differences(expected, made)
        assert differences(stored, made), "nothing moved"


@with_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_a_large_tensor(threads):
    stored, grad = parameter("bf16-stochastic", 0, 700, 300)
    expected, before = copy_of(stored), torch.get_num_threads()
    reference(expected, grad, scalars(1))
    torch.set_num_threads(threads)
    try:
        kernels.adamw(stored, grad, scalars(1))
    finally:
        torch.set_num_threads(before)
    assert not differences(expected, stored)


@pytest.mark.parametrize("precision", STORED)
def test_a_step_is_adamws(precision):
    """Against float64 from the same state: what is stored differs by its rounding alone."""
    draw = torch.Generator().manual_seed(1)
    w, g, m = (torch.randn(40, 50, generator=draw).mul(0.02).bfloat16() for _ in range(3))
    v = torch.rand(40, 50, generator=draw).mul(1e-3).bfloat16()
    weight_low, v_low, is_stochastic = STORED[precision]
    zeros = torch.zeros_like
    stored = Stored(
        w.clone(), m.clone(), v.clone(), zeros(w) if weight_low else None, zeros(v) if v_low else None,
        RoundingKey(1, 2, 3) if is_stochastic else None,
    )  # fmt: skip
    reference(stored, g, scalars(7, lr=1e-2, decay=0.3, clip=0.5))
    g = 0.5 * g.double()
    m2, v2 = 0.9 * m.double() + 0.1 * g, 0.95 * v.double() + 0.05 * g * g
    wanted = w.double() - 1e-2 * (m2 / (1 - 0.9**7) / ((v2 / (1 - 0.95**7)).sqrt() + 1e-8) + 0.3 * w.double())
    tensors = {name: tensor.double() for name, tensor in tensors_of(stored).items()}
    torch.testing.assert_close(tensors["m"], m2, rtol=2**-8, atol=0)
    off = (tensors["v"] + tensors.get("v_low", 0) - v2).abs()
    assert (off <= (2.0**-15 if v_low else 2.0**-8) * v2 + 2.0**-8 * 0.05 * g * g).all(), "g^2 is rounded by itself"
    ours = tensors["weight"] + tensors.get("weight_low", 0)
    ulp = 2.0**-7 * w.double().abs() if not weight_low else 2.0**-15 * w.double().abs()
    assert ((ours - wanted).abs() <= ulp + 2.0**-6 * (wanted - w.double()).abs()).all()


def test_small_updates_add_up_in_an_expansion_and_at_random_but_not_in_bf16():
    ends = {}
    for precision, (weight_low, v_low, is_stochastic) in STORED.items():
        w = torch.ones(64, 64, dtype=torch.bfloat16)
        low = [torch.zeros_like(w) if there else None for there in (weight_low, v_low)]
        stored = Stored(w, torch.zeros_like(w), torch.zeros_like(w), *low)
        for i in range(1, 201):
            key = RoundingKey(3, i, 4) if is_stochastic else None
            kernels.adamw(replace(stored, key=key), torch.ones_like(w), scalars(i, lr=1e-4, decay=0.0))
        ends[precision] = (stored.weight.double() + (0 if low[0] is None else low[0].double())).mean()
    assert ends["bf16"] == 1, "no update is half an ulp"
    for precision in ("collage-light", "collage-plus", "bf16-stochastic"):  # m ends at .984, for it is BF16, too
        assert ends[precision] == pytest.approx(0.98, abs=5e-4), precision


def test_stochastic_rounding_keeps_the_mean_and_what_bf16_holds():
    x = torch.tensor([1.0, 1.0 + 2.0**-9, -(3.0 + 2.0**-10), 1e-3, 0.0, torch.inf]).repeat(20000, 1)
    y = stochastic(x, RoundingKey(1, 2, 3))
    assert torch.equal(y, y.bfloat16().float())
    assert torch.equal(y[:, [0, 4, 5]], x[:, [0, 4, 5]])
    mean, ulp = y[:, 1:4].double().mean(0), torch.tensor([2.0**-7, 2.0**-6, 2.0**-17])
    assert ((mean - x[0, 1:4].double()).abs() < 4 * 0.5 * ulp / 20000**0.5).all()
    assert stochastic(x, RoundingKey(1, 3, 3)).ne(y).any(), "another iteration draws other bits"


def test_random_bits_are_those_of_the_position():
    whole, grad = parameter("bf16-stochastic", 0, 40, 24)
    part = copy_of(replace(whole, **{name: t[16:, 8:].contiguous() for name, t in tensors_of(whole).items()}))
    part = replace(part, key=replace(whole.key, row0=whole.key.row0 + 16, col0=whole.key.col0 + 8))
    for one, g in ((whole, grad), (part, grad[16:, 8:].contiguous())):
        kernels.adamw(one, g, scalars(1))
    assert torch.equal(whole.weight[16:, 8:], part.weight)


def test_without_a_kernel_the_specification_runs(monkeypatch):
    stored, grad = parameter("collage-plus", 0, 5, 6)
    expected = copy_of(stored)
    kernels.adamw(expected, grad, scalars(1))
    monkeypatch.setattr(cpu, "reads", lambda x: False)
    kernels.adamw(stored, grad, scalars(1))
    assert not differences(expected, stored)
    empty = torch.empty(0, 4, dtype=torch.bfloat16)
    kernels.adamw(Stored(empty, empty, empty), empty, scalars(1))


def test_fake_tensors_see_one_operator():
    with FakeTensorMode():
        w = torch.zeros(3, 4, dtype=torch.bfloat16)
        kernels.adamw(Stored(w, w.clone(), w.clone(), w.clone()), w.clone(), scalars(1))
