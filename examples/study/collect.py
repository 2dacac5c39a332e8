"""Figures from a study's pieces: plain JSON values, by setting and checkpoint.  What was not measured has no entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.study.pieces import read_json
from examples.study.plans import FP4, FP8, cost_of, oracle_quality, plan_by, regret
from examples.study.quality import ORACLE, terms
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics

Floats = NDArray[np.float64]
Figures = dict[str, Any]

#: 97.5% quantile of Student's t by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 15: 2.131, 31: 2.040}


def interval(values: Sequence[float]) -> Figures:
    """Mean, half of its 95% interval by Student's t (None for one value), and the number of values."""
    count = len(values)
    near = max((df for df in _T if df <= count - 1), default=0)
    half = _T[near] * float(np.std(values, ddof=1)) / math.sqrt(count) if near else None
    return {"mean": float(np.mean(values)), "half": half, "count": count}


def _increases(folder: Path, chosen: dict[str, dict[str, str]], plans: dict[str, Any]) -> Figures:
    """Loss increase of every evaluated plan at the switch, nats: mean and standard error; paired with dL's and the
    oracle's of the same target and batches.
    """
    losses = {path.stem: np.array(read_json(path)["losses"]) for path in (folder / "switch").glob("*.json")}
    base = losses.get(plans[chosen["uniform"]["bf16"]]["switch"])
    found: Figures = {}
    if base is None:
        return found

    def error(values: Floats) -> float:
        return float(values.std(ddof=1) / math.sqrt(len(values)))

    for group, arms in chosen.items():
        of = {arm: losses.get(plans[key]["switch"]) for arm, key in arms.items()}
        rows: dict[str, Figures] = {}
        for arm, key in arms.items():
            if (mine := of[arm]) is None:
                continue
            rows[arm] = {"mean": float((mine - base).mean()), "error": error(mine - base), "plan": key,
                         "share": plans[key]["share"]}  # fmt: skip
            for other in ("dL", ORACLE):
                if (theirs := of.get(other)) is not None:
                    change = mine - theirs
                    rows[arm] |= {f"less {other}": float(change.mean()), f"less {other}, error": error(change)}
        if rows:
            found[group] = rows
    return {"loss": float(base.mean()), "increase": found}


def _regrets(chosen: dict[str, dict[str, str]], plans: dict[str, Any], truth: Floats, shapes: list[LinearShape]) -> Any:
    """(plan - best) / (all FP4 - best) by the true costs, of plans of whole linears, by target and arm."""
    found: dict[str, dict[str, float]] = {}
    for group, arms in chosen.items():
        granularity, _, target = group.partition(" ")
        if granularity != "linear":
            continue
        best = cost_of(plan_by(oracle_quality(truth), shapes, float(target)), truth)
        whole = float(truth.sum()) - best
        for arm, key in arms.items():
            plan = {name: LinearPrecision.parse(text) for name, text in plans[key]["linears"].items()}
            found.setdefault(group, {})[arm] = (cost_of(plan, truth) - best) / whole
    return found


def _regret_by_tokens(folder: Path, truth: Floats, shapes: list[LinearShape], targets: Sequence[float]) -> Any:
    """Mean and largest regret of plans by dL averaged over 1, 2, 4, ... batches, by compute and target."""
    found: Figures = {}
    for path in sorted(folder.glob("tokens-*.json")):
        values = read_json(path)
        batches = np.array(values["dL"])
        for target in targets:
            size, rows = 1, {}
            while size <= len(batches):
                parts = [batches[i : i + size].mean(axis=0) for i in range(0, len(batches) - size + 1, size)]
                regrets = [regret(part, truth, shapes, target) for part in parts]
                rows[str(size * values["tokens"])] = {"mean": float(np.mean(regrets)), "most": max(regrets)}
                size *= 2
            found.setdefault(path.stem.removeprefix("tokens-"), {})[str(target)] = rows
    return found


def _composition(stats: Statistics) -> Figures:
    """Each term's share in the sum of all terms, of FP4 over FP8: of the sum over linears, and the median over them."""
    known = {term: values[:, 1] for term, values in terms(stats, [FP8, FP4]).items()}
    whole = sum(known.values(), np.zeros(len(stats.shapes)))
    return {
        "sum of Q": float(whole.sum()),
        "sum": {term: float(values.sum() / whole.sum()) for term, values in known.items()},
        "median": {term: float(np.median(values / whole)) for term, values in known.items()},
    }


def _probe_in_bf16(
    chosen: dict[str, dict[str, str]], plans: dict[str, Any], low: Statistics, high: Statistics
) -> Figures:
    """Terms from the BF16 probe by those from float32's (of linears' FP4: median, least, most), and how many linears
    the plans of both have apart.
    """
    a, b = (terms(stats, [FP8, FP4]) for stats in (low, high))
    ratios = {}
    for term in b:
        positive = b[term][:, 1] > 0
        r = a[term][positive, 1] / b[term][positive, 1]
        ratios[term] = {"median": float(np.median(r)), "least": float(r.min()), "most": float(r.max())}
    apart = {}
    for group, arms in chosen.items():
        for arm, key in arms.items():
            if (twin := arms.get(f"{arm} (BF16 probe)")) is not None:
                mine, theirs = plans[key]["linears"], plans[twin]["linears"]
                apart[f"{group} {arm}"] = sum(mine[name] != theirs[name] for name in mine)
    return {"ratios": ratios, "linears apart": apart, "linears": len(high.shapes)}


def _further(folder: Path, chosen: dict[str, dict[str, str]], plans: dict[str, Any]) -> Figures:
    """Validation losses after more steps by plan, and their differences from BF16's and dL's of the same seed."""
    losses: dict[str, dict[str, float]] = {}
    for path in sorted((folder / "further").glob("*.json")):
        key, _, seed = path.stem.rpartition("-")
        losses.setdefault(key, {})[seed] = read_json(path)["loss"]
    names: dict[str, list[str]] = {}
    for group, arms in chosen.items():
        for arm, key in arms.items():
            if key in losses:
                names.setdefault(key, []).append(arm if group == "uniform" else f"{group} {arm}")
    found: Figures = {}
    for key, by_seed in losses.items():
        one: Figures = {"arms": names.get(key, []), "loss": interval(list(by_seed.values())), "by seed": by_seed,
                        "share": plans[key]["share"]}  # fmt: skip
        dl = next((chosen[group].get("dL") for group in chosen if group.startswith("linear")), None)
        for label, other in (("less bf16", chosen["uniform"]["bf16"]), ("less dL", dl)):
            both = [by_seed[seed] - losses[other][seed] for seed in by_seed if seed in losses.get(other or "", {})]
            if both and other != key:
                one[label] = interval(both)
        found[key] = one
    return found


def figures_of(folder: Path) -> Figures:
    """Everything that a setting's folder has, by checkpoint."""
    about = read_json(folder / "about.json")
    found: Figures = {"about": about, "checkpoints": {}}
    targets = about["setting"]["targets"]
    for checkpoint in about["setting"]["checkpoints"]:
        place = folder / checkpoint
        if not (place / "plans.json").is_file():
            continue
        values = read_json(place / "plans.json")
        chosen, plans = values["chosen"], values["plans"]
        low, high = (Statistics.load(place / f"probe-{compute}.json") for compute in ("bf16", "float32"))
        truth, shapes = np.array(list(read_json(place / "truth.json").values())), list(high.shapes)
        found["checkpoints"][checkpoint] = {
            **_increases(place, chosen, plans),
            "regret": _regrets(chosen, plans, truth, shapes),
            "regret by tokens": _regret_by_tokens(place, truth, shapes, targets),
            "composition": {"float32": _composition(high), "bf16": _composition(low)},
            "bf16 probe": _probe_in_bf16(chosen, plans, low, high),
            "further": _further(place, chosen, plans),
            "plans": chosen,
            "truth": {"sum": float(truth.sum()), "least": float(truth.min()), "most": float(truth.max())},
        }
    return found


def figures_of_all(folder: Path) -> Figures:
    """``figures_of`` every setting in a folder that has reached a plan, by its name."""
    every = {path.parent.name: figures_of(path.parent) for path in sorted(folder.glob("*/about.json"))}
    return {name: one for name, one in every.items() if one["checkpoints"]}
