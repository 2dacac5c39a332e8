"""The simulator that counts bubbles gives what is known in closed form."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from benchmarks.bubble import Costs, of_torch, one_f_one_b, run

EVEN = Costs(forward=1.0, backward_input=1.0, backward_weight=1.0)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 2), (4, 8), (4, 9)])
def test_1f1b(pp, microbatches):
    """Source: arXiv 2104.04473, section 2.2: (p - 1) / m of the ideal time."""
    idle, held = run(one_f_one_b(pp, microbatches), [EVEN] * pp, [5] * pp)
    assert idle == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert held == 5 * pp


@pytest.mark.parametrize(("pp", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 5)])
def test_interleaved(pp, microbatches, chunks):
    """Source: the same, (p - 1) / (v m)."""
    stages = pp * chunks
    idle, _ = run(of_torch(ScheduleInterleaved1F1B, pp, microbatches, chunks), [EVEN] * stages, [1] * stages)
    assert idle == pytest.approx((pp - 1) / (chunks * microbatches + pp - 1))


def test_zero_bubble_has_the_ends_alone():
    """ZBV waits to fill the pipeline and no more, where all operations take as long: arXiv 2401.10241, section 6."""
    pp, microbatches = 4, 16
    idle, held = run(of_torch(ScheduleZBVZeroBubble, pp, microbatches, 2), [EVEN] * 2 * pp, [1] * 2 * pp)
    assert idle == pytest.approx((pp - 1) / (6 * microbatches + pp - 1))
    assert held == 2 * pp


def test_the_slowest_stage_sets_the_pace():
    slow = Costs(2.0, 2.0, 2.0)
    idle, _ = run(one_f_one_b(2, 100), [EVEN, slow], [1, 1])
    assert idle == pytest.approx(0.25, abs=0.01)
