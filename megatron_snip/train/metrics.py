"""What a run tells: metrics.jsonl, Megatron's progress line, wandb.

metrics.jsonl has one JSON object an iteration, with the keys that Megatron users chart.  A resumed run cuts
it back to the checkpoint's iteration, so no iteration stands in it twice.  With --log-all-ranks the processes
beside rank 0 write rows of their own to metrics/rank_0001.jsonl and so on: what each of them saw and did.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from megatron_snip.config import Config
from megatron_snip.quant import GEMMS
from megatron_snip.snip.jsonfile import write_atomic
from megatron_snip.snip.plan import Plan
from megatron_snip.snip.predict.divergence import Predictions

LOGGER = logging.getLogger("megatron_snip")
#: Of a plan's table in wandb: divergences in nats and relative to the squared update.
PLAN_COLUMNS = ("linear", *GEMMS, "loss divergence", "weight divergence")


@dataclass(frozen=True)
class RunningMean:
    """Mean of the values seen under one plan, with its standard error.  Source: Welford, Technometrics 4 (1962)."""

    plan: str = ""
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean

    def following(self, plan: str, value: float) -> RunningMean:
        """With one more value; another plan begins anew, and what is not finite is left out."""
        before = self if plan == self.plan else RunningMean(plan)
        if not math.isfinite(value):
            return before
        count, difference = before.count + 1, value - before.mean
        mean = before.mean + difference / count
        return RunningMean(plan, count, mean, before.squares + difference * (value - mean))

    def summary(self) -> dict[str, float]:
        """The mean, the count and, of two values or more, the standard error."""
        found: dict[str, float] = {"count": self.count}
        if self.count > 0:
            found["mean"] = self.mean
        if self.count > 1:
            found["standard_error"] = math.sqrt(self.squares / (self.count - 1) / self.count)
        return found


def _json_line(row: Mapping[str, Any]) -> str:
    """One row as valid JSON: NaN and infinities, which JSON does not know, become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def plan_rows(plan: Plan, predictions: Predictions | None = None) -> list[list[Any]]:
    """A row per linear, in PLAN_COLUMNS; divergences are None where they are not known."""
    rows: list[list[Any]] = []
    for name, p in plan.linears.items():
        known = [predictions.loss_divergence(name, p), predictions.weight_divergence(name, p)] if predictions else []
        rows.append([name, *(getattr(p, gemm) for gemm in GEMMS), *(known or [None, None])])
    return rows


def metrics_file(run_dir: Path, rank: int = 0) -> Path:
    """Where a process writes its rows."""
    return run_dir / f"metrics/rank_{rank:04d}.jsonl" if rank else run_dir / "metrics.jsonl"


def cut_back(path: Path, iteration: int) -> None:
    """Drop the rows of later iterations, and make the file if it is not there."""
    rows = [row for row in read_metrics(path) if row["iteration"] <= iteration]
    write_atomic(path, "".join(map(_json_line, rows)))


def cut_back_ranks(run_dir: Path, iteration: int, rank: int, world_size: int) -> None:
    """`cut_back` for this process's share of the files beside rank 0's; every process calls it.

    There may be files of more processes than run now, or of a run that wrote them while this one does not.
    """
    for path in sorted(run_dir.glob("metrics/rank_*.jsonl")):
        number = path.stem.removeprefix("rank_")
        if number.isdigit() and int(number) % world_size == rank:
            cut_back(path, iteration)


class MetricsWriter:
    """A process's metrics file and, on rank 0, wandb."""

    def __init__(self, config: Config, run_id: str, iteration: int, rank: int = 0) -> None:
        self.path = metrics_file(Path(config.logging.run_dir), rank)
        self._file: IO[str] | None = None
        self.go_back(iteration)
        self._wandb = start_wandb(config, run_id) if config.logging.wandb_project and rank == 0 else None

    def go_back(self, iteration: int) -> None:
        """Write on after this iteration; rows of later ones are dropped."""
        if self._file is not None:
            self._file.close()
        cut_back(self.path, iteration)
        self._file = open(self.path, "a")  # noqa: SIM115 - open as long as the run

    def alert(self, title: str, text: str) -> None:
        """Tell people through wandb, where it is on."""
        if self._wandb is not None:
            try:
                self._wandb.alert(title=title, text=text)
            except Exception as error:  # a message less must not end the run
                LOGGER.warning(f"wandb was not told: {error}")

    def write(self, row: Mapping[str, Any], tables: Mapping[str, Any] | None = None) -> None:
        """One iteration's metrics; the line is handed to the system at once.

        tables: what only wandb shows, made by `wandb_plan`.
        """
        assert self._file is not None
        self._file.write(_json_line(row))
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({**row, **(tables or {})})

    def wandb_plan(self, plan: Plan, predictions: Predictions | None = None) -> dict[str, Any]:
        """A plan as a wandb Table, with what it is predicted to cost, and as a picture; nothing without wandb."""
        if self._wandb is None:
            return {}
        try:
            wandb, image = importlib.import_module("wandb"), importlib.import_module("PIL.Image")
            # matplotlib takes a second that runs without wandb need not wait for
            from megatron_snip.train.report_pictures import plan_png

            table = wandb.Table(columns=list(PLAN_COLUMNS), data=plan_rows(plan, predictions))
            return {"snip/plan": table, "snip/plan_heatmap": wandb.Image(image.open(plan_png(plan)))}
        except Exception as error:  # a picture less must not end the run
            LOGGER.warning(f"iteration {plan.iteration}: the plan is not shown in wandb: {error}")
            return {}

    def close(self) -> None:
        """End the file and the wandb run."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def check_wandb(config: Config) -> None:
    """ValueError if --wandb-project is given and wandb is not installed."""
    if config.logging.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb-project needs wandb: pip install 'megatron_snip[wandb]', or drop the option")


def start_wandb(config: Config, run_id: str) -> Any:
    """A wandb run whose x axis is the iteration.

    The step is logged as a value, because a resumed offline run counts its own steps from 0 again.
    """
    wandb = importlib.import_module("wandb")
    log = config.logging
    folder = Path(log.wandb_save_dir or log.run_dir)  # wandb makes its own folder, wandb/, in it
    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=log.wandb_project,
        name=log.wandb_exp_name or Path(log.run_dir).name,
        id=run_id,
        resume="allow",
        mode=log.wandb_mode,
        dir=str(folder),
        config=config.to_dict(),
    )
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")
    return run


def progress_line(row: Mapping[str, Any], total: int, *, nan_iterations: int, tflops: float | None) -> str:
    """Megatron's progress line for one row of metrics; `iteration-time` is in seconds."""
    throughput = "" if tflops is None else f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |"
    return (
        f" [{datetime.now()}] iteration {row['iteration']:8d}/{total:8d} |"
        f" consumed samples: {row['consumed-samples']:12d} |"
        f" elapsed time per iteration (ms): {row['iteration-time'] * 1000:.1f} |{throughput}"
        f" learning rate: {row['learning-rate']:.6E} | global batch size: {row['batch-size']:5d} |"
        f" lm loss: {row['lm loss']:.6E} | loss scale: 1.0 | grad norm: {row['grad-norm']:.3f} |"
        f" number of skipped iterations: {nan_iterations:3d} | number of nan iterations: {nan_iterations:3d} |"
    )


def validation_line(iteration: int, loss: float) -> str:
    """Megatron's line for a validation."""
    return (
        f" validation loss at iteration {iteration} on validation set | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {math.exp(min(loss, 20.0)):.6E} |"
    )
