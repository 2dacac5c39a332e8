# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""The Triton kernels of cross entropy; loss.py launches them.

They read logits twice and write their gradient once, where torch's operators read and write float32 nine times.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def softmax_kernel(
    logits, stride, labels, first_column, top, total, at_label, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Find the largest z, the sum of exp(z - largest) and the label's z in a row of logits [rows, COLUMNS].

    logits: last stride 1.  labels: int64 [rows], global.  first_column: column 0's id.  at_label is 0 if another rank
    has the label.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # Each lane keeps its own maximum and sum.  Maxima start at the lowest number, since inf - inf would be NaN.
    largest = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        inside = first + lane < COLUMNS
        z = tl.load(logits + row * stride + first + lane, mask=inside, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(before, z)
        sums = sums * tl.exp(before - largest) + tl.exp(z - largest)
    highest = tl.max(largest)
    tl.store(top + row, highest)
    tl.store(total + row, tl.sum(sums * tl.exp(largest - highest)))
    column = tl.load(labels + row) - first_column
    here = (column >= 0) & (column < COLUMNS)
    tl.store(at_label + row, tl.load(logits + row * stride + column, mask=here, other=0.0).to(tl.float32))


@triton.jit
def gradient_kernel(
    logits, stride, labels, first_column, top, total, scale, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write scale * (softmax - onehot(label)) over BLOCK columns of a row of logits.  scale: [rows]; rest as above."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < COLUMNS, logits + row * stride + column
    of_row = tl.load(scale + row)
    z = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.exp(z - tl.load(top + row)) * (of_row / tl.load(total + row))
    grad -= tl.where(column == tl.load(labels + row) - first_column, of_row, 0.0)
    tl.store(at, grad.to(logits.dtype.element_ty), mask=inside)
# fmt: on
