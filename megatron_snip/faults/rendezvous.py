"""A key that all processes of one start share and no other start has.

torchrun restarts a failed run beside the same store, where the last start's keys still stand, and no number that it
gives is new on every node: TORCHELASTIC_RESTART_COUNT counts one node's own failures.  So every process draws a
name for itself, rank 0 lists all names, and the list holds once each process has found its own name in it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time

from torch._C._distributed_c10d import Store

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks


def agree_on_start(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """The key of this start; every process calls it, at a time of its own.

    store: one that all processes see, whatever earlier starts left in it.
    Raises TimeoutError, naming those who are missing, if not all have come within ``seconds``.
    """
    mine, names = secrets.token_hex(8), [f"start/{r}" for r in range(world_size)]
    store.set(names[rank], mine)
    deadline, pause, said = time.monotonic() + seconds, _FIRST_PAUSE, ""
    while time.monotonic() < deadline:
        if rank == 0 and store.check(names):
            # a name may still be that of an earlier start, so the list is made anew until everyone agrees
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
    who = f"rank {', '.join(missing[:8])} did not come" if missing else "not all were started anew"
    raise TimeoutError(f"the processes did not meet within {seconds:.0f} s: {who}")
