"""The program's answer is the best of all plans, and it says by how much memory is short."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.train.dry_run.counts import Stretch
from megatron_snip.train.dry_run.phases import OUTSIDE, Phase, Phases
from megatron_snip.train.dry_run.units import State, Units
from megatron_snip.train.memory_plan.program import GIB, Peaks, Runs, host_peaks_of, peaks_of, solve
from megatron_snip.train.memory_plan.rates import rates_of

PLAIN = Stretch("iteration, bf16", {}, {}, 0)


def made_up(blocks: int, seed: int, flight: int = 3) -> tuple[Peaks, np.ndarray]:
    """A rank whose blocks keep and take what is drawn."""
    draw = np.random.default_rng(seed)
    kept = np.sort(draw.integers(1, 1000, (blocks, 3)), axis=1)[:, ::-1]
    inside = np.sort(draw.integers(1, 800, (blocks, 3)), axis=1)
    seconds = np.cumsum(draw.random((blocks, 3)), axis=1)
    return peaks_of(runs_of(kept, inside, flight)), seconds


def runs_of(
    kept: np.ndarray, inside: np.ndarray, flight: int, less: int = 0, on_host: np.ndarray | None = None
) -> Runs:
    """Dry runs of a last microbatch's backward, with ``flight`` - 1 others in flight.

    on_host [B]: what the last choice keeps there.
    """
    blocks, choices = tuple(range(len(kept))), kept.shape[1]
    by_choice = {}
    for choice in range(choices):
        there = np.zeros(len(kept), int) if on_host is None or choice < choices - 1 else on_host
        order = [
            Phase(
                OUTSIDE,
                5000 + flight * int(kept[:, choice].sum()),
                held(kept[:, choice], flight),
                flight,
                held(there, flight),
            )
        ]
        for b in reversed(blocks):
            flying = [flight - (i >= b) for i in blocks]
            now = {i: int(kept[i, choice]) * flying[i] for i in blocks}
            host = {i: int(there[i]) * flying[i] for i in blocks}
            own = int(kept[b, choice]) + int(inside[b, choice])
            order.append(Phase(b, 4000 + 100 * b + own + sum(now.values()), now, flight - 1, host))
        each, each_host = ({b: int(of[b]) for b in blocks} for of in (kept[:, choice], there))
        by_choice[f"choice {choice}"] = [(PLAIN, Phases(tuple(order), {}, each, each_host=each_host))]
    return Runs(0, blocks, by_choice, less)


def held(kept: np.ndarray, times: int) -> dict[int, int]:
    return {b: int(size) * times for b, size in enumerate(kept)}


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_all_plans(blocks, seed):
    peaks, seconds = made_up(blocks, seed)
    plans = list(product(range(3), repeat=blocks))
    totals = np.array([peaks.of(plan)[0] for plan in plans])
    times = np.array([seconds[np.arange(blocks), plan].sum() for plan in plans])
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        budget = int(totals.min() + share * (totals.max() - totals.min()))
        found = solve(peaks, seconds, budget, "pipeline rank 0")
        assert found.seconds == pytest.approx(times[totals <= budget].min(), abs=1e-9)
        assert found.peak == peaks.of(found.choice)[0] <= budget and found.status == "optimal" and found.gap < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_all_plans_with_states_on_the_host_and_gathered_blocks(seed):
    """And with activations on the host, which the last choice has."""
    draw, blocks, yes = np.random.default_rng(seed), 2, list(product(range(2), repeat=5))
    kept = np.sort(draw.integers(1, 1000, (blocks, 3)), axis=1)[:, ::-1]
    inside, sizes = np.sort(draw.integers(1, 800, (blocks, 3)), axis=1), draw.integers(100, 900, (2, 5))
    states = {
        unit: State(*(int(one) for one in sizes[:, i])) for i, unit in enumerate(("layers.0", "layers.1", "norm"))
    }
    gathered, waiting = (300, 500), [(0, 1), (), (0,)]  # outside, and in the backward of blocks 1 and 0

    def with_units(found: list) -> list:
        (plain, phases), units = found[0], Units(states, dict(enumerate(gathered)))
        order = [replace(phase, waiting=frozenset(b)) for phase, b in zip(phases.order, waiting, strict=True)]
        return [(plain, replace(phases, order=tuple(order), units=units))]

    sent = draw.integers(100, 900, blocks)
    plain = runs_of(kept, inside, 3, on_host=sent)
    by_choice = {name: with_units(found) for name, found in plain.by_choice.items()}
    runs = replace(plain, by_choice=by_choice, states=tuple(states))
    seconds = np.cumsum(draw.random((blocks + 5, 3)), axis=1)
    seconds[blocks:] = np.column_stack([draw.random((5, 2)), np.full(5, np.inf)])
    peaks, host = peaks_of(runs), host_peaks_of(runs)
    plans = [(*a, *b) for a, b in product(product(range(3), repeat=blocks), yes)]
    totals, theirs = [], []
    for *choice, stays_0, stays_1, a, b, c in plans:
        away = [one for one, there in zip(states.values(), (a, b, c), strict=True) if there]
        more = [stays_0 * (0 in at) * 300 + stays_1 * (1 in at) * 500 for at in waiting]
        each = [peak_in(plain, phase, choice) + more[phase] for phase in range(3)]
        totals.append(max(each) - sum(one.device for one in away))
        left = sum(int(size) for size, one in zip(sent, choice, strict=True) if one == 2)
        theirs.append(sum(one.host for one in away) + 3 * left)  # three microbatches are in flight
    assert [peaks.of(plan)[0] for plan in plans] == totals and [host.of(plan)[0] for plan in plans] == theirs
    times = np.array([seconds[np.arange(blocks + 5), plan].sum() for plan in plans])
    for share, there in product((0.1, 0.5, 0.9), (0.4, 1.0)):
        budget = int(min(totals) + share * (max(totals) - min(totals)))
        limit = int(there * max(theirs))
        fits = (np.array(totals) <= budget) & (np.array(theirs) <= limit)
        if fits.any():
            found = solve(peaks, seconds, budget, "it", host, limit)
            assert found.seconds == pytest.approx(times[fits].min(), abs=1e-9)
            assert found.peak <= budget and found.host == host.of(found.choice)[0] <= limit


def peak_in(runs: Runs, phase: int, choice: list[int]) -> int:
    """Bytes at the peak of a phase, summed by hand from the dry runs with one choice everywhere."""
    of = [found[0][1].order[phase] for found in runs.by_choice.values()]
    block = of[0].block
    own = max(one.peak - sum(one.kept.values()) for one in (of if block == OUTSIDE else [of[choice[block]]]))
    return own + sum(of[one].kept[b] for b, one in enumerate(choice))


@pytest.mark.parametrize("blocks", [1, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_best_of_all_plans_within_the_hosts_memory(blocks, seed):
    """The last choice keeps nothing here and something there."""
    draw = np.random.default_rng(seed)
    kept = GIB * np.sort(draw.integers(1, 1000, (blocks, 4)), axis=1)[:, ::-1]
    inside = GIB * np.sort(draw.integers(1, 800, (blocks, 4)), axis=1)
    there = GIB * draw.integers(100, 1000, blocks)
    runs = runs_of(kept, inside, 3, on_host=there)
    peaks, host, seconds = peaks_of(runs), host_peaks_of(runs), draw.random((blocks, 4))
    plans = np.array(list(product(range(4), repeat=blocks)))
    totals = np.array([peaks.of(plan)[0] for plan in plans])
    theirs = ((plans == 3) * there).sum(axis=1) * 3  # three microbatches are in flight
    times = np.array([seconds[np.arange(blocks), plan].sum() for plan in plans])
    chosen = set()
    for share, on_host in product((0.2, 0.5, 1.0), (0.0, 0.3, 0.7, 1.0)):
        budget = int(totals.min() + share * (totals.max() - totals.min()))
        limit = int(on_host * theirs.max())
        if not (fits := (totals <= budget) & (theirs <= limit)).any():
            with pytest.raises(UserError, match="needs at least") as info:
                solve(peaks, seconds, budget, "it", host, limit)
            assert f"at least {totals[theirs <= limit].min() / GIB:.2f} GiB" in str(info.value)
            continue
        found = solve(peaks, seconds, budget, "it", host, limit)
        assert found.seconds == pytest.approx(times[fits].min(), abs=1e-9)
        assert found.host == ((np.array(found.choice) == 3) * there).sum() * 3 <= limit and found.peak <= budget
        chosen |= set(found.choice)
    assert blocks == 1 or 3 in chosen


def test_a_later_rank_has_less_on_the_host():
    kept, inside = np.array([[500, 10], [700, 20]]), np.array([[50, 600], [60, 900]])
    there = np.array([490, 680])
    less = host_peaks_of(runs_of(kept, inside, 3, 1, there))
    fewer = host_peaks_of(runs_of(kept, inside, 2, 0, there))
    assert [less.of(plan)[0] for plan in product(range(2), repeat=2)] == [0, 2 * 680, 2 * 490, 2 * 1170]
    assert [fewer.of(plan)[0] for plan in product(range(2), repeat=2)] == [0, 2 * 680, 2 * 490, 2 * 1170]


def test_peaks_of_a_mixture_are_those_of_its_blocks():
    kept, inside = np.array([[500, 200, 10], [700, 300, 20]]), np.array([[50, 90, 600], [60, 80, 900]])
    peaks = peaks_of(runs_of(kept, inside, 2))
    plan = (2, 0)
    outside = 5000 + 2 * (10 + 700)
    last = 4100 + (2 * 10) + (700 + 700 + 60)
    first = 4000 + (10 + 600 + 10) + 700
    assert peaks.of(plan)[0] == max(outside, last, first)
    full = (2, 2)
    assert peaks.of(full)[0] == max(5000 + 60, 4100 + 20 + 20 + 20 + 900, 4000 + 10 + 600 + 10 + 20)


def test_a_later_rank_has_fewer_microbatches_in_flight():
    kept, inside = np.array([[500, 200, 10], [700, 300, 20]]), np.array([[50, 90, 600], [60, 80, 900]])
    less, fewer = peaks_of(runs_of(kept, inside, 3, less=1)), peaks_of(runs_of(kept, inside, 2))
    for plan in product(range(3), repeat=2):
        assert less.of(plan)[0] == fewer.of(plan)[0]


def test_what_is_short_is_told():
    peaks, seconds = made_up(4, 1)
    least = min(peaks.of(plan)[0] for plan in product(range(3), repeat=4))
    with pytest.raises(UserError) as info:
        solve(peaks, seconds, least - 1, "pipeline rank 3")
    assert "pipeline rank 3 needs at least" in str(info.value) and "iteration, bf16" in str(info.value)
    scaled = Peaks(peaks.base * GIB, peaks.values * GIB, peaks.stretch)
    with pytest.raises(UserError) as info:
        solve(scaled, seconds, (least - 7) * GIB, "pipeline rank 3")
    need, short = re.search(r"at least ([\d.]+) GiB .* ([\d.]+) GiB short", str(info.value)).groups()
    assert float(need) == least and float(short) == 7.0


def test_a_rank_without_blocks():
    peaks = Peaks(np.array([900, 800]), np.zeros((2, 0, 3), dtype=np.int64), ("a", "b"))
    assert solve(peaks, np.zeros((0, 3)), 900, "it").peak == 900
    with pytest.raises(UserError, match="it needs at least"):
        solve(peaks, np.zeros((0, 3)), 899, "it")


def test_a_block_s_copies_hide_behind_its_computation():
    """A forward of 2 s and a backward of 5 s, without copies and with copies of 1, 3 and 7 s each way."""
    rates = rates_of(Config().replace(memory_plan="auto", host_memory_gib=1.0, host_bandwidth=400.0))
    assert (rates.host, rates_of(Config()).host) == (400e9, 55e9)
    backward = {("flops",): int(5 * rates.bf16)}
    for copies, taken in ((0, 7), (1, 7), (3, 8), (7, 14)):
        forward = {("flops",): int(2 * rates.bf16), ("bytes", "host", "to host"): int(copies * rates.host)}
        assert rates.block_seconds(forward, backward) == pytest.approx(taken)
        assert rates.block_seconds(forward, backward, exposed=True) == pytest.approx(max(2, copies) + 5 + copies)
