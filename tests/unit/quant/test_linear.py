"""quantized_linear: the three GEMMs, their operands, gradients, observers and errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_snip.formats import get_format
from megatron_snip.quant import (
    LINEAR_IMPLS,
    Casts,
    LinearCall,
    LinearPrecision,
    Operands,
    RoundingKey,
    fake_quantize,
    name_stream,
    quantized_linear,
)
from megatron_snip.quant.casts.cast import Form, Operand
from megatron_snip.quant.kernels import op
from megatron_snip.quant.linears import matmul
from megatron_snip.quant.linears.group import Group, run_group

KEY = RoundingKey(seed=1, iteration=2, stream=name_stream("layers.0.mlp.up_proj"), row0=256)
BF16 = LinearPrecision.uniform("bf16")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
T, K, N = 300, 200, 140


def tensors(dtype: torch.dtype = torch.float32, sizes: tuple[int, int, int] = (T, K, N)) -> list[Tensor]:
    """x [T,K] and w [N,K], which require gradients, and a random cotangent [T,N]."""
    generator = torch.Generator().manual_seed(0)
    t, k, n = sizes
    x, w, g = (torch.randn(shape, generator=generator).to(dtype) for shape in ((t, k), (n, k), (t, n)))
    return [x.requires_grad_(), w.requires_grad_(), g]


def operands_of(x: Tensor, w: Tensor, g: Tensor, **offsets: int) -> Operands:
    return Operands(x, w, g, LinearCall(BF16, KEY, **offsets))


def run(precision: LinearPrecision, dtype: torch.dtype = torch.float32, **how: object) -> dict[str, Tensor]:
    x, w, g = tensors(dtype)
    y = quantized_linear(x, w, precision, key=KEY, **how)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g)
    return {"fprop": y.detach(), "dgrad": grad_x, "wgrad": grad_w}


@pytest.fixture
def torchs_products(monkeypatch):
    """BF16 is multiplied as it is, whether the CPU has instructions for it or not."""
    monkeypatch.setattr(matmul, "_lacks_bf16", lambda: False)


@DTYPES
@pytest.mark.parametrize("sizes", [(T, K, N), (1, 5, 3), (256, 128, 128)])
@pytest.mark.usefixtures("torchs_products")
def test_bf16_is_exactly_torchs_linear(dtype, sizes):
    x, w, g = tensors(dtype, sizes)
    y, plain = quantized_linear(x, w, BF16, key=None), x @ w.T
    assert torch.equal(y, plain) and y.dtype == dtype
    for ours, theirs in zip(torch.autograd.grad(y, (x, w), g), torch.autograd.grad(plain, (x, w), g), strict=True):
        assert torch.equal(ours, theirs)


@DTYPES
@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp8_e5m2", "fp8_hybrid", "e3m2"])
@pytest.mark.usefixtures("torchs_products")
def test_every_gemm_multiplies_its_quantised_operands(fmt, dtype):
    x, w, g = (t.detach() for t in tensors(dtype))

    def q(operand: Tensor, role: str, dim: int, row0: int, col0: int) -> Tensor:
        key = RoundingKey(KEY.seed, KEY.iteration, KEY.for_operand(role).stream, row0, col0)
        return fake_quantize(operand, fmt, role=role, dim=dim, key=key)

    expected = {
        "fprop": q(x, "input", 1, 256, 384) @ q(w, "weight", 1, 128, 384).T,
        "dgrad": q(g, "grad_output", 1, 256, 128) @ q(w, "weight", 0, 128, 384),
        "wgrad": q(g, "grad_output", 0, 256, 128).T @ q(x, "input", 0, 256, 384),
    }
    results = run(LinearPrecision.uniform(fmt), dtype, input_col0=384, output_col0=128)
    for gemm, result in results.items():
        assert torch.equal(result, expected[gemm]), gemm


@pytest.mark.parametrize("base", ["bf16", "fp4"])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_changing_one_gemm_leaves_the_others_alone(gemm, base):
    formats = dict.fromkeys(("fprop", "dgrad", "wgrad"), base)
    before = run(LinearPrecision(**formats))
    after = run(LinearPrecision(**{**formats, gemm: "fp8"}))
    for name in formats:
        assert torch.equal(before[name], after[name]) == (name != gemm)


@pytest.mark.parametrize(("fmt", "fprop", "grads"), [("fp8", 0.0365, 0.0365), ("fp4", 0.16, 0.20)])
def test_errors_have_the_size_that_two_quantised_operands_give(fmt, fprop, grads):
    plain, quantised = run(BF16), run(LinearPrecision.uniform(fmt))
    errors = {gemm: float((quantised[gemm] - plain[gemm]).norm() / plain[gemm].norm()) for gemm in plain}
    assert errors["fprop"] == pytest.approx(fprop, rel=0.1)
    assert errors["dgrad"] == pytest.approx(grads, rel=0.1)
    assert errors["wgrad"] == pytest.approx(grads, rel=0.1)


def test_stochastic_bits_depend_on_the_key_alone():
    x, w, g = tensors()

    def grad(**fields: int) -> Tensor:
        key = RoundingKey(**{"seed": 1, "iteration": 2, "stream": 3, **fields})
        return torch.autograd.grad(quantized_linear(x, w, LinearPrecision.uniform("fp4"), key=key), w, g)[0]

    assert torch.equal(grad(), grad())
    for change in ({"seed": 2}, {"iteration": 3}, {"stream": 4}, {"row0": 128}):
        assert not torch.equal(grad(), grad(**change))


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_aligned_shards_have_the_operands_of_the_whole(fmt):
    x, w, g = tensors(sizes=(256, 512, 384))
    operands = operands_of(x, w, g)
    columns = operands_of(x, w[128:256], g[:, 128:256], output_col0=128)  # column-parallel
    rows = operands_of(x[:, 256:], w[:, 256:], g, input_col0=256)  # row-parallel
    for gemm, role in [("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad_output"), ("dgrad", "weight"),
                       ("wgrad", "grad_output"), ("wgrad", "input")]:  # fmt: skip
        whole = operands.quantized(gemm, role, fmt)[0]
        column_slice = {"input": whole, "weight": whole[128:256], "grad_output": whole[:, 128:256]}[role]
        row_slice = {"input": whole[:, 256:], "weight": whole[:, 256:], "grad_output": whole}[role]
        assert torch.equal(columns.quantized(gemm, role, fmt)[0], column_slice)
        assert torch.equal(rows.quantized(gemm, role, fmt)[0], row_slice)


def test_a_column_shards_output_is_the_slice_of_the_whole():
    precision = LinearPrecision.uniform("fp4")
    x, w, g = tensors(sizes=(256, 256, 256))
    whole = quantized_linear(x, w, precision, key=KEY)
    part = quantized_linear(x, w[128:], precision, key=KEY, output_col0=128)
    torch.testing.assert_close(part, whole[:, 128:], rtol=1e-6, atol=1e-5)
    grad_whole = torch.autograd.grad(whole, w, g)[0]
    grad_part = torch.autograd.grad(part, w, g[:, 128:])[0]
    torch.testing.assert_close(grad_part[128:], grad_whole[128:], rtol=1e-6, atol=1e-5)


def test_a_microbatch_of_whole_sequences_has_the_bits_of_its_place_in_the_batch():
    precision = LinearPrecision.parse("bf16/fp4/fp4")
    x, w, g = tensors(sizes=(512, 128, 128))
    whole = torch.autograd.grad(quantized_linear(x, w, precision, key=KEY), x, g)[0]
    later = RoundingKey(KEY.seed, KEY.iteration, KEY.stream, KEY.row0 + 256, 0)
    y = quantized_linear(x[256:], w, precision, key=later)
    assert torch.equal(torch.autograd.grad(y, x, g[256:])[0][256:], whole[256:])


def test_weight_blocks_serve_fprop_and_dgrad_with_the_same_values():
    x, w, g = tensors()
    for name in ("fp8", "fp4"):
        assert get_format(name).block_shape("weight", 0) == get_format(name).block_shape("weight", 1)
        operands = operands_of(x, w, g)
        assert torch.equal(
            operands.quantized("fprop", "weight", name)[0], operands.quantized("dgrad", "weight", name)[0]
        )


@contextlib.contextmanager
def counted_casts() -> Iterator[list[tuple[str, int, str]]]:
    """(role, dim, format) of every cast made meanwhile."""
    seen: list[tuple[str, int, str]] = []

    run = op.run

    def count(x: Tensor, forms: Sequence[Form], *rest: Any) -> list[Operand]:
        seen.extend((form.role, form.dim, form.fmt.name) for form in forms)
        return run(x, forms, *rest)

    with mock.patch.object(op, "run", count):
        yield seen


def test_linears_of_one_input_cast_it_once_where_their_formats_agree():
    x, w, g = tensors()
    precisions = [LinearPrecision.parse(text) for text in ("fp8", "fp8/fp4/fp4", "fp4/fp4/fp8")]
    alone = [torch.autograd.grad(quantized_linear(x, w, p, key=KEY), (x, w), g) for p in precisions]
    calls = [LinearCall(p, KEY) for p in precisions]
    sizes = len(x), *w.shape[::-1]
    calls = [one._replace(backends=LINEAR_IMPLS["emulated"].backends(one, x.device, *sizes)) for one in calls]
    with counted_casts() as seen:
        ys = run_group([x], [w] * 3, Group(calls))
    inputs = sorted((dim, fmt) for role, dim, fmt in seen if role == "input")
    assert inputs == [(0, "fp4"), (0, "fp8"), (1, "fp4"), (1, "fp8")]
    for y, (grad_x, grad_w) in zip(ys, alone, strict=True):
        ours = torch.autograd.grad(y, (x, w), g, retain_graph=True)
        assert torch.equal(ours[0], grad_x) and torch.equal(ours[1], grad_w)


def test_a_weight_is_cast_once_until_it_changes():
    x, w, g = tensors()
    precision, casts = LinearPrecision.uniform("fp4"), Casts()

    def results(weight_casts: Casts | None) -> list[Tensor]:
        y = quantized_linear(x, w, precision, key=KEY, weight_casts=weight_casts)
        return [y, *torch.autograd.grad(y, (x, w), g)]

    def weights(seen: list[tuple[str, int, str]]) -> int:
        return sum(role == "weight" for role, _, _ in seen)

    with counted_casts() as seen:
        kept = [results(casts) for _ in range(3)]
    # square blocks rounded to nearest serve fprop and dgrad: codes to keep, and values at once, from one read
    assert weights(seen) == 2
    assert all(torch.equal(a, b) for other in kept for a, b in zip(other, results(None), strict=True))
    with torch.no_grad():
        w.mul_(-1.5)
    with counted_casts() as seen:
        changed = results(casts)
    assert weights(seen) == 2
    assert all(torch.equal(a, b) for a, b in zip(changed, results(None), strict=True))
    casts.clear()
    with counted_casts() as seen:
        results(casts)
    assert weights(seen) == 2


@pytest.mark.parametrize(("fmt", "codes_a_value"), [("fp8", 1), ("bf16", 2)])
def test_backward_keeps_codes_of_the_input_not_the_input(fmt, codes_a_value):
    x, w, _ = tensors(torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        quantized_linear(x, w, LinearPrecision.uniform(fmt), key=KEY)
    others = [t for t in kept if t.data_ptr() != w.data_ptr()]
    scales = sum(t.numel() * t.element_size() for t in others if t.dtype == torch.float32)
    assert sum(t.numel() * t.element_size() for t in others) - scales == T * K * codes_a_value
    assert scales <= 4 * K * -(-T // 128)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_casts_for_fprop_alone(mode):
    x, w, _ = tensors(sizes=(8, 64, 32))
    expected = quantized_linear(x, w, LinearPrecision.uniform("fp8"), key=KEY).detach()
    with mode(), counted_casts() as seen:
        # wgrad of this format needs a multiple of 16 tokens, but there is no wgrad
        quantized_linear(x, w, LinearPrecision.uniform("nvfp4"), key=KEY)
        y = quantized_linear(x + 0, w, LinearPrecision.uniform("fp8"), key=KEY)
    assert torch.equal(y, expected)
    assert {(role, dim) for role, dim, _ in seen} == {("input", 1), ("weight", 1)}


def test_a_float32_master_weight_gives_what_its_rounded_copy_gives():
    x, w, g = tensors(torch.bfloat16)
    master = w.detach().float().add(1e-4).requires_grad_()
    rounded = master.detach().bfloat16().requires_grad_()
    precision = LinearPrecision.parse("fp8/bf16/fp4")
    y, expected = (quantized_linear(x, weight, precision, key=KEY) for weight in (master, rounded))
    assert torch.equal(y, expected) and y.dtype == torch.bfloat16
    (grad,), (expected_grad,) = torch.autograd.grad(y, master, g), torch.autograd.grad(expected, rounded, g)
    assert grad.dtype == torch.float32 and torch.equal(grad, expected_grad.float())


def test_shards_share_the_tensors_amax_where_the_format_needs_it():
    x, w, g = tensors(sizes=(256, 512, 384))
    precision = LinearPrecision.uniform("nvfp4_plain")
    whole = {"input": x, "weight": w, "grad_output": g}
    reduced: list[str] = []

    def reduce(role: str, amax: Tensor) -> Tensor:
        reduced.append(role)
        assert amax <= whole[role].abs().max()
        return whole[role].detach().abs().max()

    reduce_amax = {role: functools.partial(reduce, role) for role in ("weight", "grad_output")}
    y = quantized_linear(x, w, precision, key=KEY)
    part = quantized_linear(x, w[128:256], precision, key=KEY, output_col0=128, reduce_amax=reduce_amax)
    torch.testing.assert_close(part, y[:, 128:256], rtol=1e-6, atol=1e-4)
    grad = torch.autograd.grad(y, w, g)[0][128:256]
    torch.testing.assert_close(torch.autograd.grad(part, w, g[:, 128:256])[0][128:256], grad, rtol=1e-6, atol=1e-4)
    assert set(reduced) == {"weight", "grad_output"}


class Recorder:
    """An observer that keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[Operands] = []

    def __call__(self, operands: Operands) -> None:
        self.seen.append(operands)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_observer_sees_the_unquantised_operands_once(recompute):
    x, w, g = tensors()
    recorder = Recorder()

    def forward(x: Tensor) -> Tensor:
        return quantized_linear(x * 1.0, w, LinearPrecision.uniform("fp4"), key=KEY, input_col0=128, observer=recorder)

    y = checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
    assert not recorder.seen
    grads = torch.autograd.grad(y, (x, w), g)
    (seen,) = recorder.seen
    assert torch.equal(seen.x, x) and torch.equal(seen.w, w) and torch.equal(seen.grad_output, g)
    assert torch.equal(
        grads[1],
        seen.quantized("wgrad", "grad_output", "fp4")[0].T @ seen.quantized("wgrad", "input", "fp4")[0],
    )


@DTYPES
def test_activation_checkpointing_changes_nothing(dtype):
    x, w, g = tensors(dtype)

    def block(x: Tensor) -> Tensor:
        return torch.tanh(quantized_linear(torch.tanh(x), w, LinearPrecision.uniform("fp4"), key=KEY))

    plain = torch.autograd.grad(block(x), (x, w), g)
    recomputed = torch.autograd.grad(checkpoint(block, x, use_reentrant=False), (x, w), g)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("needed", ["x", "w"])
def test_only_the_needed_gradient_is_computed(needed, monkeypatch):
    both = run(LinearPrecision.uniform("fp4"))
    x, w, g = tensors()
    (w if needed == "x" else x).requires_grad_(False)
    y = quantized_linear(x, w, LinearPrecision.uniform("fp4"), key=KEY)
    with counted_casts() as casts:
        y.backward(g)
    assert {(role, dim) for role, dim, _ in casts if role == "grad_output"} == {
        ("grad_output", 1 if needed == "x" else 0)
    }
    assert torch.equal((x if needed == "x" else w).grad, both["dgrad" if needed == "x" else "wgrad"])


def test_gradients_that_are_expanded_or_transposed():
    x, w, _ = tensors()
    precision = LinearPrecision.uniform("fp4")
    y = quantized_linear(x, w, precision, key=KEY)
    summed = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    ones = torch.autograd.grad(y, (x, w), torch.ones(T, N))
    assert all(torch.equal(a, b) for a, b in zip(summed, ones, strict=True))


def test_a_second_derivative_is_refused():
    x, w, g = tensors()
    y = quantized_linear(x, w, LinearPrecision.uniform("fp8"), key=KEY)
    (grad_x,) = torch.autograd.grad(y, x, g.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_x.sum().backward()


def test_without_a_key_stochastic_gemms_are_refused_before_any_work():
    x, w, _ = tensors()
    for precision, gemm in (("fp8/fp4/fp8", "dgrad"), ("fp8/fp8/fp4", "wgrad")):
        with pytest.raises(ValueError, match=f"{gemm} in fp4 rounds grad_output stochastically"):
            quantized_linear(x, w, LinearPrecision.parse(precision), key=None)
    quantized_linear(x, w, LinearPrecision.parse("fp4/fp8/fp8"), key=None)
    with torch.no_grad():  # evaluation has no backward, so it needs no key
        quantized_linear(x, w, LinearPrecision.uniform("fp4"), key=None)


def test_bad_calls_raise():
    x, w, _ = tensors()
    assert "emulated" in list(LINEAR_IMPLS)
    with pytest.raises(ValueError, match=r"'cublas' is unknown; known: auto, emulated"):
        quantized_linear(x, w, BF16, key=None, impl="cublas")
    with pytest.raises(ValueError, match=r"\[300, 200\] and w \[200, 140\]"):
        quantized_linear(x, w.T, BF16, key=None)
    with pytest.raises(ValueError, match=r"\[2, 150, 200\]"):
        quantized_linear(x.view(2, 150, K), w, BF16, key=None)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ValueError, match=rf"x is {dtype}; convert it to bfloat16 or float32"):
            quantized_linear(x.to(dtype), w.to(dtype), LinearPrecision.uniform("fp8"), key=None)
    with pytest.raises(ValueError, match=r"w is torch\.bfloat16"):
        quantized_linear(x, w.bfloat16(), BF16, key=None)
    with pytest.raises(ValueError, match=r"scaled_mm cannot run fp8 here.*Hopper.*use --linear-impl auto or emulated"):
        quantized_linear(x, w, LinearPrecision.uniform("fp8"), key=None, impl="scaled_mm")


@pytest.mark.parametrize(("fmt", "slope"), [("mxfp4", 1.0), ("mxfp4_floor", 0.97)])
def test_wgrad_in_mxfp4_has_no_bias(fmt, slope):
    """Its mean over draws is the gradient without rounding; under OCP's rule clamped elements make it smaller."""
    random = torch.Generator().manual_seed(1)
    x, w, noise = (torch.randn(shape, generator=random) for shape in ((512, 64), (64, 64), (512, 64)))
    g, w = noise + x / 2, w.requires_grad_()
    exact, mean = g.T @ x, torch.zeros(64, 64)
    for iteration in range(200):
        key = RoundingKey(1, iteration, 7)
        y = quantized_linear(x, w, LinearPrecision.parse(f"bf16/bf16/{fmt}"), key=key)
        mean += torch.autograd.grad(y, w, g)[0] / 200
    assert (mean * exact).sum() / exact.square().sum() == pytest.approx(slope, abs=2e-3 if fmt == "mxfp4" else 6e-3)
    if fmt == "mxfp4":
        assert (mean - exact).norm() / exact.norm() < 0.02
