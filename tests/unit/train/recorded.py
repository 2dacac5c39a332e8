"""Run folders as a run would leave them, written by hand; and what a report shows of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron_snip.config import Config
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.plan_file import Plan
from tests.unit.snip.made_up import statistics

KINDS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
NAMES = [f"layers.{block}.{kind}_proj" for block in range(3) for kind in KINDS]
SHAPES = [LinearShape(name, 8, 8, int(name.split(".")[1]), name.split(".")[-1][:-5]) for name in NAMES]
FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("fp8", "fp4", "fp8/fp4/fp4"))
MODEL = {"num_layers": 3, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "seq_length": 128}


def line(iteration: int, **more) -> str:
    values = {"iteration": iteration, "lm loss": 5.0 - 0.1 * iteration, "iteration-time": 2.0, "skipped": 0}
    return json.dumps({**values, **more}) + "\n"


def write_run(folder: Path, lines: list[str], plans: tuple[Plan, ...] = (), **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    for plan in plans:
        plan.save(folder / "plans" / f"iter_{plan.iteration:07d}.json")
    if options:
        config = Config().replace(**MODEL, **options)
        made = {"torch": "2.99", "device": "CPU (test)"}
        (folder / "config.json").write_text(json.dumps({"run_id": "abc0" * 4, **config.to_dict(), "versions": made}))
    return folder


def two_plans() -> tuple[Plan, Plan]:
    first = Plan(2, dict.fromkeys(NAMES, FP4), "snip", 0.75, 1.0)
    second = Plan(4, {**first.linears, NAMES[0]: FP8, NAMES[1]: MIXED, NAMES[2]: FP8}, "snip", 0.75, 0.8)
    return first, second


def full_run(folder: Path) -> Path:
    probed = {"snip/probe_seconds": 0.5, "snip/solver_seconds": 0.25}
    lines = [
        line(1, **{"lm loss validation": 6.0}),
        line(2, **probed),
        line(3, **{"lm loss": None}, skipped=1),
        line(4, **probed),
        line(5, **{"lm loss validation": 4.5}, skipped=1),
    ]
    measured().save(folder / "stats/iter_0000003.json")
    return write_run(folder, lines, two_plans())


def run_of_everything(folder: Path, shift: float = 0.0) -> Path:
    """100 iterations with all that a report can show: plans at 10, 20, ..., two stages, memory."""
    plans, lines = [], []
    for i in range(1, 101):
        row: dict[str, Any] = {
            "lm loss": 5.0 - 0.01 * i + 0.1 * (-1) ** i + shift, "batch-size": 4, "mem-allocated-bytes": 2**31,
        }  # fmt: skip
        if i % 10 == 0:
            linears = {name: FP4 if (k + i // 10) % 4 else FP8 for k, name in enumerate(NAMES)}
            plans.append(Plan(i, linears, "snip", 0.75, sum(p == FP4 for p in linears.values()) / len(NAMES)))
            row |= {"snip/probe_seconds": 0.5, "snip/wait_seconds": 0.1, "snip/apply_seconds": 0.01}
            for stage in (0, 1):
                row |= {f"snip/stage_{stage}/achieved": 0.75, f"snip/stage_{stage}/modelled_time": 0.1 + 0.1 * stage}
            for kind in ("loss", "weight"):
                groups = ("q", "down", "block_00", "block_01", "block_02")
                row |= {f"snip/{kind}_divergence/{g}": 1e-4 * (1 + k) for k, g in enumerate(groups)}
        if plans and i % 5 == 0:
            name = "snip/measured_loss_divergence"
            row |= {f"{name}_mean": 0.01 + 0.001 * i, f"{name}_standard_error": 0.002, f"{name}_count": 3}
            row |= {"snip/predicted_loss_divergence": 0.02 + 0.001 * i, "snip/plan_hash": plans[-1].hash}
        lines.append(line(i, **row))
    measured().save(folder / "stats/iter_0000100.json")
    options = {
        "precision": "snip",
        "snip_options": "fp8,fp4",
        "snip_granularity": "linear",
        "vocab_size": 128,
        "global_batch_size": 4,
    }
    return write_run(folder, lines, tuple(plans), **options)


def measured(scale: float = 1.0) -> Statistics:
    """dL 1e-4 ... 21e-4 nats in fp4, a tenth of it in fp8; rho^2 1/21 each."""
    worth = [2e-4 * scale * (i + 1) for i in range(len(NAMES))]
    ones = [1.0] * len(NAMES)
    token = {"fp4": worth, "fp8": [value / 10 for value in worth]}
    return statistics(SHAPES, token, ones, {"fp4": ones, "fp8": [0.5] * len(NAMES)}, tokens=1)


def shown(page: Path) -> dict[str, list[dict[str, Any]]]:
    """Heading -> its pictures, as the browser reads them."""
    sections = re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", page.read_text(), re.DOTALL)
    return {
        heading: [json.loads(text) for text in re.findall(r"class='figure'>(.*?)</script>", body, re.DOTALL)]
        for heading, body in sections
    }


def named(figure: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A picture's traces by name."""
    return {trace["name"]: trace for trace in figure["data"]}
