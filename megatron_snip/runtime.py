"""The process: device, backend, seeds, and logging on one rank.  Only this module reads environment variables.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; a single process needs none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import logging
import os
import platform
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

import megatron_snip
from megatron_snip.errors import UserError
from megatron_snip.faults.ending import Ending
from megatron_snip.faults.heartbeat import Folder, Watch
from megatron_snip.faults.rendezvous import agree_on_start
from megatron_snip.files.io import one_line

#: Keeps the current folder out of the import path of new Python processes.
_SAFE_PATH = "PYTHONSAFEPATH"
LOGGER = logging.getLogger("megatron_snip")
#: Values that users may set under --deterministic-mode; NCCL's are those that Megatron accepts.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),
}


@dataclass(frozen=True)
class Runtime:
    """This process's rank, world size and device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def environment_rank() -> int:
    """This process's rank according to torchrun, before anything has started; 0 for a single process."""
    return int(os.environ.get("RANK", "0"))


def environment_local_rank() -> int:
    """This process's rank on its node according to torchrun, before anything has started; 0 for a single process."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def environment_local_world_size() -> int:
    """Number of ranks on this node according to torchrun; without torchrun, this one and those before it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", environment_local_rank() + 1))


def environment_world_size() -> int:
    """Number of ranks according to torchrun; 1 for a single process."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def made_with() -> dict[str, str | int]:
    """What results may depend on besides options: package versions, device, number of ranks; when and how it began."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else f"CPU ({platform.machine()})"
    return {
        "megatron_snip": megatron_snip.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **({"cuda": str(torch.version.cuda)} if torch.cuda.is_initialized() else {}),
        "highspy": version("highspy"),
        "device": gpu,
        "processes": environment_world_size(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
    }


def environment_restarts() -> int:
    """How often torchrun may restart a node's processes after a failure; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def environment_requeues() -> int:
    """How often SLURM has requeued this job; 0 outside SLURM."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def end_with_agent() -> None:
    """On Linux, let the kernel kill this process when torchrun's agent, its parent, dies.

    Otherwise a killed torchrun leaves its processes training.  A process started by a shell or srun has no agent.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != megatron_snip.PARENT:  # it died before the call
        os._exit(1)


def resolve_backend(backend: str, device: str = "auto") -> tuple[str, str]:
    """Resolve auto in --distributed-backend and --device."""
    if device == "auto":
        device = "cuda" if backend == "nccl" or (backend == "auto" and torch.cuda.is_available()) else "cpu"
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    return backend, device


def device_of(backend: str, device: str) -> torch.device:
    """The device type for --distributed-backend and --device.  Raises UserError for a GPU on a machine without one."""
    kind = resolve_backend(backend, device)[1]
    if kind == "cuda" and not torch.cuda.is_available():
        option = "--device cuda" if device == "cuda" else f"--distributed-backend {backend}"
        raise UserError(f"{option} needs a GPU, and there is none; use {'cpu' if device == 'cuda' else 'gloo'}")
    return torch.device(kind)


def prepare_environment(device: str, *, deterministic: bool, stacks: Path) -> None:
    """Set environment variables that torch's allocator, cuBLAS and NCCL read at startup, unless the user has set them.

    Call it before CUDA starts.  stacks: folder for NCCL's flight recorder when a collective times out.
    Raises UserError if the run is to be deterministic and the user's own settings are not.
    """
    if deterministic != torch.are_deterministic_algorithms_enabled():  # setting it loads a compiler
        torch.use_deterministic_algorithms(deterministic)
    if device != "cuda":
        return
    wanted = {
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(stacks.absolute() / "nccl_rank_"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    if deterministic:
        wanted |= {("CUBLAS_WORKSPACE_CONFIG",): ":4096:8", ("NCCL_ALGO",): "Ring"}
    for names, value in wanted.items():
        if not any(name in os.environ for name in names):  # the second is the old name
            os.environ[names[0]] = value
    for name, good in DETERMINISTIC.items() if deterministic else ():
        if os.environ[name] not in good:
            raise UserError(
                f"{name}={os.environ[name]} may change bits from run to run under --deterministic-mode; "
                f"unset it, or set one of {', '.join(good)}"
            )


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of activation size for reuse.

    By default it returns them to the system, and every new tensor of a few MB pays for page faults again.
    """
    largest, of_top = 1 << 30, (1 << 31) - 1
    with contextlib.suppress(OSError, AttributeError):  # other libcs have other ways
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, largest)  # M_MMAP_THRESHOLD
        mallopt(-1, of_top)  # M_TRIM_THRESHOLD


def start(backend: str, timeout_minutes: float, ending: Ending | None = None, device: str = "auto") -> Runtime:
    """Join the process group and choose a device.  Every rank must call it once; `stop` undoes it.

    ending: receives a watch over the other ranks.
    """
    rank, world_size = environment_rank(), environment_world_size()
    local_rank = environment_local_rank()
    backend, kind = resolve_backend(backend, device)
    if kind == "cuda":
        place = torch.device("cuda", _gpu_of(local_rank, backend, device))
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
        keep_freed_memory()
    if not dist.is_initialized():
        _check_launch()
        # NCCL then creates its communicators here and splits the mesh's from them, not at first use in mid-step
        _join(backend, rank, world_size, timeout_minutes, ending, place if backend == "nccl" else None)
    return Runtime(rank, world_size, local_rank, place)


def _gpu_of(local_rank: int, backend: str, device: str) -> int:
    """The GPU of a rank on this node; over gloo, several ranks may share one.

    A process restricted to one GPU (srun's --gpus-per-task=1) sees only that one, whatever its local rank.
    """
    device_of(backend, device)
    gpus = torch.cuda.device_count()
    given_one = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ  # if another process has it too, NCCL reports that
    if local_rank >= gpus and backend == "nccl" and not given_one:
        raise UserError(
            f"local rank {local_rank} has no GPU: this machine has {gpus}; start one process per GPU "
            "(torchrun --nproc_per_node), or let them share one with --device cuda --distributed-backend gloo"
        )
    return local_rank % gpus


def _check_launch() -> None:
    """Raise UserError if a launcher started several processes without giving each a rank in one run."""
    wanted, start = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "start one torchrun per node"
    if "RANK" not in os.environ:
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):  # srun's, mpirun's, torchrun's
            if os.environ.get(name, "1") != "1":
                raise UserError(
                    f"{name} is {os.environ[name]}, and RANK is not set: each process would train a run of its own; "
                    f"{start}, as examples/slurm/pretrain.sbatch does, or set {', '.join(wanted)}, LOCAL_RANK"
                )
        return
    if missing := [name for name in wanted if not os.environ.get(name)]:
        raise UserError(f"RANK is set without {', '.join(missing)}; {start}, or set all of {', '.join(wanted)}")
    rank, world_size = environment_rank(), environment_world_size()
    if not 0 <= rank < world_size or not os.environ["MASTER_PORT"].isdigit():
        found = ", ".join(f"{name} is {os.environ[name]}" for name in wanted)
        raise UserError(f"{found}; {start}, or give ranks from 0 to WORLD_SIZE - 1 and a port's number")
    if "LOCAL_RANK" not in os.environ and os.environ.get("SLURM_LOCALID", "0") != "0":
        raise UserError("RANK is set without LOCAL_RANK; set that to SLURM_LOCALID in each task of srun")


def _join(
    backend: str,
    rank: int,
    world_size: int,
    timeout_minutes: float,
    ending: Ending | None,
    bound: torch.device | None,
) -> None:
    """Create the process group, under keys that no earlier start has used, and start to watch the other ranks."""
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" not in os.environ:  # a single process needs no address
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout, device_id=bound)
        return
    private, key = private_folder(), "start"
    own: Store
    if private is not None:
        stay_on_this_host()
        own = FileStore(str(private / "store"), world_size)
    else:
        own = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):  # this store outlives the ranks
            key = agree_on_start(own, rank, world_size, timeout.total_seconds())
    store = PrefixStore(key, own)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)
    if ending is not None and world_size > 1:
        connect = partial(_connect, f"{key}/watch") if private is None else partial(Folder, private / "watch")
        ending.watch = Watch(connect, rank, world_size, timeout.total_seconds(), ending.from_watch)


def private_folder() -> Path | None:
    """torchrun's folder of this start, if all ranks are on this node and only its user can open it.

    It holds the rendezvous in files; anyone who can reach a store's port could change that.
    """
    report = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # FOLDER/attempt_0/RANK/error.json
    if environment_local_world_size() != environment_world_size() or len(report.parents) < 4:
        return None
    with contextlib.suppress(OSError):
        around = report.parents[2].stat()
        if around.st_uid == os.geteuid() and not around.st_mode & 0o077 and report.parents[1].is_dir():
            return report.parents[1]
    return None


def stay_on_this_host() -> None:
    """Let gloo and NCCL listen only on the loopback interface, unless the user has named another."""
    with contextlib.suppress(OSError):
        for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _connect(key: str) -> PrefixStore:
    """A separate connection to the run's store.  Raises OSError if nobody listens; torch would also print that."""
    address, seconds = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5.0
    socket.create_connection(address, seconds).close()
    client = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return PrefixStore(key, client)


def stop() -> None:
    """Leave the process group, all ranks together.  gloo aborts ranks whose peers leave during communication."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def set_up_logging(rank: int) -> None:
    """Log to stderr: rank 0 everything, other ranks only errors, since their messages would be the same."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    LOGGER.propagate = False
    if isinstance(sys.stdout, io.TextIOWrapper):  # under LC_ALL=C an unencodable line would end the run
        with contextlib.suppress(OSError):  # a pipe opened for append has no position
            sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print to stdout.  If that is a file on a full disk, the run continues without the line."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that depends only on its parts, and is the same in every process."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_iteration(seed: int, iteration: int) -> None:
    """Seed torch's generators from (seed, iteration), so that a resume has no state to restore."""
    torch.manual_seed(seed_of(seed, "iteration", iteration))


class SuspectDevice(RuntimeError):
    """A faulty device: one iteration gave two different bad results.  Raised on every rank."""

    status = 17  # Megatron's exit status for failed validation of results, so that schedulers recognise it


class StopSignal:
    """Remembers SIGTERM and Ctrl-C, so that the loop can save and exit at the end of an iteration.

    A second Ctrl-C ends the process at once, unless it comes within a second: a terminal sends the first to all
    processes, and a launcher may forward it.
    """

    def __init__(self, listen: bool) -> None:
        self.received = False
        self._interrupted: float | None = None
        if listen:
            signal.signal(signal.SIGTERM, self._receive)
            signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, _: object) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is not None and now - self._interrupted > 1.0:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            if self._interrupted is None:
                self._interrupted = now
                LOGGER.warning("Ctrl-C: the run saves and ends after this iteration; press it again to end at once")
        self.received = True


@contextlib.contextmanager
def report_errors() -> Iterator[Ending]:
    """Turn every error into one line, and set up logging.  The run fills in the `Ending` to make that line more
    precise.

    UserErrors, and OSErrors that name a path, exit with status 2.  SuspectDevice has its own status.  Such errors occur
    on every rank, and rank 0 reports them: torchrun ends all ranks as soon as one fails, so the others wait before they
    report.  The first rank to meet any other error reports it, and writes the traceback to the run folder.
    Python processes that libraries start in the block, such as multiprocessing's, import nothing from the current
    folder, which may be untrusted.
    """
    rank, before = environment_rank(), os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    set_up_logging(rank)
    end_with_agent()
    ending = Ending(rank, os.environ.get("TORCHELASTIC_ERROR_FILE"))
    try:
        yield ending
    except SystemExit:
        raise
    except BaseException as error:
        users = isinstance(error, UserError) or (isinstance(error, OSError) and error.filename is not None)
        if users or isinstance(error, SuspectDevice):
            if rank > 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the loop's handler would survive it
                time.sleep(3.0)
            line = one_line(error) if isinstance(error, (UserError, OSError)) else str(error)
            ending.tell_user(line, error.status if isinstance(error, SuspectDevice) else 2)
        elif ending.folder is None and not isinstance(error, KeyboardInterrupt):
            raise  # nothing has started, so the traceback is all there is
        else:
            ending.after(error)
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
