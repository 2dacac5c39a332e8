"""The examples of docs/numerics.md run, and its table has the code's numbers."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

from megatron_snip import quant
from megatron_snip.formats import ROW, format_names, get_format
from megatron_snip.quant import LinearPrecision, RoundingKey, quantize, quantized_linear

TEXT = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text()


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})


def test_the_linear_of_the_packages_docstring_is_ours():
    """To the bit, and short enough to be read first."""
    text = quant.__doc__
    assert text is not None and len(text.splitlines()) <= 60
    code = textwrap.dedent(text[text.index("    def q(") : text.index("`quantized_linear` gives")])
    x, w, g = (torch.randn(shape, requires_grad=True) for shape in ((256, 160), (130, 160), (256, 130)))
    known = {"x": x.detach(), "w": w.detach(), "g": g.detach(), "fake_quantize": quant.fake_quantize}
    exec(code, known)
    y = quantized_linear(x, w, LinearPrecision.uniform("fp8"), key=None)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), g.detach())
    for name, ours in (("y", y), ("grad_x", grad_x), ("grad_w", grad_w)):
        assert torch.equal(ours, known[name]), name


@pytest.mark.parametrize(
    ("name", "heavy", "share", "beyond", "relative", "bias"),
    [
        ("mxfp4_floor", False, 0.024, 0.82, 0.114, (0.040, 0.042)),
        ("mxfp4_floor", True, 0.015, 0.91, 0.125, (0.05, 0.15)),
        ("nvfp4_plain", False, 0.035, 0.135, 0.022, (0.0099, 0.0103)),
        ("nvfp4_plain", True, 0.033, 0.140, 0.0225, (0.011, 0.023)),
        ("fp4", False, 0.0, 0.0, 0.0, (0.0, 1e-7)),
        ("fp4_pow2", True, 0.0, 0.0, 0.0, (0.0, 0.0)),
    ],
)
def test_the_clamp_takes_what_its_table_says(name, heavy, share, beyond, relative, bias):
    """Of numbers of one seed; in every draw a clamped element is the largest value."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=random)
    if heavy:
        x = x * torch.randn(512, 1024, generator=random).exp() ** 2
    fmt = get_format(name)
    q = quantize(x, fmt, role="grad_output", dim=1, key=RoundingKey(1, 1, 1))
    scales = q.scales.double() * (1.0 if q.tensor_scale is None else q.tensor_scale.double())
    step = scales.repeat_interleave(fmt.tile, dim=1)
    size = x.abs() / step
    over = size > fmt.element.max * (1 + 1e-6)
    torch.testing.assert_close(q.dequantize().double().abs()[over], fmt.element.max * step[over], rtol=1e-6, atol=0.0)
    excess = torch.where(over, size - fmt.element.max, 0.0)
    assert over.double().mean() == pytest.approx(share, rel=0.04)
    assert excess.sum() / over.sum().clamp(min=1) == pytest.approx(beyond, rel=0.02)
    assert (excess / size).sum() / over.sum().clamp(min=1) == pytest.approx(relative, rel=0.02)
    assert bias[0] <= (excess * step).norm() / x.double().norm() <= bias[1]


def test_the_table_is_that_of_the_formats():
    section = TEXT[TEXT.index("## Formats") : TEXT.index("## Blocks and scales")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "| `" in line]
    assert [row[0].strip("`") for row in rows] == format_names()
    for row in rows:
        fmt = get_format(row[0].strip("`"))
        if not fmt.quantised:
            assert [*row[1:5], row[5]] == [*"----", "16"]
            continue
        assert row[1] == "/".join(element.name for element in fmt.elements)
        numbers = [
            [2.0 ** int(n[2:]) if n.startswith("2^") else float(n) for n in cell.split("/")] for cell in row[2:6]
        ]
        columns = [[getattr(one, name) for one in fmt.elements] for name in ("max", "min_normal", "min_subnormal")]
        assert numbers == [*columns, [fmt.bits_per_element]]
        shapes = [fmt.block_shape(role, 1) for role in ("input", "weight")]
        assert row[6:8] == ["row" if ROW in one else "x".join(map(str, one)) for one in shapes]
        assert row[8:] == [fmt.scale, ", ".join(sorted(fmt.stochastic_roles)) or "-"]
