r"""Measure what low precision would cost in each linear of a model, without training.

    megatron-snip analyse llama/ --data my.txt
    torchrun --rdzv-backend one_node --nproc_per_node 8 -m megatron_snip.cli analyse runs/my/checkpoints \
        --data my.jsonl --output analysis --formats fp8,fp4,nvfp4 --tensor-model-parallel-size 8

MODEL is a Hugging Face folder or a folder of checkpoints.  --data is plain text, JSON lines with a key "text", or the
prefix of an indexed dataset.  Each of --batches batches is probed separately, so every figure has a standard error.
It writes to --output, a folder that all ranks must see: report.html with pictures, sensitivity.json, stats.json
for `megatron-snip plan`, and a plan for each of --shares, such as plan_75.json with 75% of the linears' FLOPs in FP4,
for `pretrain_llama.py --precision plan` and `megatron-snip export`.  You can add options of the trainer, such as
--snip-granularity fused.

--snip-trials forward passes (10 by default; 0: none) then measure BF16 and plans along the frontier: those of --shares,
its ends, and others where it is steep.  They run sequences after the probe's, by default as many (--snip-trial-tokens).
The page shows the measured curve and where it breaks; a share's plan is the best measured of those that save as much.
--snip-max-loss NATS in place of --shares takes the largest share that measures below, and writes plan.json.

Computes in BF16; give --no-bf16 for figures that do not depend on the layout, which takes three times as long on CPUs.
On a CPU, start with --batches 4 --batch-size 1 --seq-length 128.

Convention: the loss divergence is the predicted increase of the loss, in nats a token, if the linear's fprop runs in a
format.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from megatron_snip import runtime
from megatron_snip.cli import collect_stats, parsers, preprocess_data
from megatron_snip.cli.collect_stats import Batches
from megatron_snip.cli.shares import ABOUT, Planned, plan_and_try, shown
from megatron_snip.cli.tables import aligned
from megatron_snip.cli.trials import make_trials, trial_samples
from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDataset, IndexedDatasetBuilder, token_dtype
from megatron_snip.data.tokenizer import build_tokenizer
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output, one_line, read_file
from megatron_snip.files.json import write_atomic, write_json
from megatron_snip.formats import get_format
from megatron_snip.interop.huggingface import is_hf_folder
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.max_loss import check_max_loss
from megatron_snip.snip.measure.probe import ProbeFailed
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.options import check_choices
from megatron_snip.snip.predict.divergence import loss_divergence
from megatron_snip.snip.trial import TrialFailed
from megatron_snip.train.pictures import figures as pictures
from megatron_snip.train.report.page import Section, page, table
from megatron_snip.train.run.run_folder import Start, with_saved_options
from megatron_snip.train.setup import Parts, snip_shapes
from megatron_snip.train.validate import check_ranges

LOGGER = logging.getLogger("megatron_snip")
#: Linears in the terminal's table.
MOST_SHOWN = 12


@dataclass(frozen=True)
class Sensitivity:
    """Loss divergence in nats of every linear [L] in every format [F], fine to coarse: mean and standard error over
    batches.
    """

    names: Sequence[str]
    formats: Sequence[str]
    mean: np.ndarray
    error: np.ndarray

    @classmethod
    def of(cls, each: Sequence[Statistics]) -> Sensitivity:
        """From the statistics of each batch."""
        formats = sorted(each[0].formats, key=lambda fmt: -get_format(fmt).bits_per_element)
        options = [LinearPrecision.uniform(fmt) for fmt in formats]
        values = np.stack([loss_divergence(stats, options) for stats in each])  # [B, L, F]
        error = values.std(0, ddof=1) / math.sqrt(len(each)) if len(each) > 1 else np.full(values.shape[1:], np.nan)
        return cls(each[0].names, formats, values.mean(0), error)

    def column(self, fmt: str) -> dict[str, float]:
        """Linear -> mean in one format."""
        return dict(zip(self.names, self.mean[:, list(self.formats).index(fmt)].tolist(), strict=True))

    def rows(self, names: Sequence[str]) -> list[list[str]]:
        """A row of text per linear."""
        index = {name: i for i, name in enumerate(self.names)}
        return [
            [name, *(shown(self.mean[index[name], f], self.error[index[name], f]) for f in range(len(self.formats)))]
            for name in names
        ]

    def to_dict(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Linear -> format -> mean and standard error; None for a number that is not finite, which JSON lacks."""

        def figure(value: float) -> float | None:
            return float(value) if math.isfinite(value) else None

        return {
            name: {
                fmt: {"mean": figure(self.mean[i, f]), "standard_error": figure(self.error[i, f])}
                for f, fmt in enumerate(self.formats)
            }
            for i, name in enumerate(self.names)
        }


def indexed(data: Path) -> str | None:
    """The prefix of the indexed dataset that --data names, by its prefix or one of its files; None for text."""
    within = [str(data.with_suffix(""))] if data.suffix in (".bin", ".idx") else []
    return next((prefix for prefix in (*within, str(data)) if Path(f"{prefix}.idx").is_file()), None)


def tokenised(data: Path, kind: str, model: str, folder: Path) -> str:
    """The prefix of an indexed dataset with the tokens of --data.  If --data is text, it is made in a folder."""
    if (there := indexed(data)) is not None:
        return there
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / "data"
    if data.suffix in (".jsonl", ".json"):
        job = preprocess_data.Job(kind, model, None, ("text",), True)
        preprocess_data.preprocess(job, [str(data)], str(prefix), 1, 10**9)
        return f"{prefix}_text_document"
    tokenizer = build_tokenizer(kind, model)
    try:
        text = read_file(data, "text", "give --data a file of text", most=1 << 28).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"--data {data} is not UTF-8 text ({error}); give text, JSON lines or a dataset") from None
    with IndexedDatasetBuilder(prefix, token_dtype(tokenizer.vocab_size)) as builder:
        builder.add_document(np.array([*tokenizer.encode(text), tokenizer.eod]))
    return str(prefix)


def warn_of_repeats(prefix: str, own: argparse.Namespace, tried: int) -> None:
    """Warn if text repeats: batches of the same text vary less, so their standard errors are too small.

    tried: number of tokens for the trials, which should differ from the probe's.
    """
    there, taken = IndexedDataset(prefix).num_tokens, own.batches * own.batch_size * own.seq_length
    more = f" and trials of {tried:,}" if tried else ""
    fewer = " or --snip-trial-tokens" if tried else ""
    if there < taken + tried:
        LOGGER.warning(
            f"--data {own.data} has {there:,} tokens and {own.batches} batches of {own.batch_size} x {own.seq_length}"
            f"{more} take {taken + tried:,}: text repeats, and standard errors are too small; give more text, or fewer "
            f"--batches{fewer}"
        )


def on_rank_0(make: Callable[[], str]) -> str:
    """Call ``make`` on rank 0 and return its result on every rank.  Raises its error on every rank, too."""
    answer = ["", ""]
    if runtime.environment_rank() == 0:
        try:
            answer[0] = make()
        except (UserError, OSError) as error:
            answer[1] = one_line(error)
    dist.broadcast_object_list(answer)
    if answer[1]:
        raise UserError(answer[1])
    return answer[0]


def options_of(own: argparse.Namespace, rest: Sequence[str]) -> tuple[Config, Start]:
    """The trainer's options to probe the model on the data."""
    probed = own.batches * own.batch_size * own.seq_length
    words = ["--load", own.model, "--bf16", "--snip-trials", "10", "--snip-trial-tokens", str(max(1, probed)), *rest]
    try:
        given, _ = with_saved_options(words, ("model", "data"))
    except UserError as error:  # the user gave a folder, not --load
        raise UserError(str(error).removeprefix("--load ")) from None
    p = given.parallel
    runtime.start(p.distributed_backend, p.distributed_timeout_minutes, device=p.device)
    kind, model = given.data.tokenizer_type, given.data.tokenizer_model
    holds_tokenizer = any((Path(own.model) / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    if is_hf_folder(Path(own.model)) and model is None and holds_tokenizer:
        kind, model = "HuggingFaceTokenizer", own.model
    if model is None and indexed(Path(own.data)) is None:
        raise UserError(f"--data {own.data} is text, and {own.model} names no tokenizer; give --tokenizer-model")
    prefix = on_rank_0(lambda: tokenised(Path(own.data), kind, str(model), Path(own.output)))
    if runtime.environment_rank() == 0:
        warn_of_repeats(prefix, own, given.snip.snip_trial_tokens if given.snip.snip_trials > 1 else 0)
    asked = {
        "data_path": prefix, "split": "1,0,0", "train_iters": 1, "lr": 1e-4, "snip_options": own.formats,
        "snip_probe_tokens": 1, "snip_weight": 0.0, "snip_objective": "snip", "precision": "snip",
        "seq_length": own.seq_length, "global_batch_size": own.batch_size,
    }  # fmt: skip
    if model is not None:
        asked |= {"tokenizer_type": kind, "tokenizer_model": str(model)}
    for name, value in asked.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    config, start = with_saved_options(words, ("model",))
    return config, weights_of(start)


def weights_of(start: Start) -> Start:
    """A start with only the checkpoint's weights, since the data is not that of its run."""
    if start.state is None:
        return start
    fresh = {"weights_alone": True, "optimizer_steps": 0, "consumed_samples": 0}
    return replace(start, iteration=0, state={**start.state, **fresh})


def measure(config: Config, parts: Parts, batch: Batches, iteration: int, batches: int) -> list[Statistics]:
    """Statistics of each batch.  Every rank must call it.  May raise ProbeFailed, on every rank."""
    assert parts.coordinator is not None
    probe, found, begin = parts.coordinator.probe, [], time.perf_counter()
    bar = tqdm(
        total=batches * config.num_microbatches(parts.mesh.dp.size) * len(probe.linears), desc="probe", unit="linear",
        leave=False, disable=parts.mesh.rank > 0, mininterval=1.0 if sys.stderr.isatty() else 10.0,
    )  # fmt: skip
    probe.progress = bar.update
    try:
        for ahead in range(batches):
            run_pass = parts.stepper.pass_runner(batch(ahead), iteration + ahead)
            found.append(probe.run(run_pass, parts.optimizer.zero_grad, iteration + ahead, updates=False))
            spent = time.perf_counter() - begin
            left = spent / (ahead + 1) * (batches - ahead - 1)
            LOGGER.info(
                f"batch {ahead + 1} of {batches}: loss {found[-1].loss:.4f}, {spent:.1f} s, about {left:.0f} s left"
            )
    finally:
        bar.close()
    return found


def check_shares(config: Config, shares: Sequence[float]) -> None:
    """Raise UserError for a share that no plan can reach, before hours of probing."""
    shapes = snip_shapes(config)
    for share in shares:
        try:
            check_choices(config.replace(snip_target=share).snip, shapes)
        except UserError as error:
            raise UserError(str(error).replace("--snip-target", "--shares", 1)) from None


def write(output: Path, own: argparse.Namespace, stats: Statistics, found: Sensitivity, planned: Planned) -> str:
    """Write all files to --output.  Returns the text for the terminal."""
    coarsest, plans = found.formats[-1], planned.plans
    worst = sorted(found.column(coarsest).items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -math.inf)
    heads = ["linear", *(f"{fmt} (nats)" for fmt in found.formats)]
    totals = ["all linears", *(f"{found.mean[:, f].sum():.2e}" for f in range(len(found.formats)))]
    plan_heads, plan_rows = planned.table()
    stats.save(output / "stats.json")
    write_json(output / "sensitivity.json", found.to_dict())
    for name, plan in plans.items():
        plan.save(output / f"{name}.json")
    facts = [
        ("model", own.model), ("data", own.data), ("loss", f"{stats.loss:.4f} nats a token"),
        ("batches", f"{own.batches} of {own.batch_size} x {own.seq_length} tokens"),
        ("formats", ", ".join(found.formats)),
    ]  # fmt: skip
    every_cost = [cost for fmt in found.formats for cost in found.column(fmt).values()]
    figures = [
        pictures.divergence_heatmap(found.column(fmt), "nats", every_cost) | {"title": fmt} for fmt in found.formats
    ]
    every = table(heads, [totals, *found.rows([name for name, _ in worst])])
    sections = [
        Section("Sensitivity", "Predicted increase of the loss, in nats, if one linear runs in a format.", figures),
        Section("Plans", ABOUT, [pictures.plans([*plans.values()], [*plans])], table(plan_heads, plan_rows)),
        *planned.curve(),
        Section("All linears", "Loss divergence with its standard error over batches, the costliest first.", (), every),
    ]  # fmt: skip
    notes = [f"statistics not finite: {', '.join(stats.not_finite)}"] if stats.not_finite else []
    write_atomic(output / "report.html", page(f"Low precision in {own.model}", own.model, facts, notes, sections))
    rows = [totals, *found.rows([name for name, _ in worst[:MOST_SHOWN]])]
    parts = [aligned([heads, *rows]), aligned([plan_heads, *plan_rows]), *(s.text for s in planned.curve())]
    if plans:
        parts.append(
            f"next: train with --precision plan --precision-plan {output}/{next(iter(plans))}.json, or "
            f"megatron-snip export {output}/{next(iter(plans))}.json --to megatron --output exported_plan"
        )
    return "\n\n".join([*parts, f"{output}/report.html"])


def read_shares(own: argparse.Namespace) -> list[float]:
    """Read --shares.  Raises UserError for anything but shares, and for too few batches."""
    words = parsers.SHARES if own.shares is None else own.shares
    try:
        shares = [float(word) for word in words.split(",")]
    except ValueError:
        raise UserError(f"--shares {words} are not numbers; give shares from 0 to 1, by comma") from None
    if own.batches < 1 or not all(0 <= share <= 1 for share in shares):
        raise UserError(f"--batches is {own.batches}, --shares {words}; give 1 or more, and shares from 0 to 1")
    return shares


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line.  Raises UserError for bad input."""
    own, rest = parsers.analyse().parse_known_args(arguments)
    shares = read_shares(own)
    output = Path(own.output)
    check_output("--output", output / "report.html")
    config, start = options_of(own, rest)
    if config.snip.snip_max_loss is not None:
        if own.shares is not None:
            raise UserError("--shares and --snip-max-loss are alternatives, and both are given; drop one")
        shares = []
    check_ranges(config, "snip")
    check_max_loss(config.snip)
    check_shares(config, shares)
    tries = config.snip.snip_trials > 1
    ahead = own.batches + (-(-trial_samples(config) // own.batch_size) if tries else 0)
    parts, batch, iteration = collect_stats.prepare(config, start, ahead, updates=False)
    try:
        each = measure(config, parts, batch, iteration, own.batches)
        trials = make_trials(config, parts, batch, own.batches, iteration) if tries else None
        planned = plan_and_try(config, each, shares, trials)
    except (ProbeFailed, TrialFailed) as error:  # on every rank alike
        raise UserError(f"{start.load}: {error}") from None
    finally:
        parts.train_loader.close()
    if parts.mesh.rank == 0:
        print(write(output, own, Statistics.mean(each), Sensitivity.of(each), planned), flush=True)
    runtime.stop()
