"""What a run on one node listens on, started as the documents say: nothing that another machine can reach."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests.dist.test_faults import FOREVER, program, rows, wait_for
from tests.test_readme import README

pytestmark = [pytest.mark.dist, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]
LISTENING = "0A"


def documented() -> list[str]:
    """torchrun's own words in the documents' commands, for two processes."""
    launches = set()
    for words in map(shlex.split, README):
        if words[0] == "torchrun":
            end = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
            launches.add(tuple("2" if word.isdecimal() else word for word in words[1:end]))
    (words,) = launches  # all pages say the same
    return [*words]


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def address(words: str) -> str:
    """`0100007F:1F90` of /proc/net/tcp as an address and a port."""
    host, port = words.split(":")
    raw = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    return f"{socket.inet_ntop(socket.AF_INET6 if len(raw) == 16 else socket.AF_INET, raw)} {int(port, 16)}"


def listening(pids: list[int]) -> list[str]:
    """Addresses that any of these processes listens on."""
    owned = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                owned.add(os.readlink(link))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        lines = Path(table).read_text().splitlines()[1:] if Path(table).exists() else []
        for words in map(str.split, lines):
            if words[3] == LISTENING and f"socket:[{words[9]}]" in owned:
                found.append(address(words[1]))
    return found


def test_a_listening_socket_is_seen():
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert f"0.0.0.0 {server.getsockname()[1]}" in listening([os.getpid()])


def test_a_run_on_one_node_listens_on_loopback_alone(tmp_path):
    run = tmp_path / "run"
    with program(run, FOREVER, documented()) as agent:
        wait_for(lambda: rows(run) or agent.poll() is not None, "an iteration")
        assert agent.poll() is None, (tmp_path / "log").read_text()
        found = listening(family(agent.pid))
    assert found, "gloo listens somewhere"
    open_to_others = [where for where in found if not where.startswith(("127.", "::1 ", "::ffff:127."))]
    assert not open_to_others, f"of {found}"
