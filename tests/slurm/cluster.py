"""A SLURM of four nodes, each a machine of its own (tests/dist/helpers/machines.py), its controller on the switch.

Everything it writes lies in one folder.  There is no authentication: nobody outside these machines reaches them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.dist.helpers import machines
from tests.dist.helpers.machines import Network, wait_until

NODES = ("node1", "node2", "node3", "node4")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun", "sinfo")
#: A machine that gives no answer for so long is down; a job waits so long before it starts again.
DOWN_SECONDS, REQUEUE_SECONDS = 6, 5
#: SLURM looks at time limits this often, and signals whoever will need it before the next look.
SWEEP_SECONDS = 30
CONF = """
ClusterName=test
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire={requeue}
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
KillWait=12
CompleteWait=0
SlurmdTimeout={down}
ReturnToService=2
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=node[1-4] CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=60
"""


def missing() -> str:
    """Why there can be no SLURM here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"needs SLURM, {', '.join(absent)} not found (on Debian: apt install slurmctld slurmd slurm-client)"
    return machines.missing()


class Cluster:
    """The running SLURM.  Its commands run on the switch, where the controller is."""

    def __init__(self, folder: Path, net: Network) -> None:
        self.folder, self.net = folder, net
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        self._configure("")
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")  # none is there, but jobs ask
        unwanted = re.compile("GPUS_PER_NODE|NUM_NODES|NODE_RANK|MASTER_|SLURM_|SBATCH_|RANK|WORLD_SIZE|SAVE_")
        self.env = {k: v for k, v in os.environ.items() if not unwanted.match(k)}
        self.env |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        net.switch.start("slurmctld", "-D", log=folder / "slurmctld.out", env=self.env)
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def _configure(self, more: str) -> None:
        text = CONF.format(folder=self.folder, requeue=REQUEUE_SECONDS, down=DOWN_SECONDS, more=more)
        (self.folder / "slurm.conf").write_text(text)

    def reconfigure(self, more: str) -> None:
        """Another line in slurm.conf, for all daemons."""
        self._configure(more)
        self.run("scontrol", "reconfigure")

    def start_node(self, name: str) -> None:
        """Start a node's daemon; its machine runs."""
        self.net.machines[name].start("slurmd", "-D", log=self.folder / f"slurmd-{name}.out", env=self.env)

    def power_cut(self, name: str) -> None:
        """All of a node is gone at once."""
        self.net.power_cut(name)

    def power_on(self, name: str) -> None:
        """The node is there again, with none of its processes."""
        self.net.plug_in(name)
        self.start_node(name)

    def wait_for_nodes(self) -> None:
        """Until all nodes wait for work."""
        wait_until(lambda: self.node_states() == ["idle"] * len(NODES), 60, "a cluster of idle nodes")

    def node_states(self) -> list[str]:
        """What SLURM thinks of its nodes."""
        try:
            return self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t").split()
        except AssertionError:  # the controller is not up yet
            return []

    def run(self, *words: str, **more: str) -> str:
        """Run one of SLURM's commands."""
        return self.net.switch.run(*words, env={**self.env, **more})

    def processes(self, word: str) -> list[str]:
        """Command lines with this word, on all nodes."""
        return [line for node in NODES for line in self.net.machines[node].processes(word)]

    def submit(self, *words: str, **more: str) -> Job:
        """`sbatch words`, with more variables in its environment."""
        return Job(self, self.run("sbatch", "--parsable", *words, **more).strip())


@dataclass(frozen=True)
class Job:
    """A job of the cluster; for an array's task the number is ARRAY_TASK."""

    cluster: Cluster
    number: str

    def show(self) -> dict[str, str]:
        """What SLURM says of it."""
        words = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        return self.show()["JobState"]

    def wait_for(self, *states: str, seconds: float = 240.0) -> str:
        """Until it is in one of these states -> which."""
        wait_until(lambda: self.state in states, seconds, f"{' or '.join(states)} of job {self.number}")
        return self.state


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster, gone on leaving."""
    with machines.network(folder, *NODES) as net:
        yield Cluster(folder, net)
