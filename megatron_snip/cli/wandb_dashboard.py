r"""Make a wandb workspace for a project's runs: loss, pace, plans, and predicted and measured divergences.

    megatron-snip dashboard --project my-project
    megatron-snip dashboard --project my-project --entity my-team --dry-run

Saves a new view of the project and prints its address.  Runs with --wandb-project my-project appear in it as they are
synced.  Without --entity the view goes where runs go, to wandb's default entity of the user.  --dry-run prints the
workspace as JSON and sends nothing.  Needs the extra `dashboard`.

Convention: a panel is (title, names of metrics); "/regex/" shows every metric that it matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_snip.cli.command import Parser, reported
from megatron_snip.errors import UserError

MEASURED = "snip/measured_loss_divergence"
#: Section -> panels; docs/run_folder.md says what is logged, and when.
PANELS: Mapping[str, Sequence[tuple[str, Sequence[str]]]] = {
    "Training": (
        ("loss", ["lm loss", "lm loss validation"]),
        ("gradient norm", ["grad-norm"]),
        ("learning rate", ["learning-rate"]),
        ("iterations without an update", ["skipped"]),
    ),
    "Pace": (
        ("TFLOP/s per GPU (--log-throughput)", ["throughput"]),
        ("seconds per iteration", ["iteration-time"]),
        ("bytes (--log-memory)", ["/mem-.*/"]),
    ),
    "Plans": (
        ("share of FLOPs in FP4", ["snip/achieved"]),
        ("saved, in the target's unit", ["snip/saved", "snip/target"]),
        ("share in FP4 by stage", ["/snip/stage_\\d+/achieved/"]),
        ("modelled time by stage", ["/snip/stage_\\d+/modelled_time/"]),
        ("modelled time", ["snip/modelled_time"]),
        ("linears changed", ["snip/churn"]),
    ),
    "Divergences": (
        ("loss divergence by block (nats)", ["/snip/loss_divergence/block_.*/"]),
        ("loss divergence by kind (nats)", ["/snip/loss_divergence/(?!block_).*/"]),
        ("weight divergence by block", ["/snip/weight_divergence/block_.*/"]),
        ("weight divergence by kind", ["/snip/weight_divergence/(?!block_).*/"]),
    ),
    "Measured against predicted": (
        ("loss divergence (nats)", [f"{MEASURED}_mean", "snip/predicted_loss_divergence"]),
        ("its standard error", [f"{MEASURED}_standard_error"]),
        ("the plan taken in a trial, above BF16 (nats)", ["snip/trial_increase", "snip/trial_predicted"]),
        ("plans in trials, above BF16 (nats)", ["/snip/trial/.*/"]),
        ("plans in trials, predicted (nats)", ["/snip/trial_predicted/.*/"]),
        ("probe: error of the plan's cost, largest share of one token", ["snip/cost_error", "snip/top_token"]),
    ),
    "Solver": (
        ("objective and bound", ["snip/objective", "snip/bound"]),
        ("gap", ["snip/gap"]),
        (
            "seconds",
            [
                "snip/probe_seconds",
                "snip/solver_seconds",
                "snip/wait_seconds",
                "snip/trial_seconds",
                "snip/apply_seconds",
            ],
        ),
        ("solves that failed", ["snip/solve_failed"]),
    ),
}
#: Lines at two standard errors above and below the mean.
BAND = [f"${{{MEASURED}_mean}} {sign} 2 * ${{{MEASURED}_standard_error}}" for sign in "+-"]
HEATMAP, TABLE = "snip/plan_heatmap", "snip/plan"


def workspace(entity: str, project: str, name: str) -> Any:
    """The workspace, not saved yet.  An empty entity can be printed, not saved.

    Raises UserError without wandb-workspaces.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(f"wandb-workspaces cannot be used ({error}): pip install wandb-workspaces") from None

    def lines(title: str, names: Sequence[str]) -> Any:
        if names[0].startswith("/"):
            return reports.LinePlot(title=title, x="iteration", metric_regex=names[0].strip("/"))
        return reports.LinePlot(title=title, x="iteration", y=list(names))

    sections = []
    for title, panels in PANELS.items():
        drawn = [lines(*panel) for panel in panels]
        if title == "Measured against predicted":
            band = [f"{MEASURED}_mean", f"{MEASURED}_standard_error"]
            drawn.append(
                reports.LinePlot(title="measured, two standard errors", x="iteration", y=band, custom_expressions=BAND)
            )
        if title == "Plans":
            drawn.append(reports.MediaBrowser(title="the plan", media_keys=[HEATMAP]))
            drawn.append(reports.WeavePanelSummaryTable(table_name=TABLE))
        sections.append(workspaces.Section(title, panels=drawn, is_open=True))
    settings = workspaces.WorkspaceSettings(x_axis="iteration")
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def as_json(made: Any) -> str:
    """A workspace as indented JSON, without default values."""
    from pydantic import TypeAdapter

    return TypeAdapter(type(made)).dump_json(made, indent=1, exclude_defaults=True).decode()


def default_entity() -> str:
    """The entity that wandb gives a run that names none.  Raises UserError if wandb cannot be asked or has none."""
    import wandb

    why = "this user has none"
    try:
        if entity := wandb.Api().default_entity:
            return entity
    except Exception as error:  # wandb and the network raise all kinds
        why = str(error)
    raise UserError(
        f"wandb names no default entity: {why}; give --entity, `wandb login`, or look with --dry-run"
    ) from None


@reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--project", required=True, help="wandb project, as in --wandb-project")
    parser.add_argument("--entity", default="", help="wandb user or team (default: the user's default entity)")
    parser.add_argument("--name", default="SNIP", help="name of the view (default: SNIP)")
    parser.add_argument("--dry-run", action="store_true", help="print the workspace as JSON and send nothing")
    own = parser.parse_args(arguments)
    made = workspace(own.entity, own.project, own.name)
    if own.dry_run:  # wandb is not asked: an entity that is not given is printed as ""
        print(as_json(made))
        return 0
    made.entity = made.entity or default_entity()
    try:
        made.save()
    except Exception as error:  # wandb and the network raise all kinds
        raise UserError(
            f"--project {own.project} of {made.entity}: the workspace was not saved: {error}; `wandb login`, or look "
            "with --dry-run"
        ) from None
    print(made.url)
    return 0
