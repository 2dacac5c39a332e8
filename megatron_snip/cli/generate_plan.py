r"""Make plans from statistics: SNIP's, baselines for comparison, and a picture of the trade-off.

    megatron-snip plan --stats stats.json --load runs/my/checkpoints --snip-target 0.75 \
        --snip-options fp8,fp4 --snip-granularity gemm --num-random 5 --random-seed 0 --output-dir plans

Writes plans for `pretrain_llama.py --precision plan --precision-plan FILE` to --output-dir: best.json (objective
--snip-objective, by default snip), random_0.json ..., layer_id.json, layer_type.json and, if the statistics suffice,
abs_err.json and rel_err.json.  pareto.json and pareto.html have the quality loss for each share saved.  In
pareto.json, quality_loss and bound are those of --snip-objective for every plan; objective, gap and status are the
plan's own.

The statistics contain the model's shape.  If you also give it (by --load, by options, or because the statistics are in
a run folder), it must be the same.  You set pipeline stages and SNIP's options as in training, on the command line or
by --config FILE.

With --try, best.json is what a run would apply: up to --snip-trials forward passes with the weights of --load compare
the plan with others if it costs more than predicted.  They read the run's data, or that of --data-path, after the
batches that --snip-probe-tokens covers.  The file records the measurements ("trial").  --snip-max-loss NATS replaces a
saving: it takes the largest share that measures below NATS, and implies --try.  For several ranks, use torchrun.

With --memory-gib GIB, precision and what each block keeps for backward are planned together.  best.json and
memory_plan.json are then the fastest plans that fit GIB on each of --world-size ranks and lose at most as much
quality as precision_alone.json, the plan of the saving.  Layout, batch, --bf16 and --optimizer-precision come from
where the model comes from, or from options.  Train with --precision plan --precision-plan best.json --memory-plan
memory_plan.json.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_snip import runtime
from megatron_snip.arguments import parse
from megatron_snip.cli import parsers
from megatron_snip.cli.collect_stats import prepare
from megatron_snip.cli.tables import aligned
from megatron_snip.cli.trials import check_trials, make_trials, trial_samples, try_as_a_run
from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output
from megatron_snip.files.json import write_atomic, write_json
from megatron_snip.snip.curve import points_of, where_it_breaks
from megatron_snip.snip.max_loss import judgement
from megatron_snip.snip.measure.statistics import WHERE_UPDATES, Statistics
from megatron_snip.snip.plan.options import measured_options
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.planner import BASELINES, Planner
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.predict.sampling import batches_of
from megatron_snip.snip.trial import TrialFailed, Tried, with_record
from megatron_snip.train.memory_plan.joint_plan import plan_together
from megatron_snip.train.memory_plan.plan_file import FILE as MEMORY_PLAN
from megatron_snip.train.pictures.curve_picture import WHAT, measured_curve
from megatron_snip.train.pictures.figures import pareto
from megatron_snip.train.report.headline import number
from megatron_snip.train.report.page import Section, page
from megatron_snip.train.report.page import table as html_table
from megatron_snip.train.run.run_folder import Start, options_of, saved_options, with_saved_options
from megatron_snip.train.run.state_file import read_run_file
from megatron_snip.train.setup import snip_shapes
from megatron_snip.train.validate import check_ranges

LOGGER = logging.getLogger("megatron_snip")
WHAT_QUALITY_IS = (
    "Quality loss is the number that a plan minimises. Under the objective snip it is the predicted rise of the loss "
    "beyond that of the base option (fp8, or else the one with least FP4), divided by the loss."
)


def read_config(words: Sequence[str], stats: Path) -> Config:
    """Parse the options; the model comes from --load, or from the run folder of the statistics.

    With --memory-gib, so does everything else that decides what the run's memory holds.
    """
    together = parse(words).dry_run.memory_gib is not None
    groups = ("model", "parallel", "training", "precision") if together else ("model",)
    config, run = options_of(words, groups), stats.parent.parent / "config.json"
    if config.checkpoint.load or stats.parent.name != "stats" or not run.is_file():
        return config
    _, of_run, _ = read_run_file(run, "give the model's shape by --load or --config")
    return parse(words, saved_options({"config": of_run.to_dict()}, groups))


def read_run(words: Sequence[str], trying: bool) -> tuple[Config, Start] | None:
    """Parse the options, with model, training and data from --load; None if there is nothing to try."""
    config = parse(words)
    if not trying and config.snip.snip_max_loss is None:
        return None
    option = "--try" if trying else "--snip-max-loss"
    check_trials(config, option)
    if not config.checkpoint.load:
        raise UserError(f"{option} runs the model, so it needs --load; give a folder of checkpoints")
    return with_saved_options(words, ("model", "training", "data"))


def make_planner(config: Config, path: Path) -> Planner:
    """Read the statistics and check the options against them.  Raises UserError if they do not fit."""
    stats = Statistics.load(path)
    sizes = {shape.name: (shape.out_features, shape.in_features) for shape in stats.shapes}
    shapes = snip_shapes(config, stats.shapes if config.model.num_layers < 1 else None)
    told = {shape.name: (shape.out_features, shape.in_features) for shape in shapes}
    if odd := [name for name in {**told, **sizes} if told.get(name) != sizes.get(name)]:
        raise UserError(
            f"{path} has {len(sizes)} linears, the model has {len(told)}; {odd[0]} is "
            f"{_size(sizes, odd[0])} in the statistics and {_size(told, odd[0])} in the model; give the options of the "
            "model that they come from, or none"
        )
    check_ranges(config, "snip")
    config = config.replace(snip_options=measured_options(config.snip.snip_options, stats.formats))
    return Planner.of(config, stats, shapes)


def _size(sizes: Mapping[str, tuple[int, int]], name: str) -> str:
    return " x ".join(map(str, sizes[name])) if name in sizes else "not there"


def try_best(planner: Planner, plan: Plan, start: Start) -> tuple[Plan, list[Tried], int]:
    """Run a trial: the plan that a run would apply, all tried plans, the number of tokens.  Every rank must call it."""
    config = planner.config
    if start.iteration + 1 != planner.stats.iteration:
        LOGGER.warning(
            f"the statistics are of iteration {planner.stats.iteration}, but --load has the weights before iteration "
            f"{start.iteration + 1}; give --ckpt-step for another one"
        )
    size = config.training.batch_size(start.state["consumed_samples"] if start.state else 0)
    probed = batches_of(config.snip, size * config.model.seq_length)
    try:
        parts, batch, iteration = prepare(config, start, probed + -(-trial_samples(config) // size), updates=False)
        try:
            trials = make_trials(config, parts, batch, probed, iteration)
            tried = try_as_a_run(planner, plan, trials)
        finally:
            parts.train_loader.close()
    except TrialFailed as error:  # on every rank alike
        raise UserError(f"--load {start.load}: the trial failed: {error}") from None
    best = with_record(tried, trials.tokens)
    if best is None:
        raise UserError(f"--load {start.load}: no plan has a finite loss in the trial; give other options or weights")
    return best, tried, trials.tokens


def make_plans(planner: Planner, best: Plan, num_random: int, seed: int) -> dict[str, Plan]:
    """File name -> plan, the best first."""
    plans = {"best": best}
    plans |= {f"random_{i}": planner.solve("random", seed + i) for i in range(num_random)}
    return plans | {name: planner.solve(name) for name in planner.baselines}


def describe(
    planner: Planner, plan: Plan, predictions: Predictions, request: SolveRequest, bound: float
) -> dict[str, Any]:
    """A plan as numbers, for the table and pareto.json.

    quality_loss and ``bound`` refer to the request, gap and status to the plan's own objective.
    """
    return {
        "objective": plan.objective,
        "target": plan.target,
        "saved": planner.saved_by(plan),
        "fp4_share": plan.achieved,
        "loss_divergence": predictions.total_loss_divergence(plan.linears),
        "weight_divergence": predictions.total_weight_divergence(plan.linears),
        "quality_loss": planner.quality_of(plan, request),
        "bound": bound,
        "gap": plan.solver.gap,
        "status": plan.solver.status,
        "hash": plan.hash,
    }


def table(rows: dict[str, dict[str, Any]], objective: str, measure: str) -> str:
    """A line per plan.  All quality losses are in the best plan's objective, each gap in the plan's own.

    If the target counts modelled time, a column shows the time saved.
    """
    saved = ["time saved"] if measure == "time" else []
    heads = ["plan", *saved, "FP4 share", "loss div. (nats)", "weight div.", f"quality loss ({objective})", "gap"]
    lines = [heads]
    for name, row in rows.items():
        known = [
            "-" if row[key] is None else f"{row[key]:.4g}"
            for key in ("loss_divergence", "weight_divergence", "quality_loss")
        ]
        shares = [f"{row['saved']:.2%}"] * len(saved) + [f"{row['fp4_share']:.2%}"]
        lines.append([name, *shares, *known, f"{row['gap']:.1e}"])
    return aligned(lines)


def generate(
    config: Config, stats: Path, output_dir: Path, num_random: int, seed: int, start: Start | None = None
) -> str:
    """Write all files to a folder and return the table.  Raises UserError for bad input, before it writes anything.

    start: weights for a trial.  Then every rank must call it, and rank 0 writes.
    """
    if num_random < 0 or seed < 0:
        raise UserError(f"--num-random is {num_random}, --random-seed {seed}; give 0 or more")
    check_output("--output-dir", output_dir / "best.json")
    planner, objective = make_planner(config, stats), config.snip.snip_objective
    solved, sections, said = planner.solve(objective), [], ""
    best = solved
    together = None
    if (gib := config.dry_run.memory_gib) is not None:
        if start is not None:
            raise UserError("--memory-gib does not go with --try or --snip-max-loss, which measure precision alone")
        together = plan_together(planner, config.dry_run.world_size or runtime.environment_world_size(), gib)
        best, said = together.precision, f"planned together for {gib:g} GiB: {together.told}"
    if start is not None:
        nats = config.snip.snip_max_loss
        best, tried, tokens = try_best(planner, solved, start)
        if runtime.environment_rank() > 0:
            return ""
        said = told(best, tried, tokens, nats)
        if nats is not None:
            sections.append(measured_section(planner, tried, said))
            planner = replace(planner, config=planner.config.replace(snip_target=best.target, snip_max_loss=None))
            solved = best
    plans, frontier = make_plans(planner, best, num_random, seed), planner.frontier(objective)
    if together is not None:
        plans["precision_alone"] = solved
        replace(together.memory, precision=f"plan {best.hash}").save(output_dir / MEMORY_PLAN)
    predictions, request = Predictions.of(planner.stats), planner.request(objective)
    bound = solved.solver.bound
    rows = {name: describe(planner, plan, predictions, request, bound) for name, plan in plans.items()}
    if together is not None:
        rows["best"]["bound"] = None  # it need not save what the others do
    points = [describe(planner, plan, predictions, request, plan.solver.bound) for plan in frontier]
    for name, plan in plans.items():
        plan.save(output_dir / f"{name}.json")
    about = {"objective": objective, "measure": planner.choices.measure, "iteration": planner.stats.iteration}
    write_json(output_dir / "pareto.json", {**about, "plans": rows, "frontier": points})
    facts = [("statistics", str(stats)), ("objective", objective), ("target", str(planner.config.snip.snip_target))]
    sections.append(trade_off(planner, rows, points))
    write_atomic(output_dir / "pareto.html", page("Plans", str(output_dir), facts, [], sections))
    bad = planner.stats.not_finite
    held = f"\nheld at the base option, as statistics are not finite: {', '.join(bad)}" if bad else ""
    left = [name for name in BASELINES if name not in (*planner.baselines, "layer_type")]
    why = f"\nno {' and '.join(left)}: these statistics cover only fprop's operands; {WHERE_UPDATES}" if left else ""
    return table(rows, objective, planner.choices.measure) + held + why + (f"\n{said}" if said else "")


def trade_off(planner: Planner, rows: dict[str, dict[str, Any]], points: Sequence[dict[str, Any]]) -> Section:
    """Plans beside the frontier's points, as a picture and a table; rows and points by `describe`."""
    kinds: dict[str, list[tuple[float, float, str]]] = {}
    for name, row in rows.items():
        kind = kinds.setdefault(name.rstrip("0123456789").rstrip("_"), [])
        kind.append((row["saved"], row["quality_loss"], name))
    figure = pareto([(point["saved"], point["quality_loss"]) for point in points], kinds, WHAT[planner.choices.measure])
    heads = ("plan", "saved", "quality loss", "of the bound", "predicted loss divergence, nats")
    cells = [
        [name, f"{row['saved']:.1%}", number(row["quality_loss"]),
         f"{row['quality_loss'] / row['bound']:.2f}" if row["bound"] else "",
         "-" if row["loss_divergence"] is None else number(row["loss_divergence"])]
        for name, row in rows.items()
    ]  # fmt: skip
    return Section("Trade-off", WHAT_QUALITY_IS, [figure], html_table(heads, cells))


def told(best: Plan, tried: Sequence[Tried], tokens: int, nats: float | None) -> str:
    """The result of a trial, in one line."""
    assert best.trial is not None
    return (
        f"of {len(tried)} plans on {tokens} tokens {best.trial.name!r} is {judgement(tried, nats)}: "
        f"{best.trial.increase:.4g} +- {best.trial.error:.2g} nats above BF16"
    )


def measured_section(planner: Planner, tried: Sequence[Tried], said: str) -> Section:
    """The measured curve, with the result of the trial."""
    points = points_of(tried, Predictions.of(planner.stats), planner.saved_by)
    figure = measured_curve(points, WHAT[planner.choices.measure])
    return Section("Measured", f"{said}. {where_it_breaks(points)}", [figure])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line.  Raises UserError for bad input."""
    own, rest = parsers.plan().parse_known_args(arguments)
    stats = Path(own.stats)
    config, start = read_run(rest, own.trying) or (read_config(rest, stats), None)
    text = generate(config, stats, Path(own.output_dir), own.num_random, own.random_seed, start)
    if runtime.environment_rank() == 0:
        print(f"{text}\nwrote plans and pareto.html to {own.output_dir}")
    if start is not None:
        runtime.stop()
