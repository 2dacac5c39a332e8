"""Machines of their own on this one: each has its processes, host name, network and /dev/shm; files are shared.

They are namespaces of the Linux kernel, joined by a switch (a bridge and a pair of interfaces each).  A machine is
a process that reads its standard input: when it ends, or whoever holds the other end does, the kernel ends all that
runs in the machine.  So nothing outlives the tests.  Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

NAMESPACES = ("--net", "--uts", "--pid", "--mount")
#: The first process of a machine; orphans are its children, and the kernel is to reap them.
_FIRST = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); sys.stdin.read()"


def missing() -> str:
    """Why there can be no machines here; empty if there can."""
    absent = [name for name in ("unshare", "nsenter", "ip", "mount", "hostname", "ps") if shutil.which(name) is None]
    if sys.platform != "linux" or absent:
        return f"needs Linux with {', '.join(absent) or 'namespaces'} (on Debian: apt install iproute2 util-linux procps hostname)"
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "ip", "link", "add", "type", "veth"], capture_output=True)
    return "" if tried.returncode == 0 else "needs network namespaces and veth, which this machine forbids or lacks"


class Machine:
    """One machine.

    hosts: the /etc/hosts that it sees.
    """

    def __init__(self, name: str, hosts: Path) -> None:
        self.name = name
        self._started: list[subprocess.Popen[bytes]] = []
        set_up = (
            f"mount --make-rprivate / && mount --bind '{hosts}' /etc/hosts && mount -t tmpfs shm /dev/shm && "
            f'hostname {name} && ip link set lo up && exec "$0" -S -c "$1"'
        )
        self._holder = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", set_up]
            + [sys.executable, _FIRST],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"\n":
            raise AssertionError(f"machine {name} did not come up: {self._holder.communicate(timeout=20)[1].decode()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(children[0])  # of its first process, as seen from here

    def command(self, *words: str, folder: Path = Path("/")) -> list[str]:
        """The command line that runs another one in this machine."""
        return ["nsenter", "--target", str(self.pid), *NAMESPACES, "--", "env", "-C", str(folder), *words]

    def run(self, *words: str, seconds: float = 20.0, env: Mapping[str, str] | None = None) -> str:
        """Run a short command to its end -> what it said.  AssertionError if it fails."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=seconds, env=env)
        assert done.returncode == 0, f"{self.name}: {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(
        self, *words: str, log: Path, env: Mapping[str, str] | None = None, folder: Path = Path("/")
    ) -> subprocess.Popen[bytes]:
        """Start a command, its output appended to a file.  It ends with the machine at the latest."""
        with log.open("ab") as file:
            started = subprocess.Popen(
                self.command(*words, folder=folder), env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self._started.append(started)
        return started

    def processes(self, word: str) -> list[str]:
        """The command lines with this word that run in the machine."""
        lines = self.run("ps", "-e", "-o", "args=").splitlines()
        return [line for line in lines if word in line and not line.startswith(("ps ", "env ", "nsenter "))]

    def end(self) -> None:
        """Every process of it is gone when this returns."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        self._holder.communicate(timeout=20)
        for started in self._started:
            started.wait(20)


class Network:
    """A switch, which is a machine too, and the machines on it: 10.77.0.1, and .2 and so on in their order."""

    def __init__(self, folder: Path, *names: str, switch: str = "head") -> None:
        self.hosts = folder / "hosts"
        self._names = (switch, *names)
        lines = [f"10.77.0.{i} {name}" for i, name in enumerate(self._names, start=1)]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        self.machines: dict[str, Machine] = {}
        self.switch = self.machines[switch] = Machine(switch, self.hosts)
        self.switch.run("ip", "link", "add", "switch", "type", "bridge")
        self.switch.run("ip", "address", "add", "10.77.0.1/24", "dev", "switch")
        self.switch.run("ip", "link", "set", "switch", "up")
        for name in names:
            self.plug_in(name)

    def plug_in(self, name: str) -> Machine:
        """Start a machine, or start it again after its end."""
        machine = self.machines[name] = Machine(name, self.hosts)
        port = self._port(name)
        ends = ["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns"]
        # not inside the switch's own /proc, where the machine's process has no number
        enter = ["nsenter", "--target", str(self.switch.pid), "--net", "--"]
        subprocess.run([*enter, *ends, str(machine.pid)], check=True, timeout=20)
        self.switch.run("ip", "link", "set", port, "master", "switch", "up")
        machine.run("ip", "address", "add", f"10.77.0.{self._names.index(name) + 1}/24", "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "up")
        return machine

    def _port(self, name: str) -> str:
        """The switch's end of the machine's cable."""
        return f"port{self._names.index(name) + 1}"

    def cut(self, name: str) -> None:
        """Pull the machine's cable out of the switch."""
        self.switch.run("ip", "link", "set", self._port(name), "down")

    def mend(self, name: str) -> None:
        """Plug it in again."""
        self.switch.run("ip", "link", "set", self._port(name), "up")

    def power_cut(self, name: str) -> None:
        """End a machine at once.  The kernel would say good-bye to its connections, so the cable goes first."""
        self.switch.run("ip", "link", "delete", self._port(name))
        self.machines[name].end()

    def end(self) -> None:
        """End all machines."""
        for machine in self.machines.values():
            machine.end()


@contextlib.contextmanager
def network(folder: Path, *names: str) -> Iterator[Network]:
    """A network of machines, gone on leaving."""
    net = Network(folder, *names)
    try:
        yield net
    finally:
        net.end()


def wait_until(condition, seconds: float, what: str) -> None:
    """Until the condition holds; AssertionError if it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(0.1)
