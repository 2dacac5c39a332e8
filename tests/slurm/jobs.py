"""A small run as the examples start it under SLURM: pretrain.sbatch, a launch script, torchrun on each node."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from tests.dist.helpers.small_run import OPTIONS, PACED, ROOT, SmallRun
from tests.slurm.cluster import Cluster, Job

SBATCH, LAUNCH = ROOT / "examples/slurm/pretrain.sbatch", ROOT / "examples/llama_1b/train_llama_1b.sh"
#: Seconds before the end that SLURM signals a job; far more than these runs take to save.
LEAD = 30


@dataclass
class Run(SmallRun):
    """A run, whatever number of jobs it takes."""

    cluster: Cluster = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        programs = self.folder / "programs"
        programs.mkdir()
        # torchrun with paced.py in the program's place
        (programs / "torchrun").write_text(
            "#!/usr/bin/env bash\n"
            f'for i in "$@"; do case "$i" in */pretrain_llama.py) i={PACED} ;; esac; set -- "${{@:2}}" "$i"; done\n'
            f'exec {sys.executable} -m torch.distributed.run "$@"\n'
        )
        (programs / "torchrun").chmod(0o755)

    def submit(self, *words: str) -> Job:
        """A job of the run on two nodes: `sbatch words ...`."""
        return self.cluster.submit(
            "--nodes=2", "--gpus-per-node=1", "--time=10", f"--signal=B:USR1@{LEAD}",
            f"--output={self.folder}/job-%j.out", f"--chdir={self.folder}", *words, str(SBATCH), str(LAUNCH),
            str(self.saves), str(self.run_dir), "MOCK", "MOCK", *OPTIONS, *self.options,
            **self.variables(), SAVE_LEAD_SECONDS=str(LEAD),
            PATH=f"{self.folder}/programs:{self.cluster.env['PATH']}",
        )  # fmt: skip
