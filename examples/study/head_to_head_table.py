"""The table of the head-to-head runs: what each arm lost against BF16 with the same data, and how sure that is.

    python -m examples.study.head_to_head_table benchmarks/results/FILE.jsonl [--picture FILE.png]

A difference is paired by held-out sequence and by seed of the data's order.  Its standard error is the larger of two:
that over sequences of the mean over seeds, and that over seeds of the mean over sequences.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_snip import runtime
from megatron_snip.errors import UserError

BASE = "bf16"
PLANNED, OTHERS, INK = "#e8893c", "#8fa3b8", "#1c2430"
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


def cloze_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy in the cloze tasks of prose and of code, the mean over an arm's results that have it."""
    scores = [each["cloze"] for each in results if "cloze" in each]
    texts = ("prose", "code") if scores else ()
    return " / ".join(f"{np.mean([each[f'cloze_{text}']['acc'] for each in scores]):.1%}" for text in texts)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, the best arm first; differences are in milli-nats a token."""
    own, unrounded = losses_of(results, "losses"), losses_of(results, "unrounded")
    if BASE not in own:
        return f"{len(results)} arms have ended, and {BASE} is not among them: nothing to compare with yet"
    rows, clozed = [], any("cloze" in each for each in results)
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
        if clozed:
            cells.append(cloze_of(mine))
        rows.append((mean, [str(cell) for cell in cells]))
    heads = ["arm", "loss above BF16", "of the unrounded weights", "FP4", "time saved", "planning", "seeds"]
    heads += ["cloze, prose / code"] if clozed else []
    lines = [heads, ["---"] * len(heads), *(cells for _, cells in sorted(rows, key=lambda row: (row[0], row[1])))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def described(options: Mapping[str, Any]) -> str:
    """An arm in words that do not need the schedule."""
    final = "" if "snip-final-precision" not in options else f", {options['snip-final-precision']} at the end"
    if "by-hand" in options:
        return options["by-hand"] + final
    if options["precision"] != "snip":
        return f"{options['precision']} everywhere{final}"
    rule: str = options.get("snip-objective", "snip")
    who = "SNIP" if rule == "snip" else rule
    how = [f"by {options['snip-granularity'].upper()}"] if "snip-granularity" in options else []
    how += [f"every {options['snip-interval']}"] if "snip-interval" in options else []
    how += ["with updates"] if options.get("snip-weight") else []
    share = f"{options.get('snip-target', 0.75):.0%}"
    if "same-time-as" in options:
        share = f"as fast as {options['same-time-as']}"
    return f"{' '.join([who, *how])}: {options['snip-options']}, {share}{final}"


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A bar an arm, the best on top, with twice its standard error; a point is of the unrounded weights."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own, unrounded = losses_of(results, "losses"), losses_of(results, "unrounded")
    if BASE not in own:
        raise UserError(f"{BASE} is not among the arms that have ended; a picture compares with it")
    found = {name: difference(own[name], own[BASE]) for name in own if name != BASE}
    names = sorted(found, key=lambda name: found[name][0])
    words = {one["arm"]: described(one["options"]) for one in results}
    colours = [PLANNED if words[name].startswith("SNIP") else OTHERS for name in names]
    figure, axis = plt.subplots(figsize=(9, 0.29 * len(names) + 0.9))
    means, errors = ([1e3 * scale * found[name][i] for name in names] for i, scale in ((0, 1), (1, 2)))
    bars = {"color": colours, "height": 0.72, "error_kw": {"lw": 1, "ecolor": INK}}
    axis.barh(range(len(names)), means, xerr=errors, **bars)
    axis.barh([0, 0], [0, 0], color=PLANNED, label="planned by SNIP, in its formats")
    axis.barh([0, 0], [0, 0], color=OTHERS, label="rules and recipes")
    weights = [1e3 * difference(unrounded[name], own[BASE])[0] for name in names]
    axis.plot(weights, range(len(names)), "o", ms=4, color=INK, label="the same weights, unrounded")
    axis.set_yticks(range(len(names)), [words[name] for name in names], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("held-out loss above BF16 after training, milli-nats a token, with two standard errors")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")  # a long label of the axis is wider than few bars are
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON lines of head_to_head --json")
    parser.add_argument("--picture", type=Path, help="also draw it, by matplotlib")
    own = parser.parse_args(words)
    results = [json.loads(line) for line in own.results.read_text().splitlines()]
    print(table(results))
    if own.picture is not None:
        draw(results, own.picture)


if __name__ == "__main__":
    with runtime.report_errors():
        main()
