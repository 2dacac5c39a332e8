"""What a reader wants to know first: which run this is, what low precision cost it, and how it ends beside others."""

from __future__ import annotations

import math

import numpy as np

from megatron_snip.formats import get_format
from megatron_snip.model.flops import parameters
from megatron_snip.quant import GEMMS, LinearPrecision
from megatron_snip.snip.plan.cost import entries, gemm_time
from megatron_snip.snip.plan.options import read_times
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.memory_plan.plan_file import FILE, MemoryPlan
from megatron_snip.train.report.run_summary import Curve, Run, noted
from megatron_snip.train.setup import snip_shapes

#: The last iterations whose mean is compared: a tenth of the common ones, and at least so many.
LAST_SHARE, LAST_LEAST = 0.1, 8


def headline(run: Run) -> list[tuple[str, str]]:
    """Model, tokens, layout with device, and the command, as rows of a table; what is not known is left out."""
    if run.config is None:
        return []
    m, t, p = run.config.model, run.config.training, run.config.parallel
    model = f"{m.model_name}, {m.num_layers} blocks of {m.hidden_size}"
    if m.vocab_size is not None:
        size = parameters(m, tied=not m.untie_embeddings_and_output_weights)
        model += f", {_count(size)} parameters"
    rows = [("model", model)]
    samples = run.column("consumed-samples")[1]
    if samples:
        batch = f"{_count(t.global_batch_size * m.seq_length)} tokens a batch"
        rows.append(("trained on", f"{_count(samples[-1] * m.seq_length)} tokens, {batch}"))
    made = run.versions
    if "processes" in made:
        ranks, tp, pp, cp = (
            int(made["processes"]), p.tensor_model_parallel_size, p.pipeline_model_parallel_size,
            p.context_parallel_size,
        )  # fmt: skip
        layout = [f"{name} {n}" for name, n in (("tp", tp), ("pp", pp), ("cp", cp)) if n > 1]
        layout.append(f"dp {ranks // (tp * pp * cp)}")
        rows.append(("ran on", f"{ranks} x {made.get('device', 'unknown device')}: {' x '.join(layout)}"))
    if t.memory_plan != "none" and (run.path / FILE).is_file():
        rows.append(("memory plan", _memory_plan(run)))
    if "started" in made:
        rows.append(("last started", f"{made['started']}: {made.get('command', '')}".rstrip(": ")))
    return rows


def _memory_plan(run: Run) -> str:
    if (plan := noted(run.notes, MemoryPlan.load, run.path / FILE)) is None:
        return "unreadable"
    peak = max((rank.peak for rank in plan.ranks), default=0) / 2**30
    made = f"; predicted peak {peak:.1f} of {plan.memory_gib:.1f} GiB" if plan.memory_gib and peak else ""
    return f"{plan.told}{made} ({plan.hash})"


def verdict(run: Run) -> str:
    """What the last plan costs and saves, in a sentence or three; "" without a plan."""
    plan = run.plans[-1] if run.plans else None
    if plan is None:
        return ""
    said = [f"{plan.achieved:.1%} of the linears' FLOPs are in FP4 under the last plan."]
    if (trial := plan.trial) is not None:
        one = trial.taken
        if one.increase is not None:
            predicted = "" if one.predicted is None else f"; the probe predicted {number(one.predicted)}"
            said.append(f"In its trial this cost {nats(one.increase, one.error)}{predicted}.")
    key = "snip/measured_loss_divergence"
    mine = [row for row in run.metrics if row.get("snip/plan_hash") == plan.hash and row.get(f"{key}_mean") is not None]
    if mine:
        last = mine[-1]
        times = f"{last.get(f'{key}_count', len(mine))} extra BF16 forwards"
        said.append(
            f"During training, {times} measured {nats(last[f'{key}_mean'], last.get(f'{key}_standard_error'))}."
        )
    said += [faster] if (faster := _faster(run, plan)) else []
    return " ".join(said)


def _faster(run: Run, plan: Plan) -> str:
    """How much faster the linears' GEMMs are than in FP8, by the run's GEMM times; "" if these are not known."""
    if run.config is None:
        return ""
    try:
        times, shapes = read_times(run.config.snip), snip_shapes(run.config)
        formats = {getattr(precision, gemm) for precision in plan.linears.values() for gemm in GEMMS}
        bits = {name: get_format(name).element_bits for name in formats}
        base = next((name for name in sorted(bits) if bits[name] == 8), "bf16")
        uniform = float(gemm_time(shapes, [LinearPrecision.uniform(base)], times).sum())
        taken = float(entries(gemm_time, shapes, plan.linears, times).sum())
    except (ValueError, KeyError):  # a plan of another model, or a missing table
        return ""
    faster = f"{uniform / taken:.2g} times as fast as in {base} everywhere"
    return f"By {times.hardware} GEMM times, the linears are {faster}."


def last_difference(mine: Curve, theirs: Curve) -> tuple[float, float, int] | None:
    """Mean of mine - theirs over the last common iterations, two standard errors, and their number.

    None without a common iteration.  The error assumes independent iterations, and is NaN for a single one.
    """
    there = dict(zip(*theirs))
    common = [value - there[i] for i, value in zip(*mine) if i in there]
    if not common:
        return None
    last = np.array(common[-max(LAST_LEAST, round(LAST_SHARE * len(common))) :])
    error = 2 * float(last.std(ddof=1)) / math.sqrt(len(last)) if len(last) > 1 else math.nan
    return float(last.mean()), error, len(last)


def difference_text(name: str, other: str, run: Run, theirs: Run) -> str:
    """How two runs end, in a sentence; "" without a common iteration."""
    found = last_difference(run.column("lm loss"), theirs.column("lm loss"))
    if found is None:
        return ""
    mean, error, count = found
    band = "" if math.isnan(error) else f" ± {number(error)}"
    text = f"{name} - {other}: training loss {mean:+.4f}{band} nats over the last {count} iterations"
    mine, there = (dict(zip(*one.column("lm loss validation"))) for one in (run, theirs))
    if both := mine.keys() & there.keys():
        at = max(both)
        text += f"; validation loss {mine[at] - there[at]:+.4f} at iteration {at}"
    return text + "."


def number(value: float) -> str:
    """A small number as everywhere in the report: 0.0012, and 3.1e-5 below a ten-thousandth."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e-4:
        return f"{value:.{max(0, 1 - math.floor(math.log10(abs(value))))}f}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"


def nats(value: float, error: float | None) -> str:
    """A loss difference with two standard errors."""
    band = "" if error is None or not math.isfinite(error) else f" ± {number(2 * error)}"
    return f"{number(value)}{band} nats"


def _count(value: float) -> str:
    """A large number in words, such as 6.8 million."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"
