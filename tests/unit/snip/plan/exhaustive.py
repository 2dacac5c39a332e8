"""Random integer programs of every kind, small enough to look at every plan, and what the best one is."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from megatron_snip.snip.plan.program import BUDGET_TOLERANCE, Limit

COST_SCALES = (1e-9, 1e-6, 1e-3, 1.0, 1e3)


def flop_shares(rng, linears, options):
    """FP4 shares of linears of Llama-like sizes: option k puts k of options - 1 parts of the GEMMs in FP4."""
    flops = rng.choice([4, 16, 43, 56, 7], size=linears) * 2**20
    return flops[:, None] / flops.sum() * np.linspace(0, 1, options)[None]


def random_instance(seed):
    """(quality_loss, efficiency, target, keywords): every kind of constraint, alone and together."""
    rng = np.random.default_rng(seed)
    linears, options = int(rng.integers(1, 13)), int(rng.integers(1, 4))
    quality = rng.lognormal(0, 2, (linears, options)) * rng.choice([1, 1, 1, -0.1], (linears, options))
    quality *= COST_SCALES[seed % len(COST_SCALES)]
    shares = flop_shares(rng, linears, options)
    saved = rng.random((linears, options)) if seed % 4 == 3 else shares[:, rng.permutation(options)]
    keywords = {}
    if seed % 2:
        keywords["stage"] = rng.integers(0, 4, linears)
    if seed % 3 == 1:
        ties = rng.integers(-1, 4, linears)
        keywords["ties"] = np.where(ties >= 0, ties + 4 * keywords.get("stage", 0), -1)
    if seed % 5 == 1:
        groups = keywords.get("ties", np.full(linears, -1))
        held = int(rng.integers(linears))
        alike = (groups == groups[held]) & (groups >= 0)
        alike[held] = True
        keywords["fixed"] = np.where(alike, rng.integers(options), -1)
    target = float(rng.choice([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]))
    if seed % 6 == 5:  # a makespan instead of a target for each stage: time goes with what is saved, or not
        most = saved.max(axis=1, keepdims=True)
        keywords["time"] = rng.random((linears, options)) if seed % 12 == 5 else 2 * most - saved
    if seed % 7 == 2:
        keywords["current"] = rng.integers(-1, options, linears)
        keywords["churn"] = rng.lognormal(-1, 1, (options, options) if seed % 2 else ()) * np.abs(quality).mean()
    if seed % 9 == 3 and options > 1:
        keywords["reserved"] = np.arange(options) == options - 1
    if "stage" not in keywords or "time" in keywords:
        target *= float(saved.max(axis=1).sum())
    if seed % 8 in (2, 5):  # one limit, or two that compete
        values = rng.normal(0.5, 1, (1 + seed % 2, linears, options))
        wide = rng.choice([0.3, 0.7], len(values)) * np.ptp(values, axis=2).sum(axis=1) + values.min(axis=2).sum(axis=1)
        keywords["limits"] = [Limit(f"limit {i}", *one) for i, one in enumerate(zip(values, wide.tolist()))]
    return quality, saved, target, keywords


def coupled_instance(seed):
    """As ``random_instance``, a makespan by times that do not go with what is saved, or go against it."""
    rng = np.random.default_rng(seed)
    linears = int(rng.integers(4, 10))
    quality = rng.lognormal(0, 2, (linears, 3)) * COST_SCALES[seed % len(COST_SCALES)]
    saved = flop_shares(rng, linears, 3) if seed % 2 else rng.random((linears, 3))
    time = rng.random((linears, 3)) + (seed % 3) * saved / saved.max()
    target = float(rng.choice([0.3, 0.6, 0.8, 0.95])) * saved.max(axis=1).sum()
    return quality, saved, target, {"stage": rng.integers(0, 3, linears), "time": time}


def every_plan(linears, options, *, ties=None, fixed=None, reserved=None):
    """Plans [L, P] that keep ties, fixed and reserved options."""
    plans = np.indices((options,) * linears, dtype=np.int8).reshape(linears, -1)
    legal = np.ones(plans.shape[1], bool)
    held = np.full(linears, -1) if fixed is None else np.array(fixed)
    for tie in set(() if ties is None else ties[ties >= 0].tolist()):
        first, *others = np.flatnonzero(ties == tie)
        held[ties == tie] = held[ties == tie].max()
        for row in others:
            legal &= plans[row] == plans[first]
    for row, option in enumerate(held):
        if option >= 0:
            legal &= plans[row] == option
        elif reserved is not None:
            legal &= ~reserved[plans[row]]
    return plans[:, legal]


def summed(matrix, plans, rows):
    """[P] sum of a matrix [L, O] over some rows of each plan."""
    return sum((matrix[row][plans[row]] for row in rows), np.zeros(plans.shape[1]))


def relaxed_makespan(plans, saved, time, target, stage, ties):
    """The slowest stage's time if linears may be split between options and just the target is saved."""
    linears, options = saved.shape
    ids = np.arange(linears) + 1000 if ties is None else np.where(ties >= 0, ties, np.arange(linears) + 1000)
    groups = [np.flatnonzero(ids == i) for i in np.unique(ids)]
    allowed = [np.bincount(plans[rows[0]], minlength=options) > 0 for rows in groups]
    count, stages = len(groups) * options, np.unique(stage)
    one_hot = np.kron(np.eye(len(groups)), np.ones(options))
    save = np.concatenate([saved[rows].sum(axis=0) for rows in groups])
    slow = [np.concatenate([time[rows].sum(axis=0) * (stage[rows[0]] == s) for rows in groups]) for s in stages]
    total = summed(saved, plans, range(linears))
    relaxed = linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=np.column_stack([slow, -np.ones(len(stages))]),
        b_ub=np.zeros(len(stages)),
        A_eq=np.column_stack([np.vstack([one_hot, save]), np.zeros(len(groups) + 1)]),
        b_eq=np.append(np.ones(len(groups)), np.clip(target, total.min(), total.max())),
        bounds=[(0, float(ok)) for ok in np.concatenate(allowed)] + [(0, None)],
    )
    assert relaxed.status == 0, relaxed.message
    return relaxed.fun


def exhaustive(quality, saved, target, *, stage=None, time=None, current=None, churn=0.0, limits=(), **legal):
    """(least cost or None, bound on a stage's time or None): every plan, one column each."""
    linears, options = quality.shape
    if current is not None:
        matrix = churn * (1 - np.eye(options)) if np.ndim(churn) == 0 else churn
        quality = quality + np.where(current[:, None] >= 0, matrix[current], 0)
    plans = everything = every_plan(linears, options, **legal)
    most = (saved[:, ~legal["reserved"]] if "reserved" in legal else saved).max(axis=1)
    by_stage = stage is not None and time is None
    parts = [np.flatnonzero(stage == s) for s in np.unique(stage)] if by_stage else [np.arange(linears)]
    for rows in parts:
        budget = target * most[rows].sum() if by_stage else target
        plans = plans[
            :, summed(saved, plans, rows) >= budget - BUDGET_TOLERANCE * np.abs(saved[rows].max(axis=1)).sum()
        ]
    for limit in limits:
        plans = plans[:, summed(limit.values, plans, range(linears)) <= limit.most]
    if not plans.shape[1]:
        return None, None
    makespan = None
    if time is not None:
        slowest = np.max([summed(time, plans, np.flatnonzero(stage == s)) for s in np.unique(stage)], axis=0)
        ideal = relaxed_makespan(everything, saved, time, target, stage, legal.get("ties"))
        makespan = max(ideal, slowest.min())
        plans = plans[:, slowest <= makespan * (1 + 1e-9)]
    return summed(quality, plans, range(linears)).min(), makespan


def within_constraints(choice, saved, target, *, stage=None, time=None, makespan=None, limits=(), **legal):
    """Whether one plan [L] keeps every constraint; a makespan is the one that the solution names."""
    column = choice[:, None]
    reserved, fixed, ties = (legal.get(name) for name in ("reserved", "fixed", "ties"))
    rows = np.arange(len(choice))
    most = (saved if reserved is None else saved[:, ~reserved]).max(axis=1)
    tolerance = BUDGET_TOLERANCE * np.abs(saved.max(axis=1)).sum()
    good = all(limit.values[rows, choice].sum() <= limit.at_most + 1e-7 for limit in limits)
    for tie in () if ties is None else np.unique(ties[ties >= 0]):
        good &= len(set(choice[ties == tie].tolist())) == 1
    if fixed is not None:
        good &= bool((choice == fixed)[fixed >= 0].all())
    if stage is not None and time is None:
        for s in np.unique(stage):
            here = np.flatnonzero(stage == s)
            good &= summed(saved, column, here)[0] >= target * most[here].sum() - tolerance
        return good
    good &= saved[rows, choice].sum() >= target - tolerance
    if time is not None:
        good &= np.bincount(stage, time[rows, choice]).max() <= makespan * (1 + 1e-7)
    return good
