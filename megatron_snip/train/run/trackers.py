"""Trackers besides metrics.jsonl, with the same names: wandb and TensorBoard."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.faults.ending import one_line
from megatron_snip.quant import GEMMS
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.divergence import Predictions

LOGGER = logging.getLogger("megatron_snip")
#: Columns of a plan's table: divergences in nats and relative to the squared update.
PLAN_COLUMNS = ("linear", *GEMMS, "loss divergence", "weight divergence")
_PATIENCE = 20.0  # seconds; all other ranks wait too, and wandb's default is 90


class Tracker(Protocol):
    """One tracker.  Its methods may raise anything; the caller continues."""

    name: str

    def log(self, row: Mapping[str, Any], plan: Plan | None, predictions: Predictions | None) -> None:
        """Log one iteration's metrics, and the plan that takes effect."""

    def alert(self, title: str, text: str, iteration: int) -> None:
        """Send an alert at once."""

    def go_back(self, iteration: int) -> None:
        """Discard what was logged for later iterations."""

    def finish(self) -> None:
        """End of the run."""


def check_trackers(config: Config) -> None:
    """Raise UserError if an option needs a package that is not installed."""
    log = config.logging
    for option, value, package in (
        ("--wandb-project", log.wandb_project, "wandb"), ("--tensorboard-dir", log.tensorboard_dir, "tensorboard"),
    ):  # fmt: skip
        if value and importlib.util.find_spec(package) is None:
            raise UserError(f"{option} needs {package}: pip install {package}, or drop the option")


def start_trackers(config: Config, run_id: str, iteration: int | None) -> list[Tracker]:
    """Trackers that the options request, for a run that continues after an iteration; None: append."""
    trackers: list[Tracker] = []
    if config.logging.wandb_project:
        try:
            trackers.append(Wandb(config, run_id))
        except Exception as error:  # wandb's errors share no base class; an OSError here concerns its own files
            LOGGER.warning(f"wandb cannot start: {one_line(error)}; training goes on, and metrics.jsonl has every row")
    if config.logging.tensorboard_dir:
        trackers.append(TensorBoard(config.logging.tensorboard_dir, iteration))
    return trackers


def plan_rows(plan: Plan, predictions: Predictions | None) -> list[list[Any]]:
    """A row of `PLAN_COLUMNS` per linear, with None for unknown values."""
    rows = []
    for name, p in plan.linears.items():
        known = [predictions.loss_divergence(name, p), predictions.weight_divergence(name, p)] if predictions else []
        rows.append([name, *(getattr(p, gemm) for gemm in GEMMS), *(known or [None, None])])
    return rows


class Wandb:
    """A wandb run with the iteration as x axis; offline if wandb does not answer at the start.

    The step is logged as a value, because a resumed offline run restarts its own step count at 0.
    """

    name = "wandb"

    def __init__(self, config: Config, run_id: str) -> None:
        wandb = importlib.import_module("wandb")
        log = config.logging
        folder = Path(log.wandb_save_dir or log.run_dir)  # wandb creates its own folder, wandb/, in it
        folder.mkdir(parents=True, exist_ok=True)
        init = partial(
            wandb.init,
            project=log.wandb_project,
            name=log.wandb_exp_name or Path(log.run_dir).name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=config.to_dict(),
        )
        try:
            given = wandb.setup().settings.init_timeout  # by WANDB_INIT_TIMEOUT, else wandb's default
            timeout = _PATIENCE if given == wandb.Settings().init_timeout else given
            self.run = init(mode=log.wandb_mode, settings=wandb.Settings(init_timeout=timeout))
        except Exception as error:
            wandb.teardown()  # its process still holds the run's id
            self.run = init(mode="offline")
            LOGGER.warning(
                f"wandb cannot be reached: {one_line(error)}; until the next start its rows stay in the run folder; "
                f"send them later: wandb sync {shlex.quote(str(Path(self.run.settings.sync_dir).absolute()))}"
            )
        self.run.define_metric("iteration")
        self.run.define_metric("*", step_metric="iteration")

    def log(self, row: Mapping[str, Any], plan: Plan | None, predictions: Predictions | None) -> None:
        """Log the row, and a table and picture of the plan."""
        self.run.log({**row, **(self._shown(plan, predictions) if plan else {})})

    def _shown(self, plan: Plan, predictions: Predictions | None) -> dict[str, Any]:
        try:
            wandb, image = importlib.import_module("wandb"), importlib.import_module("PIL.Image")
            table = wandb.Table(columns=list(PLAN_COLUMNS), data=plan_rows(plan, predictions))
            return {"snip/plan": table, "snip/plan_heatmap": wandb.Image(image.open(_picture(plan)))}
        except Exception as error:  # a missing picture must not cost the row
            LOGGER.warning(f"iteration {plan.iteration}: the plan is not shown in wandb: {error}")
            return {}

    def alert(self, title: str, text: str, iteration: int) -> None:
        """Send wandb's own alert."""
        self.run.alert(title=title, text=text)

    def go_back(self, iteration: int) -> None:
        """Does nothing: wandb keeps both, and the x axis is the iteration."""

    def finish(self) -> None:
        """End the wandb run."""
        self.run.finish()


class TensorBoard:
    """Events in a folder.  After going back, those of later iterations are hidden.

    tensorboard's writer never recovers from a failed write, so a new one replaces it.
    """

    name = "TensorBoard"

    def __init__(self, folder: str, iteration: int | None) -> None:
        self._make = partial(importlib.import_module("torch.utils.tensorboard").SummaryWriter, folder, flush_secs=10)
        self.writer: Any = self._make(purge_step=None if iteration is None else iteration + 1)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        if self.writer is None:
            self.writer = self._make()
        try:
            yield self.writer
        except Exception:
            self.writer = None
            raise

    def log(self, row: Mapping[str, Any], plan: Plan | None, predictions: Predictions | None) -> None:
        """Log every number of the row, and a table and picture of the plan."""
        step = row["iteration"]
        with self._writing() as writer:
            for name, value in row.items():
                if isinstance(value, (int, float)) and name != "iteration" and math.isfinite(value):
                    writer.add_scalar(name, value, step)
            if plan is not None:
                self._show(writer, plan, predictions, step)

    def _show(self, writer: Any, plan: Plan, predictions: Predictions | None, step: int) -> None:
        lines = [PLAN_COLUMNS, ("---",) * len(PLAN_COLUMNS), *plan_rows(plan, predictions)]
        writer.add_text("snip/plan", "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines), step)
        try:
            image, numpy = importlib.import_module("PIL.Image"), importlib.import_module("numpy")
            pixels = numpy.asarray(image.open(_picture(plan)).convert("RGB"))
        except Exception as error:
            LOGGER.warning(f"iteration {plan.iteration}: the plan is not shown in TensorBoard: {error}")
            return
        writer.add_image("snip/plan_heatmap", pixels, step, dataformats="HWC")

    def alert(self, title: str, text: str, iteration: int) -> None:
        """Add a line to the texts."""
        with self._writing() as writer:
            writer.add_text("alerts", f"**{title}**: {text}", iteration)

    def go_back(self, iteration: int) -> None:
        """Start a new file, which hides later iterations."""
        self.finish()
        self.writer = self._make(purge_step=iteration + 1)

    def finish(self) -> None:
        """Write pending events."""
        if self.writer is not None:
            self.writer.close()


def _picture(plan: Plan) -> Any:
    # matplotlib takes a second to import, which most runs need not spend
    from megatron_snip.train.pictures.plan_picture import plan_png

    return plan_png(plan)
