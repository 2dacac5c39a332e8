"""Recipes as a plan's options: predicted and true costs in each format, and plans beside fixed recipes.

    python -m examples.study.recipes examples/study/settings/12_gqa_planted.toml --checkpoints late,middle

It writes DIR/NAME/CHECKPOINT/recipes.json with

    costs     the predicted and the true cost of single linears in nats, with fprop in each of FORMATS; the true cost
              is [L(+dY) + L(-dY)]/2 - L0 over other text
    fixed     for each fixed recipe, the time that it saves by --gemm-times published:b300, and the loss above BF16 on
              held-out text, of the recipe and of the plan over recipes:blackwell that saves as much

Without an update, only fprop changes the loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from examples.study.plans import probe, shapes_of
from examples.study.planted import linears_of
from examples.study.setting import read_setting
from examples.study.study import Study
from examples.study.trials import Losses
from examples.study.truth import batches, even_truth
from megatron_snip.files.json import write_json
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.plan.cost import GemmTimes, achieved
from megatron_snip.snip.plan.options import check_choices
from megatron_snip.snip.planner import ask
from megatron_snip.snip.predict.divergence import loss_divergence

FORMATS = (
    "fp8", "mxfp8", "mxfp8_floor", "mxfp6_e2m3", "mxfp6_e3m2", "fp4", "fp4_pow2", "mxfp4", "nvfp4_plain", "nvfp4",
    "nvfp4_4over6",
)  # fmt: skip
PROBED, TRUTH, JUDGED = 8, 8, 32  # batches
TABLE = "published:b300"
#: NVIDIA's recipe for pretraining, and the share of blocks that it leaves in BF16 at the end.
NVFP4, BF16_BLOCKS = "nvfp4", 0.15


def fixed_recipes(names: Sequence[str], blocks: Mapping[str, int]) -> dict[str, dict[str, LinearPrecision]]:
    """Recipes that need no measurement: name -> linear -> precision."""
    last = max(blocks.values()) + 1
    end = last - round(BF16_BLOCKS * last)
    bf16, mxfp8, nvfp4 = (LinearPrecision.uniform(name) for name in ("bf16", "mxfp8", NVFP4))
    mixed = LinearPrecision("mxfp8", NVFP4, NVFP4)
    return {
        "mxfp8": dict.fromkeys(names, mxfp8),
        "nvfp4": dict.fromkeys(names, nvfp4),
        "nvfp4, last 15% bf16": {name: bf16 if blocks[name] >= end else nvfp4 for name in names},
        "mxfp8 forward, nvfp4 backward": dict.fromkeys(names, mixed),
        "mxfp8 attention, nvfp4 mlp": {name: mxfp8 if "attn" in name else nvfp4 for name in names},
    }


def measure(study: Study, checkpoint: str, path: Path, every: int, judged: int) -> None:
    """Write both tables of a checkpoint.  every: measure every n-th linear.  judged: batches that judge the plans."""
    config, parts = study.at(checkpoint)
    at, each = study.setting.checkpoints[checkpoint], config.training.global_batch_size
    shapes = shapes_of(parts)
    stats = probe(parts, at, FORMATS, PROBED, updates=False)
    first = (at - 1 + PROBED) * each
    names = [shape.name for shape in shapes][::every]
    rows = [shape.name in names for shape in shapes]
    predicted = loss_divergence(stats, [LinearPrecision.uniform(fmt) for fmt in FORMATS])[rows]
    over = batches(parts, first, TRUTH, each)
    truth = np.stack([even_truth(parts, over, fmt, names) for fmt in FORMATS], 1)
    by_linear = [float(spearmanr(a, b).statistic) for a, b in zip(predicted, truth, strict=True)]
    found = {
        "formats": FORMATS, "linears": names, "predicted": predicted.tolist(), "true": truth.tolist(),
        "spearman": float(spearmanr(predicted.ravel(), truth.ravel()).statistic),
        "spearman of a linear over formats, mean": float(np.mean(by_linear)),
        "spearman of a format over linears": {
            fmt: float(spearmanr(predicted[:, i], truth[:, i]).statistic) for i, fmt in enumerate(FORMATS)
        },
    }  # fmt: skip
    times, plans = GemmTimes.published("b300"), {}
    judge = Losses(parts, batches(parts, first + TRUTH * each, judged, each))
    blocks = {shape.name: shape.block for shape in shapes}
    for name, recipe in fixed_recipes(list(linears_of(parts)), blocks).items():
        saved = achieved(shapes, recipe, "time", times)
        snip = config.replace(snip_options="recipes:blackwell", gemm_times=TABLE, snip_target=saved * (1 - 1e-6)).snip
        choices = check_choices(snip, shapes)
        chosen = ask(snip, shapes, choices, stats, times=times)[0].solve().choice
        plan = {shape.name: choices.options[int(o)] for shape, o in zip(shapes, chosen, strict=True)}
        difference = judge.of(recipe) - judge.of(plan)
        plans[name] = {
            "saved": saved, "plan saves": achieved(shapes, plan, "time", times), "fixed": judge.judged(recipe),
            "plan": judge.judged(plan),
            "fixed - plan": [float(difference.mean()), float(difference.std(ddof=1) / len(difference) ** 0.5)],
        }  # fmt: skip
        write_json(path, {**found, "times": TABLE, "batches": judged, "fixed": plans})


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder of all settings")
    parser.add_argument("--checkpoints", default="late")
    parser.add_argument("--every", type=int, default=4, help="measure the costs of every n-th linear (default: 4)")
    parser.add_argument("--judged", type=int, default=JUDGED, help="batches that judge plans (default: 32)")
    own = parser.parse_args(words)
    torch.set_num_threads(1)
    folder = own.output / own.setting.stem
    study = Study(read_setting(own.setting), folder)
    for checkpoint in own.checkpoints.split(","):
        measure(study, checkpoint, folder / checkpoint / "recipes.json", own.every, own.judged)
    study.close()


if __name__ == "__main__":
    main()
