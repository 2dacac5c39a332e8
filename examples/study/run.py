"""Runs one setting of the study, or goes on with it:

    python -m examples.study.run examples/study/settings/NAME.toml [--output DIR] [--phases middle,late]

DIR/NAME then holds checkpoints and one JSON file for each piece of work; what is there is not made again, so that
a kill loses one piece.  ``tabulate.py`` makes tables of DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path

import torch

from examples.study.pieces import Worker, write_json
from examples.study.setting import Setting, read_setting
from examples.study.study import Study
from megatron_snip.errors import UserError
from megatron_snip.files.io import one_line

#: In the order in which they tell most: a checkpoint's measurements and plans at the setting's first target, steps with
#: these plans ("further-"), plans at the other targets ("targets-").
PHASES = (
    "middle", "further-middle", "late", "early", "targets-middle", "targets-late", "targets-early", "further-late",
    "further-early",
)  # fmt: skip


def run_phase(study: Study, phase: str, seeds: int, targets: int) -> None:
    """Everything of a phase that is not there yet, with the first ``seeds`` and ``targets`` of the setting's.

    A setting without the phase's checkpoint has nothing to do.
    """
    setting, worker = study.setting, study.worker
    kind, _, checkpoint = phase.rpartition("-")
    if checkpoint not in setting.checkpoints:
        return
    study.train_to(checkpoint)
    worker.work(study.measurements(checkpoint))
    worker.work([study.plans_piece(checkpoint)])
    if kind == "further":
        worker.work(study.further(checkpoint, seeds) if setting.further_steps else [])
    else:
        worker.work(
            study.evaluations(checkpoint, setting.targets[1:targets] if kind == "targets" else setting.targets[:1])
        )


def about(setting: Setting) -> dict[str, object]:
    """What the figures were made with."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.processor())  # fmt: skip
    return {
        "setting": vars(setting), "torch": torch.__version__, "python": platform.python_version(), "cpu": model,
        "cores": os.cpu_count(), "threads": torch.get_num_threads(), "commit": commit,
    }  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Run; returns how many pieces were made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder of all settings")
    parser.add_argument("--phases", default=",".join(PHASES), help=f"some of {','.join(PHASES)}")
    parser.add_argument("--seeds", type=int, default=100, help="of further training, at most this many")
    parser.add_argument("--targets", type=int, default=100, help="at most this many")
    args = parser.parse_args(words)
    if unknown := set(args.phases.split(",")) - set(PHASES):
        parser.error(f"unknown phases {sorted(unknown)}; known: {', '.join(PHASES)}")
    torch.set_num_threads(1)  # the same bits on every machine of one kind, and no threads that wait for each other
    try:
        setting = read_setting(args.setting)
    except UserError as error:
        parser.error(one_line(error))
    folder = args.output / args.setting.stem
    worker = Worker(args.setting.stem, folder / "log.txt")
    study = Study(setting, folder, worker)
    write_json(folder / "about.json", json.loads(json.dumps(about(setting))))
    for phase in args.phases.split(","):
        worker.say(f"phase {phase}")
        run_phase(study, phase, args.seeds, args.targets)
    study.close()
    worker.say(f"{worker.made} pieces made")
    return worker.made


if __name__ == "__main__":
    main()
