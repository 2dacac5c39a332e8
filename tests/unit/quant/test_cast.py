"""The casts against ml_dtypes, the expected errors and the special values, whatever computes them."""

from __future__ import annotations

import itertools

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_snip.formats import SCALES, Format, format_names, get_format
from megatron_snip.formats.element import element_named
from megatron_snip.quant import RoundingKey, fake_quantize, quantize
from megatron_snip.quant.casts.cast import Form, finite_amax
from megatron_snip.quant.casts.rounding import random_bits
from megatron_snip.quant.kernels.dispatch import transformed
from tests.unit.quant.elements import gfloat_format
from tests.unit.quant.specification import fake_quantize_reference, quantize_reference

INDEPENDENT = {
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp4": ml_dtypes.float4_e2m1fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m4": ml_dtypes.float8_e3m4,
}
CASTS = [
    pytest.param((fake_quantize, quantize), id="dispatched"),
    pytest.param((fake_quantize_reference, quantize_reference), id="specification"),
]
KEY = RoundingKey(seed=1, iteration=2, stream=3)
INF, NAN = float("inf"), float("nan")


def one_scale_tiles(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """Values of at most the element's max as rows whose first element is the max, so that encode is 1."""
    largest = get_format(fmt).element.max
    rows = -(-values.numel() // 127)
    tiles = torch.zeros(rows, 128)
    tiles[:, 1:] = torch.nn.functional.pad(values, (0, rows * 127 - values.numel())).view(rows, 127)
    tiles[:, 0] = largest
    return tiles


def all_bf16_up_to(largest: float) -> torch.Tensor:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return patterns[patterns.abs() <= largest]


def ties_and_neighbours(fmt: str) -> torch.Tensor:
    """Each grid value and tie between two, and the float32 numbers next to it, of both signs."""
    grid = torch.tensor(get_format(fmt).element.values())
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    down, up = (torch.nextafter(points, torch.tensor(end)) for end in (-INF, INF))
    near = torch.cat([points, down, up])
    near = near[near.abs() <= grid[-1]]
    return torch.cat([near, -near])


@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.parametrize("fmt", INDEPENDENT)
def test_nearest_rounding_is_that_of_ml_dtypes(fmt, casts):
    values = torch.cat([all_bf16_up_to(get_format(fmt).element.max), ties_and_neighbours(fmt)])
    x = one_scale_tiles(values, fmt)
    theirs = x.numpy().astype(INDEPENDENT[fmt])
    expected = theirs.astype(np.float32)
    y = casts[0](x, fmt, role="input", dim=1).numpy()
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(np.signbit(y), np.signbit(expected))
    np.testing.assert_array_equal(casts[1](x, fmt, role="input", dim=1).codes.numpy(), theirs.view(np.uint8))


@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.parametrize(
    ("fmt", "rounding", "expected"),
    [("fp8", "nearest", 0.0257), ("fp4", "nearest", 0.109), ("fp4", "stochastic", 0.155)],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_relative_error_on_normal_numbers(fmt, rounding, expected, dim, casts):
    x = torch.randn(512, 384, generator=torch.Generator().manual_seed(0))
    y = casts[0](x, fmt, role="input", dim=dim, rounding=rounding, key=KEY)
    assert float((y - x).norm() / x.norm()) == pytest.approx(expected, rel=0.02)


def test_codes_and_scales_by_hand():
    x = torch.tensor([[3.0, -1.1, 0.0, 0.2, 1.25]])
    q = quantize(x, "fp4", role="input", dim=1)
    # encode = 6 / 3: 6, -2.2 -> -2, 0, 0.4 -> 0.5, 2.5 -> 2 (a tie, to the even code)
    assert q.codes.tolist() == [[7, 8 + 4, 0, 1, 4]]
    assert q.scales.tolist() == [[0.5]]
    assert q.dequantize(torch.float32).tolist() == [[3.0, -1.0, 0.0, 0.25, 1.0]]


@pytest.mark.parametrize(
    ("role", "dim", "blocks"),
    [("input", 1, (4, 3)), ("input", 0, (2, 300)), ("weight", 1, (2, 3)), ("weight", 0, (2, 3))],
)
def test_each_block_has_the_scale_of_its_own_amax(role, dim, blocks):
    x = torch.randn(130, 300) if blocks[0] == 2 else torch.randn(4, 300)
    q = quantize(x, "fp8", role=role, dim=dim)
    assert q.scales.shape == blocks
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            block = x[i * q.block[0] : (i + 1) * q.block[0], j * q.block[1] : (j + 1) * q.block[1]]
            assert q.scales[i, j] == 1 / (torch.tensor(448.0) / block.abs().max())


@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp8_e5m2", "e3m2"])
def test_special_values(fmt, rounding, dtype, casts):
    def cast(row: list[float]) -> torch.Tensor:
        x = torch.tensor([row], dtype=dtype)
        y = casts[0](x, fmt, role="input", dim=1, rounding=rounding, key=KEY)
        assert y.dtype == dtype and y.shape == x.shape
        return y[0].float()

    y = cast([NAN, INF, -INF, -0.0, 0.0, 2.0, -2.0])
    assert y[0].isnan() and y[1:].tolist() == [2.0, -2.0, 0.0, 0.0, 2.0, -2.0]
    assert y.signbit().tolist()[1:] == [False, True, True, False, False, True]
    zeros = cast([0.0, -0.0, 0.0])
    assert zeros.tolist() == [0.0] * 3 and zeros.signbit().tolist() == [False, True, False]
    only_infinite = cast([INF, 0.0, NAN])
    assert only_infinite[:2].tolist() == [0.0, 0.0] and only_infinite[2].isnan()
    assert cast([-1e-30, 1.0]).signbit().tolist() == [True, False]
    for size in (1e-37, 1e-39, 3.3e38, float(torch.finfo(dtype).max)):
        # A subnormal scale has few digits, so the largest element itself is only roughly kept.
        y = cast([size, -size])
        assert y.isfinite().all() and y.signbit().tolist() == [False, True]
        assert rounding == "stochastic" or torch.equal(y[1], -y[0])  # each of the two has a draw of its own
        assert float(y[0]) == pytest.approx(size, rel=0.26 if size < 1e-38 else 0.01)


@pytest.mark.parametrize("casts", CASTS)
def test_amax_whose_encode_overflows_takes_the_largest_float32(casts):
    q = casts[1](torch.tensor([[1e-37, -3e-38]]), "fp8", role="input", dim=1)
    largest = torch.tensor(torch.finfo(torch.float32).max)
    assert torch.equal(q.scales, (1 / largest).view(1, 1))
    assert q.codes[0, 0] == 0x61  # 1e-37 * largest = 34.03, past the tie between 32 and 36: 2**5 * 1.125


@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp8_e5m2", "e3m2"])
@pytest.mark.parametrize(("role", "dim"), [("input", 1), ("grad_output", 0), ("weight", 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantized_codes_are_the_fake_quantized_tensor(fmt, role, dim, dtype):
    x = torch.randn(131, 200).to(dtype)
    y = fake_quantize(x, fmt, role=role, dim=dim, key=KEY)
    assert torch.equal(quantize(x, fmt, role=role, dim=dim, key=KEY).dequantize(dtype), y)


def test_stochastic_rounding_is_unbiased_in_every_interval():
    grid = torch.tensor(get_format("fp4").element.values())
    draws, share = 1_000_000, 0.3
    for index, (lower, upper) in enumerate(itertools.pairwise(grid)):
        value = lower + share * (upper - lower)
        x = value.repeat(7875, 128)
        x[:, 0] = 6.0
        key = RoundingKey(seed=0, iteration=index, stream=0)
        y = fake_quantize(x, "fp4", role="input", dim=1, rounding="stochastic", key=key)
        y = y[:, 1:].flatten()[:draws]
        assert y.numel() == draws and set(y.tolist()) == {float(lower), float(upper)}
        error = float(y.double().mean() - value.double())
        assert abs(error) < 5 * float(upper - lower) * (share * (1 - share) / draws) ** 0.5


@pytest.mark.parametrize("casts", CASTS)
def test_stochastic_rounding_goes_up_exactly_when_the_draw_is_below_the_distance(casts):
    """In E2M1's lowest interval, whose step is 0.5: away from the draw, at it, and one ulp above it."""
    draws = (random_bits(KEY, 64, 128) + 0.5) * 2.0**-16
    for distance, up in [
        (torch.rand(64, 128), None),
        (draws, False),
        (torch.nextafter(draws, torch.tensor(1.0)), True),
    ]:
        x = distance * 0.5
        x[:, 0] = 6.0
        y = casts[0](x, "fp4", role="input", dim=1, rounding="stochastic", key=KEY)
        expected = draws < distance if up is None else torch.full((64, 128), up)
        assert torch.equal(y[:, 1:], expected[:, 1:] * 0.5)
        assert torch.equal(y[:, 0], x[:, 0])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("role", "dim"), [("input", 1), ("grad_output", 0), ("weight", 0)])
def test_an_aligned_shard_is_the_slice_of_the_whole(role, dim, rounding):
    x = torch.randn(512, 512)
    whole = quantize(x, "fp4", role=role, dim=dim, rounding=rounding, key=RoundingKey(1, 2, 3, 640, 1280))
    high, wide = whole.block
    by_columns = (slice(0, 512), slice(128, 384))
    by_rows = (slice(256, 384), slice(0, 512))
    for rows, cols in (by_columns, by_rows, (slice(128, 256), slice(384, 512))):
        key = RoundingKey(1, 2, 3, 640 + rows.start, 1280 + cols.start)
        part = quantize(x[rows, cols], "fp4", role=role, dim=dim, rounding=rounding, key=key)
        assert torch.equal(part.codes, whole.codes[rows, cols])
        scales = whole.scales[rows.start // high : rows.stop // high, cols.start // wide : cols.stop // wide]
        assert torch.equal(part.scales, scales)


@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fmt", ["fp4", "mxfp4", "nvfp4_plain", "nvfp4"])
def test_tensor_parallel_shards_are_rounded_as_the_whole(fmt, dim, cut, tp, casts):
    """Stochastically, cut by rows or columns: the bits belong to the position, and nvfp4_plain's amax to the whole."""
    x = torch.randn(512, 512).bfloat16()
    whole = casts[1](x, fmt, role="grad_output", dim=dim, key=KEY)
    amax = finite_amax(transformed(x, Form(get_format(fmt), "grad_output", dim)))
    step = 512 // tp
    for rank in range(tp):
        rows, cols = (slice(rank * step, (rank + 1) * step) if side == cut else slice(0, 512) for side in (0, 1))
        key = RoundingKey(KEY.seed, KEY.iteration, KEY.stream, rows.start, cols.start)
        part = casts[1](x[rows, cols].contiguous(), fmt, role="grad_output", dim=dim, key=key, amax=amax)
        assert torch.equal(part.codes, whole.codes[rows, cols])
        values = whole.dequantize(torch.bfloat16)[rows, cols]
        assert torch.equal(part.dequantize(torch.bfloat16), values)


@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.parametrize(("role", "dim"), [("input", 1), ("input", 0), ("weight", 1)])
@pytest.mark.parametrize("scale", SCALES)
def test_a_format_of_ones_own_is_one_literal(scale, role, dim, casts):
    """Any grid and any block: here E3M3 in tiles of 37, weights in 11x11, over edges that no block divides."""
    fmt = Format("own", element_named(3, 3), tile=37, weight_block=11, scale=scale)
    x = torch.randn(100, 90, generator=torch.Generator().manual_seed(0))
    q = casts[1](x, fmt, role=role, dim=dim)
    high, wide = fmt.block_shape(role, dim)
    assert q.block == (high, wide) and q.scales.shape == (-(-100 // high), -(-90 // wide))
    y = casts[0](x, fmt, role=role, dim=dim)
    assert torch.equal(y, q.dequantize())
    assert float((y - x).norm() / x.norm()) == pytest.approx(0.027, rel=0.2)
    part = casts[1](x[high:, wide:].contiguous(), fmt, role=role, dim=dim, amax=finite_amax(x))
    assert torch.equal(part.codes, q.codes[high:, wide:]) and torch.equal(part.scales, q.scales[1:, 1:])


@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.parametrize("fmt", [name for name in format_names() if get_format(name).quantised])
def test_saturated_elements_are_those_beyond_the_largest_value_and_infinities(fmt, casts):
    """By the definition: on a grid that goes on above the element's largest value they would round to more."""
    x = torch.randn(64, 256).bfloat16()
    x[3, 7], x[40, 1], x[5, 5] = INF, -INF, NAN
    q = casts[1](x, fmt, role="input", dim=1, rounding="nearest")
    scales = q.scales if q.tensor_scale is None else q.scales * q.tensor_scale
    encode = 1 / scales.double().repeat_interleave(min(q.block[1], 256), 1)
    sizes = (x.double() * encode).abs()
    endless = gfloat.round_ndarray(gfloat_format(q.fmt.element, more_exponents=1), sizes.float().double().numpy())
    over = torch.from_numpy(endless) > q.fmt.element.max
    assert int(q.saturated) == int(over.sum())
    assert (int(over.sum()) > 2) == (q.fmt.scale == "e8m0")  # whose scales leave some of amax's binade outside
    top = q.fmt.element.max_code
    assert torch.equal(q.codes[over] & (q.fmt.element.sign_code - 1), torch.full((int(over.sum()),), top))


def test_rounding_none_takes_the_formats_rule():
    x = torch.randn(64, 128)

    def cast(role: str, rounding: str | None) -> torch.Tensor:
        return fake_quantize(x, "fp4", role=role, dim=1, rounding=rounding, key=KEY)

    assert torch.equal(cast("grad_output", None), cast("grad_output", "stochastic"))
    assert torch.equal(cast("input", None), cast("input", "nearest"))
    assert not torch.equal(cast("input", "nearest"), cast("input", "stochastic"))


@pytest.mark.parametrize("casts", CASTS)
def test_bf16_keeps_the_operand(casts):
    x = torch.randn(3, 5)
    assert casts[0](x, "bf16", role="grad_output", dim=0) is x
    assert torch.equal(casts[1](x, "bf16", role="input", dim=0).dequantize(torch.float32), x)


@pytest.mark.parametrize("casts", CASTS)
@pytest.mark.parametrize("which", [0, 1])
def test_bad_calls_raise(casts, which):
    cast, x = casts[which], torch.randn(4, 4)
    with pytest.raises(ValueError, match="known: bf16"):
        cast(x, "fp5", role="input", dim=1)
    with pytest.raises(ValueError, match="grad_output rounds stochastically"):
        cast(x, "fp4", role="grad_output", dim=1)
    with pytest.raises(ValueError, match=r"\[4, 4, 1\]"):
        cast(x[..., None], "fp4", role="input", dim=1)
    with pytest.raises(ValueError, match="dim=-1"):
        cast(x, "fp4", role="input", dim=-1)
    with pytest.raises(ValueError, match="role='bias'"):
        cast(x, "fp4", role="bias", dim=1)
    with pytest.raises(ValueError, match="rounding='up'"):
        cast(x, "fp4", role="input", dim=1, rounding="up")
    with pytest.raises(ValueError, match="float16"):
        cast(x.half(), "fp4", role="input", dim=1)


@pytest.mark.parametrize("casts", CASTS)
def test_the_result_carries_no_gradient_and_leaves_the_operand_alone(casts):
    x = torch.randn(130, 130, requires_grad=True)
    before = x.detach().clone()
    assert not casts[0](x, "fp8", role="input", dim=1).requires_grad
    assert torch.equal(x, before)


def test_a_form_is_given_a_key_as_if_it_had_been_made_with_it():
    for name, dim in itertools.product(("fp4", "nvfp4"), (0, 1)):
        bare, made = (Form(get_format(name), "grad_output", dim, key) for key in (None, KEY))
        keyed = bare.with_key(KEY)
        assert vars(keyed) == vars(made) and (keyed, hash(keyed)) == (made, hash(made))
        assert bare.key is None and keyed != bare
