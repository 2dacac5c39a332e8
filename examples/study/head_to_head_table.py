"""The table of the head-to-head runs: what each arm lost against BF16 with the same data, and how sure that is.

    python -m examples.study.head_to_head_table benchmarks/results/FILE.jsonl

A difference is paired by held-out sequence and by seed of the data's order.  Its standard error is the larger of two:
that over sequences of the mean over seeds, and that over seeds of the mean over sequences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BASE = "bf16"
Floats = NDArray[np.float64]


def losses_of(results: Sequence[Mapping[str, Any]], key: str) -> dict[str, dict[int, Floats]]:
    """Arm -> seed -> losses [sequences of all texts]; key: "losses" or "unrounded"."""
    found: dict[str, dict[int, Floats]] = {}
    for each in results:
        found.setdefault(each["arm"], {})[each["seed"]] = np.concatenate([*map(np.array, each[key].values())])
    return found


def difference(arm: Mapping[int, Floats], base: Mapping[int, Floats]) -> tuple[float, float, int]:
    """Mean of arm - base over the seeds that both have, its standard error, and the number of seeds.

    NaN without a seed in common.
    """
    seeds = sorted(arm.keys() & base.keys())
    if not seeds:
        return float("nan"), float("nan"), 0
    each = np.stack([arm[seed] - base[seed] for seed in seeds])
    over_sequences = each.mean(0).std(ddof=1) / np.sqrt(each.shape[1])
    over_seeds = each.mean(1).std(ddof=1) / np.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    return float(each.mean()), float(max(over_sequences, over_seeds)), len(seeds)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, the best arm first; differences are in milli-nats a token."""
    own, unrounded = losses_of(results, "losses"), losses_of(results, "unrounded")
    if BASE not in own:
        return f"{len(results)} arms have ended, and {BASE} is not among them: nothing to compare with yet"
    rows = []
    for name in own:
        mean, error, seeds = difference(own[name], own[BASE])
        weights = difference(unrounded[name], own[BASE])
        mine = [each for each in results if each["arm"] == name]
        saved = [each["saved"][-1] for each in mine if each["saved"]]
        fp4 = [each["plans"][-1]["achieved"] for each in mine if each["plans"]]
        planning = np.mean([each["planning, in iterations"] for each in mine])
        cells = [
            name, f"{1e3 * mean:.1f} ± {1e3 * error:.1f}", f"{1e3 * weights[0]:.1f} ± {1e3 * weights[1]:.1f}",
            f"{np.mean(fp4):.0%}" if fp4 else "", f"{np.mean(saved):.0%}" if saved else "", f"{planning:.0f}", seeds,
        ]  # fmt: skip
        rows.append((mean, [str(cell) for cell in cells]))
    heads = ["arm", "loss above BF16", "of the unrounded weights", "FP4", "time saved", "planning", "seeds"]
    lines = [heads, ["---"] * len(heads), *(cells for _, cells in sorted(rows, key=lambda row: (row[0], row[1])))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(words: Sequence[str]) -> None:
    """Command line."""
    print(table([json.loads(line) for line in Path(words[0]).read_text().splitlines()]))


if __name__ == "__main__":
    main(sys.argv[1:])
