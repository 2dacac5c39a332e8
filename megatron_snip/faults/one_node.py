"""`torchrun --rdzv-backend one_node`: a run on one node whose agent opens no port.

torchrun's own rendezvous, including --standalone, serve a store on every interface, and c10d's agent unpickles its
content: anyone who can reach the port controls the run.  A single agent does not need to share its store.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

NAME = "one_node"  # also the name of the entry point in pyproject.toml
_LOOPBACK = "127.0.0.1"


class OneNode(RendezvousHandler):
    """The rendezvous of a single agent, in its own memory."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        if parameters.max_nodes != 1:
            raise ValueError(f"--nnodes is {parameters.max_nodes}, but --rdzv-backend {NAME} needs 1; leave it out")
        self._run_id, self._closed = parameters.run_id, False

    def get_backend(self) -> str:
        """torchrun's name for this backend."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """This agent alone, with a free port for programs that ask for one."""
        with socket.create_server((_LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    @property
    def use_agent_store(self) -> bool:
        """False: ranks cannot see the agent's memory."""
        return False

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._closed

    def set_closed(self) -> None:
        """Mark the run as over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Always 0: no other node can join."""
        return 0

    def get_run_id(self) -> str:
        """The value of --rdzv-id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to close."""
        return True


def rendezvous() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point for torchrun."""
    return OneNode
