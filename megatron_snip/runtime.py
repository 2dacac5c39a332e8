"""The process: device, backend, seeds, logging on one rank.  The only reader of environment variables.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; a lone process needs none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

LOGGER = logging.getLogger("megatron_snip")


@dataclass(frozen=True)
class Runtime:
    """Where this process runs: its rank, the world's size and its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


def environment_rank() -> int:
    """This process's rank as torchrun tells it, before anything is started; 0 for a lone process."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """Processes of the run as torchrun tells it; 1 for a lone process."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def resolve_backend(backend: str) -> tuple[str, str]:
    """--distributed-backend with auto resolved, and the type of device that goes with it."""
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    return backend, "cuda" if backend == "nccl" else "cpu"


def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks of activation size for the next one.

    By default each goes back to the system, and every new tensor of some MB costs its pages anew.
    """
    largest, of_top = 1 << 30, (1 << 31) - 1
    with contextlib.suppress(OSError, AttributeError):  # another libc has other ways
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, largest)  # M_MMAP_THRESHOLD
        mallopt(-1, of_top)  # M_TRIM_THRESHOLD


def start(backend: str, timeout_minutes: float) -> Runtime:
    """Join the process group and take a device.  Every process calls it once; `stop` undoes it."""
    rank, world_size = environment_rank(), environment_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    backend, _ = resolve_backend(backend)
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise ValueError("--distributed-backend nccl needs a GPU and none is here; use gloo")
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are here; "
                "start one process a GPU (torchrun --nproc_per_node)"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:  # a lone process needs no address
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return Runtime(rank, world_size, local_rank, device, backend)


def stop() -> None:
    """Leave the process group, all processes together: gloo aborts one that leaves others in mid-talk."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def set_up_logging(rank: int) -> None:
    """Log to stderr: rank 0 tells everything, the others errors only, since what they would say is the same."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    LOGGER.propagate = False


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that is a function of its parts alone, the same in every process."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_iteration(seed: int, iteration: int) -> None:
    """Make torch's generators a function of (seed, iteration), so that a resume has no state to restore."""
    torch.manual_seed(seed_of(seed, "iteration", iteration))


class SuspectDevice(RuntimeError):
    """A device computes wrongly: the same iteration gave two results, both bad.  Every process raises it alike."""

    status = 17  # the exit status of Megatron's failed validation of results, so that a scheduler can tell


class StopSignal:
    """Remembers SIGTERM, so that the loop can save and leave at the end of an iteration."""

    def __init__(self, listen: bool) -> None:
        self.received = False
        if listen:
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.received = True


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turn a ValueError, which is the user's, into one line and exit status 2; set up logging.

    SuspectDevice is one line too, and has an exit status of its own.

    An error that every process finds is told by rank 0 alone: the others wait a moment before they tell it,
    because torchrun ends all of them as soon as one has failed.
    """
    rank = environment_rank()
    set_up_logging(rank)
    try:
        yield
    except (ValueError, SuspectDevice) as error:
        if rank > 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the loop's handler would live through it
            time.sleep(3.0)
        where = f" [rank {rank}]" if rank > 0 else ""
        print(f"error{where}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # other processes may be inside a collective: no leave-taking
        os._exit(error.status if isinstance(error, SuspectDevice) else 2)
