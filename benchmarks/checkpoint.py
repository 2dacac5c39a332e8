"""What it costs that a checkpoint proves itself, against torch's own writer and reader of the same tensors.

    python benchmarks/checkpoint.py                       # 252 MB a process
    torchrun --rdzv-backend one_node --nproc_per_node 2 benchmarks/checkpoint.py  # the same tensors in shards

Both sides take turns, and torch's writer syncs its files too.  Loads read from the system's cache.  "wait" is what
training stands still under --async-save: handing over, and the copy of the tensors, as if the update followed at once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from harness import interleaved, machine, report, save
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_snip import runtime
from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.config import CheckpointConfig
from megatron_snip.mesh import build_mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=60, help="of 1024 x 1024 float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="where to write; by default the system's folder for temporary files")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    here = runtime.start("gloo", 10.0)
    mesh = build_mesh("cpu", pp=1, dp=here.world_size, tp=1)
    name: list[str | None] = [tempfile.mkdtemp(dir=args.folder) if here.rank == 0 else None]
    dist.broadcast_object_list(name)
    folder = Path(str(name[0]))
    tensors = {
        f"model.{i}": distribute_tensor(torch.randn(1024, 1024), mesh.device_mesh["shard"], [Shard(0)])
        for i in range(args.tensors)
    }
    savers = {kind: Saver(folder / kind, CheckpointConfig(async_save=kind == "async"), mesh, "0" * 16, 0)
              for kind in ("sync", "async")}  # fmt: skip
    waits: list[float] = []

    def ours(kind: str) -> None:
        savers[kind].save(1, tensors, {"iteration": 1}, finite=True, last=False)

    def in_background() -> None:
        begin = time.perf_counter()
        ours("async")
        savers["async"].wait_copied()
        waits.append(time.perf_counter() - begin)
        savers["async"].wait()

    seconds = interleaved(
        {
            "save, torch": lambda: dcp_save(tensors, storage_writer=FileSystemWriter(folder / "plain")),
            "save": lambda: ours("sync"),
            "save in the background": in_background,
        },
        "cpu",
        args.repeats,
    )
    seconds["wait"] = sorted(waits[2:])[len(waits[2:]) // 2]
    loads = {
        "load, torch": lambda: dcp_load(tensors, storage_reader=FileSystemReader(folder / "plain")),
        "load": lambda: load_tensors(folder / "sync", 1, tensors),
    }
    seconds |= interleaved(loads, "cpu", args.repeats)
    for saver in savers.values():
        saver.close()
    if here.rank == 0:
        size = sum(path.stat().st_size for path in (folder / "sync/iter_0000001").iterdir())
        peers = {"save": "save, torch", "wait": "save", "load": "load, torch"}
        rows = [
            [case, f"{taken:.3f}", f"{size / taken / 1e9:.2f}",
             f"{taken / seconds[peers[case]]:.2f} of {peers[case]}" if case in peers else ""]
            for case, taken in seconds.items()
        ]  # fmt: skip
        about = {**machine("cpu"), "size": f"{size / 1e6:.0f} MB, {here.world_size} processes"}
        print(report("Checkpoints", ["case", "seconds", "GB/s", "ratio"], rows, about))
        save(args.json, about, seconds)
    runtime.stop()


if __name__ == "__main__":
    main()
