"""Runs the kernels of cross entropy in Triton's interpreter, on CPU, against torch's operators.

``python -m tests.unit.parallel.interpreted`` with TRITON_INTERPRET=1, which triton reads when it is imported;
test_loss.py starts it in a process of its own.  Prints what differs and exits 1 if anything does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.mesh import Axis
from megatron_snip.parallel import loss
from tests.unit.quant.kernels.instructions import as_instructions_round

ROWS, COLUMNS = 5, 9002  # two blocks of columns and part of a third


class Ranks:
    """Ranks of an axis as threads, which launch one at a time: the interpreter is not made for several."""

    def __init__(self, size: int) -> None:
        self.size, self.shared, self.lock, self.real = size, [], threading.Lock(), loss.launch
        self.met = threading.Barrier(size, self._reduce)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, group: object = None) -> None:
        """What dist.all_reduce does."""
        with self.lock:
            self.shared.append(x)
        self.highest = op == dist.ReduceOp.MAX
        self.met.wait()

    def _reduce(self) -> None:
        stacked = torch.stack(self.shared)
        for x in self.shared:
            x.copy_(stacked.amax(0) if self.highest else stacked.sum(0))
        self.shared.clear()

    def launch(self, *arguments: object) -> None:
        """``loss.launch``, one at a time."""
        with self.lock:
            self.real(*arguments)

    def run(self, logits: Tensor, labels: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of every rank [size, T] and the gradient [T, V]."""
        parts = [part.clone() for part in logits.chunk(self.size, -1)]
        axes = [Axis(self.size, rank, None) for rank in range(self.size)]  # type: ignore[arg-type]
        with (
            mock.patch.object(dist, "all_reduce", self.all_reduce),
            mock.patch.object(loss, "launch", self.launch),
            ThreadPoolExecutor(self.size) as pool,
        ):
            losses = [*pool.map(lambda part, axis: loss._fused(part, labels, axis, scale), parts, axes)]
        return torch.stack(losses), torch.cat(parts, -1)


def differences() -> Iterator[str]:
    """Which losses and gradients are not those of float64, and which logits change that should not."""
    for dtype in (torch.float32, torch.bfloat16):
        for size, spread in ((1, 1.0), (2, 3.0), (2, 1e4)):
            generator = torch.Generator().manual_seed(0)
            logits = (spread * torch.randn(ROWS, COLUMNS, generator=generator)).to(dtype)
            logits[0, 7] = -torch.inf
            labels = torch.tensor([[0, 4500, 4501, COLUMNS - 1, 77]] * 2).T.contiguous()[:, 0]
            scale = torch.randn(1, generator=generator).expand(ROWS)  # as the gradient of a mean is
            exact = logits.double().requires_grad_()
            expected = F.cross_entropy(exact, labels, reduction="none")
            (gradient,) = torch.autograd.grad(expected, exact, scale.double())
            losses, made = Ranks(size).run(logits, labels, scale)
            if not torch.allclose(losses.double(), expected.expand(size, -1), rtol=1e-6, atol=2e-6):
                yield f"losses of {dtype} on {size} times {spread}: {(losses - expected).abs().max()}"
            tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
            if not torch.allclose(made.double(), gradient, rtol=tolerance, atol=1e-9):
                yield f"gradients of {dtype} on {size} times {spread}: {(made - gradient).abs().max()}"
            before = logits.clone()
            again = loss._fused(logits, labels, Axis(1, 0, None), None)  # type: ignore[arg-type]
            if not torch.equal(logits, before) or (size == 1 and not torch.equal(again, losses[0])):
                yield f"losses alone of {dtype}"
    yield from of_special_numbers(logits, labels, scale)
    yield from of_rows_apart(logits, labels, scale)


def of_special_numbers(logits: Tensor, labels: Tensor, scale: Tensor) -> Iterator[str]:
    """Where a NaN, infinities, or a row that one rank has as -inf throughout give other losses than torch's."""
    special = logits.clone()
    special[1, 3], special[2, -1], special[3, : COLUMNS // 2] = torch.nan, torch.inf, -torch.inf
    expected = F.cross_entropy(special.double(), labels, reduction="none")
    assert expected.isnan().tolist() == [False, True, True, False, False]
    for size in (1, 2):
        losses, made = Ranks(size).run(special, labels, scale)
        if not torch.allclose(losses.double(), expected.expand(size, -1), rtol=1e-5, equal_nan=True):
            yield f"special numbers on {size}: {losses.tolist()}"
        if made.isnan().all(-1).tolist() != [False, True, True, False, False] or made[3].isnan().any():
            yield f"gradients of special numbers on {size}"


def of_rows_apart(logits: Tensor, labels: Tensor, scale: Tensor) -> Iterator[str]:
    """Whether rows that stand apart are found, and what is between them is not touched."""
    wide = torch.cat([logits, torch.full_like(logits, 7.0)], -1)
    part, alone = wide[:, :COLUMNS], logits.clone()
    axis = Axis(1, 0, None)  # type: ignore[arg-type]
    losses = [loss._fused(each, labels, axis, scale) for each in (part, alone)]
    if not torch.equal(*losses) or not torch.equal(part, alone) or not (wide[:, COLUMNS:] == 7.0).all():
        yield "rows that stand apart"


def main() -> int:
    """0 if nothing differs."""
    with as_instructions_round():
        problems = [*differences()]
    print("\n".join([*problems, f"{len(problems)} differences"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
