"""All processes of a start find one key, whatever earlier starts left in the store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from megatron_snip.faults.rendezvous import agree_on_start


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))


def start(server: TCPStore, world: int, delays: dict[int, float] | None = None) -> list[str]:
    """The key that each rank finds; a rank may come later than the others."""
    keys = [""] * world

    def rank(r: int) -> None:
        keys[r] = agree_on_start(client(server), r, world, 20.0)

    threads = [threading.Timer((delays or {}).get(r, 0.0), rank, (r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return keys


@pytest.mark.parametrize("late", [0, 1, 2])
def test_each_start_has_a_key_of_its_own_whoever_comes_last(server, late):
    """At the second start the names of the first stand in the store, and rank 0's list of them."""
    first = start(server, 3)
    second = start(server, 3, {late: 0.3})
    assert len(set(first)) == len(set(second)) == 1 and "" not in first + second
    assert first[0] != second[0]


def test_a_start_that_was_cut_short_is_no_start(server):
    """Ranks 1 and 2 came and were killed before rank 0 did; their names are not those of the next start."""
    for rank in (1, 2):
        with pytest.raises(TimeoutError):
            agree_on_start(client(server), rank, 3, 0.1)
    assert len(set(start(server, 3, {1: 0.3, 2: 0.4}))) == 1


def test_who_does_not_come_is_named(server):
    with pytest.raises(TimeoutError, match=r"did not meet within 0 s: rank 1, 2 did not come$"):
        agree_on_start(client(server), 0, 3, 0.2)
