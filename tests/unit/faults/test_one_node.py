"""torchrun's rendezvous for one node: found by its name, and it opens no port."""

from __future__ import annotations

import os
import sys

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry, rendezvous_handler_registry

from megatron_snip.faults.one_node import NAME, OneNode
from tests.dist.test_listening import listening


def parameters(nodes: int = 1) -> RendezvousParameters:
    return RendezvousParameters(NAME, "", "run", nodes, nodes)


def test_torchrun_knows_it_by_its_name():
    if NAME not in rendezvous_handler_registry._registry:  # as torchrun does, once a process
        registry._register_out_of_tree_handlers()
    assert isinstance(rendezvous_handler_registry.create_handler(parameters()), OneNode)


def test_the_agent_is_alone_and_each_start_is_new():
    handler = OneNode(parameters())
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    first.store.set("key", "of the first start")
    assert not second.store.check(["key"])
    assert (first.rank, first.world_size, handler.num_nodes_waiting(), handler.get_run_id()) == (0, 1, 0, "run")
    assert first.bootstrap_store_info.master_addr == "127.0.0.1" and not handler.use_agent_store
    assert not handler.is_closed()
    handler.set_closed()
    assert handler.is_closed() and handler.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_it_opens_no_port():
    before = listening([os.getpid()])
    handler = OneNode(parameters())
    assert handler.next_rendezvous() and listening([os.getpid()]) == before


def test_several_nodes_are_refused():
    with pytest.raises(ValueError, match="--nnodes is 2, but --rdzv-backend one_node needs 1; leave it out"):
        OneNode(parameters(2))
