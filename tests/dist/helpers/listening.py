"""What processes listen on, by /proc."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

LISTENING = "0A"


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
