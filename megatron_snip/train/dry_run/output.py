"""Results of a dry run as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_snip.config import Config
from megatron_snip.model.stages import stage_blocks
from megatron_snip.snip.plan.options import read_choices
from megatron_snip.snip.predict.objectives import get_objective
from megatron_snip.snip.trial import samples_of
from megatron_snip.train.dry_run.counts import KINDS, Measured, Stretch
from megatron_snip.train.dry_run.device import device_of
from megatron_snip.train.schedule import final_switch
from megatron_snip.train.setup import snip_shapes

_GIB = 2**30
#: Names of stretches.
PROBE, TRIAL = "probe", "pass of a trial"


def trial_passes(config: Config) -> int:
    """Most forward passes of a trial; 0 without trials."""
    snip = config.snip
    if (
        config.precision.precision != "snip"
        or snip.snip_trials < 2
        or not get_objective(snip.snip_objective).needs_stats
    ):
        return 0
    return snip.snip_trials


def trial_samples(config: Config, dp: int) -> int:
    """Sequences in each pass of a trial."""
    together, stages = config.training.micro_batch_size * dp, config.parallel.pipeline_model_parallel_size
    return samples_of(config.snip.snip_trial_tokens, config.model.seq_length, together, stages)


def _in_iterations(config: Config, world_size: int, one: Measured) -> dict[str, float]:
    """Cost of a probe, and of a trial with all its passes, in plain iterations.

    Counts a rank's FLOPs and the pipeline bubble, which is large for the few microbatches of a trial.
    """
    found, dp = {stretch.name: stretch for stretch in one.stretches}, config.data_parallel_size(world_size)
    pp, stages = config.parallel.pipeline_model_parallel_size, stage_blocks(config.model.num_layers, config.parallel)
    waits = (pp - 1) * pp / len(stages)  # in microbatches; fewer if stages are interleaved

    def time(stretch: Stretch, samples: int) -> float:
        microbatches = samples // (config.training.micro_batch_size * dp)
        return float(stretch.counts["flops",]) * (1 + waits / microbatches)

    batch = config.training.global_batch_size
    plain, costs = time(one.stretches[0], batch), {}
    if PROBE in found and plain:
        costs["probe"] = time(found[PROBE], batch) / plain
    if TRIAL in found and plain:
        costs["trial"] = trial_passes(config) * time(found[TRIAL], trial_samples(config, dp)) / plain
    return costs


def _costs(config: Config, world_size: int, one: Measured) -> list[str]:
    """Sentences about probes and trials of one rank."""
    costs, interval, lines = _in_iterations(config, world_size, one), config.snip.snip_interval, []
    sent = {s.name: sum(size for _, size in _collectives(s).values()) / _GIB for s in one.stretches}
    share = f"of a run at --snip-interval {interval}"
    if "probe" in costs:
        cost = costs["probe"]
        lines.append(
            f"a probe: {cost:.2f} plain iterations by FLOPs, {sent[PROBE]:.2f} GiB in collectives (an iteration: "
            f"{sent[one.stretches[0].name]:.2f}); {cost / interval:.3%} {share}"
        )
    if "trial" in costs:
        cost, passes = costs["trial"], trial_passes(config)
        tokens = trial_samples(config, config.data_parallel_size(world_size)) * config.model.seq_length
        lines.append(
            f"a trial: {passes} forward passes of {tokens} tokens at most, or 2 if the plan costs what was predicted: "
            f"{cost:.2f} plain iterations, {passes * sent[TRIAL]:.2f} GiB in collectives; {cost / interval:.3%} {share}"
        )
    return lines


def _collectives(stretch: Stretch) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, collective) -> (calls, bytes)."""
    found = sorted((str(what[1]), str(what[2])) for what in stretch.counts if what[0] == "count")
    return {pair: (stretch.counts["count", *pair], stretch.counts["bytes", *pair]) for pair in found}


def _total(stretch: Stretch, kind: str) -> int:
    return sum(count for what, count in stretch.counts.items() if what[0] == kind)


def as_text(config: Config, world_size: int, measured: Sequence[Measured]) -> str:
    """Tables for display."""
    p, dp, cp = config.parallel, config.data_parallel_size(world_size), config.parallel.context_parallel_size
    tokens = config.training.micro_batch_size * config.model.seq_length // cp
    device = {"cpu": "CPUs", "hopper": "Hopper GPUs", "blackwell": "Blackwell GPUs"}[device_of(config)]
    context = f" x context parallel {cp}" if cp > 1 else ""
    lines = [
        f"dry run: {world_size} {device}, tensor parallel {p.tensor_model_parallel_size} x pipeline parallel "
        f"{p.pipeline_model_parallel_size}{context} x data parallel {dp}, {config.num_microbatches(dp)} microbatches "
        f"of {tokens} tokens",
    ]
    if config.precision.precision == "snip":
        shapes = snip_shapes(config)
        lines.append(f"a plan: {len(shapes)} linears x {len(read_choices(config.snip, shapes).options)} options")
    if (final := final_switch(config.with_iterations())) is not None:
        iterations = config.with_iterations().training.train_iters
        count = iterations - final.start + 1
        lines.append(f"the last {count} of {iterations} iterations, {count / iterations:.1%}, run in {final}")
    if config.training.compile:
        lines.append("blocks are counted as without --compile, under which launches and memory differ")
    for one in measured:
        place = f"rank {one.rank}, pipeline stage {one.stage}"
        each = f"{one.stored / one.parameters:.4g} bytes each with gradients and optimiser"
        lines += ["", f"{place}, holds {one.parameters / 1e9:.3f}e9 parameters, {each}", ""]
        lines += _aligned(_rows(one, config.dry_run.dry_run_gemms))
        if costs := _costs(config, world_size, one):
            lines += ["", *costs]
    return "\n".join(lines)


def _rows(one: Measured, with_gemms: bool) -> list[list[str]]:
    """The table of one rank: row names first, then a column per stretch."""

    def row(name: str, value: Callable[[Stretch], str]) -> list[str]:
        return [name, *(value(stretch) for stretch in one.stretches)]

    rows = [row("", lambda stretch: stretch.name)]
    rows += [row(f"{kind}, GiB", lambda s, kind=kind: f"{s.peak[kind] / _GIB:.2f}") for kind in KINDS]  # type: ignore[misc]
    rows.append(row("peak, GiB", lambda s: f"{s.total / _GIB:.2f}"))
    if any(stretch.host for stretch in one.stretches):
        rows.append(row("on the host, GiB", lambda s: f"{s.host / _GIB:.2f}"))
    rows.append(row("a block keeps for backward, MiB", lambda s: f"{s.kept / 2**20:.2f}"))
    rows.append(row("TFLOP", lambda s: f"{s.counts[('flops',)] / 1e12:.4g}"))
    pairs = sorted({pair for stretch in one.stretches for pair in _collectives(stretch)})
    for pair in pairs:
        rows.append(row(f"{pair[0]} {pair[1]}, calls: GiB", lambda s, pair=pair: _sent(s, pair)))  # type: ignore[misc]
    rows.append(row("kernel launches", lambda s: str(_total(s, "launch"))))
    rows.append(row("launches of casts", lambda s: str(s.counts["launch", "cast"])))
    rows.append(row("launches of GEMMs", lambda s: str(_total(s, "gemm"))))
    rows.append(row("device-to-host reads", lambda s: str(s.counts["read",])))
    shapes = {what for stretch in one.stretches for what in stretch.counts if what[0] == "gemm" and with_gemms}
    for what in sorted(shapes, key=str):
        name = f"GEMM {what[1]} x {what[2]} x {what[3]}, {what[4]}"
        rows.append(row(name, lambda s, what=what: str(s.counts[what] or "")))  # type: ignore[misc]
    return rows


def _sent(stretch: Stretch, pair: tuple[str, str]) -> str:
    count, size = _collectives(stretch).get(pair, (0, 0))
    return f"{count}: {size / _GIB:.3f}" if count else ""


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table with a header row and aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append(f"| {' | '.join(cells)} |")
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return [lines[0], f"|{rule}|", *lines[1:]]
