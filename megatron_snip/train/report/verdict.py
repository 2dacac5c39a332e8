"""The head of a report: what the run was, and in a sentence what its last plan cost."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from megatron_snip.config import Config
from megatron_snip.model.flops import parameters
from megatron_snip.quant import LinearPrecision
from megatron_snip.quant.linears.shape import LinearShape
from megatron_snip.snip.plan import Plan
from megatron_snip.snip.plan.cost import GemmTimes, modelled_time
from megatron_snip.train.pictures.figures import number
from megatron_snip.train.report.run_summary import Run, is_finite
from megatron_snip.train.run.state_file import config_of

MEASURED = "snip/measured_loss_divergence"


def verdict(run: Run, speed: float | None) -> str:
    """What the last plan in force cost, measured and predicted, and its modelled speed; "" if nothing measured it.

    speed: the model's modelled speed under this plan over that in FP8; None if unknown.
    """
    in_force = not run.metrics or run.metrics[-1].get("snip/plan_hash") != ""
    if not run.plans or not in_force or (found := _cost(run, run.plans[-1])) is None:
        return ""
    cost, error, predicted = found
    value = number(cost, 2) + ("" if error is None else f" ± {number(error, 2)}")
    words = f"cost {value} nats a token"
    if error is not None and cost <= 2 * error:
        words = f"cost nothing that shows above the noise: {value} nats a token"
    text = f"{run.plans[-1].achieved:.0%} of the linears' FLOPs in FP4 {words}"
    text += "" if predicted is None else f"; predicted {number(predicted, 2)}"
    return text + ("." if speed is None else f"; modelled {speed:.2g} times as fast as FP8.")


def _cost(run: Run, plan: Plan) -> tuple[float, float | None, float | None] | None:
    """Cost, standard error and prediction: from BF16 measurements under the plan, else from its trial."""

    def value(row: Any, key: str) -> float | None:
        return float(row[key]) if is_finite(row.get(key)) else None

    rows = [row for row in run.metrics if row.get("snip/plan_hash") == plan.hash]
    measured = [row for row in rows if is_finite(row.get(f"{MEASURED}_mean"))]
    if measured:
        predicted = [v for row in rows if (v := value(row, "snip/predicted_loss_divergence")) is not None]
        last = measured[-1]
        error = value(last, f"{MEASURED}_standard_error")
        return last[f"{MEASURED}_mean"], error, predicted[0] if predicted else None
    if plan.trial is None:
        return None
    (*_, same) = [None, *(one for one in plan.trial.tried if one["name"] == plan.trial.name)]
    return plan.trial.increase, plan.trial.error, None if same is None else same.get("predicted")


def speed_over_fp8(plan: Plan, shapes: Sequence[LinearShape], times: GemmTimes) -> float:
    """Modelled time of the model in FP8 over that under the plan.  Raises UserError for a format without times."""
    options = list(dict.fromkeys([LinearPrecision.uniform("fp8"), *plan.linears.values()]))
    taken = modelled_time(shapes, options, times)
    chosen = sum(row[options.index(plan.linears[shape.name])] for shape, row in zip(shapes, taken))
    return float(taken[:, 0].sum() / chosen)


def headline(run: Run) -> list[tuple[str, str]]:
    """Model, tokens, layout, device, date and command, as far as config.json tells."""
    options = run.options
    try:
        config = config_of({name: options[name] for name in Config().to_dict()})
        model, versions = config.model, options.get("versions") or {}
        tied = not model.untie_embeddings_and_output_weights
        size = f"{model.model_name}, {_count(parameters(model, tied=tied))} parameters"
        size += f" ({model.num_layers} blocks of {model.hidden_size})"
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    rows = [("model", size)]
    if samples := run.column("consumed-samples")[1]:
        rows.append(("tokens", _count(samples[-1] * model.seq_length)))
    p = config.parallel
    sizes = f"tp {p.tensor_model_parallel_size}, pp {p.pipeline_model_parallel_size}, cp {p.context_parallel_size}"
    processes = versions.get("processes")
    rows.append(("layout", sizes + (f" on {processes} processes" if processes else "")))
    rows += [("device", str(versions["device"]))] if "device" in versions else []
    file = run.path / ("metrics.jsonl" if run.metrics else "config.json")
    when = datetime.fromtimestamp(file.stat().st_mtime).astimezone()
    return [*rows, ("last change", f"{when:%Y-%m-%d %H:%M %Z}"), ("command", _command(options, processes))]


def _command(options: dict[str, Any], processes: Any) -> str:
    """A command with the options that differ from their defaults."""
    words = ["torchrun", "--nproc_per_node", str(processes)] if processes else ["python"]
    words.append("pretrain_llama.py")
    for name, group in Config().to_dict().items():
        for key, usual in group.items():
            value, word = options[name].get(key), key.replace("_", "-")
            if value == usual or value is None:
                continue
            if isinstance(value, bool):
                words.append(f"--{word}" if value else f"--no-{word}")
            else:
                words += [f"--{word}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _count(value: float) -> str:
    """1.2 billion, 8.4 million, or whole thousands."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"
