"""A key that all ranks of one start share, and no other start has.

torchrun restarts a failed run on the same store, which still has the last start's keys.  torchrun gives no number that
is new on all nodes: TORCHELASTIC_RESTART_COUNT counts the failures of one node only.  Every rank therefore draws a
random name, and rank 0 publishes the list of names.  The list is valid once each rank has found its own name in it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time

from torch._C._distributed_c10d import Store

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between polls


def agree_on_start(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """The key of this start.  Every rank must call it, but not at the same time.

    store: shared by all ranks; it may still have keys of earlier starts.
    Raises TimeoutError with the missing ranks if they have not all called within ``seconds``.
    """
    mine, names = secrets.token_hex(8), [f"start/{r}" for r in range(world_size)]
    store.set(names[rank], mine)
    deadline, pause, said = time.monotonic() + seconds, _FIRST_PAUSE, ""
    while time.monotonic() < deadline:
        if rank == 0 and store.check(names):
            # a name may be left from an earlier start, so publish a new list until all ranks agree
            listed = json.dumps([name.decode() for name in store.multi_get(names)])
            if listed != said:
                store.set("start/list", listed)
        elif rank > 0 and store.check(["start/list"]):
            listed = store.get("start/list").decode()
        else:
            listed = said
        found = json.loads(listed) if listed else []
        if len(found) == world_size and found[rank] == mine:
            key = hashlib.blake2b(listed.encode(), digest_size=8).hexdigest()
            if listed != said and store.add(f"start/{key}/agreed", 1) == world_size:
                store.set(f"start/{key}/go", "")
            if store.check([f"start/{key}/go"]):
                return key
        said = listed
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    missing = [str(r) for r, name in enumerate(names) if not store.check([name])]
    who = f"rank {', '.join(missing[:8])} did not come" if missing else "some ranks belong to an earlier start"
    raise TimeoutError(f"the ranks did not meet within {seconds:.0f} s: {who}")
