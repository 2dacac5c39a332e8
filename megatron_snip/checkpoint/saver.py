"""Saving checkpoints, in the foreground or background, atomically, and only by the run that holds the folder's lock.

All ranks write under a temporary name.  Rank 0 then writes the manifest, renames the folder and updates the tracker, so
a kill at any moment keeps the previous checkpoint.  A failed save does not end the run: the next save tries again, and
only several consecutive failures end the run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron_snip.checkpoint.lock import FolderLock, LockLost
from megatron_snip.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    STATE,
    TRACKER,
    VERSION,
    Damaged,
    Manifest,
    SavedTensor,
    check_whole,
    folder_of,
    iteration_of,
    iterations,
)  # fmt: skip
from megatron_snip.checkpoint.storage import CheckedWriter
from megatron_snip.config import CheckpointConfig
from megatron_snip.errors import UserError
from megatron_snip.files.io import MOST_BYTES
from megatron_snip.files.json import write_atomic
from megatron_snip.mesh import Mesh

LOGGER = logging.getLogger("megatron_snip")
#: errno of a full disk or quota.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Consecutive failed saves that end the run.
MOST_FAILED = 3


class Saver:
    """Writes a run's checkpoints to a folder.  Every rank has one and makes the same calls.

    start: the iteration that the run continues from; newer checkpoints in the folder are renamed.
    """

    def __init__(self, save: Path, config: CheckpointConfig, mesh: Mesh, run_id: str, start: int) -> None:
        self.save_dir, self.config, self.mesh, self.run_id = save, config, mesh, run_id
        self.failed = 0  # consecutive failures
        self._newest = start  # the iteration to continue from; later ones are left from before a rewind
        self.count, self.waited = 0, 0.0  # saves, and seconds that training waited for them
        self._size: int | None = None  # bytes of the last checkpoint
        self._temporary: Path | None = None  # temporary folder of the last save
        self._running: AsyncSaveResponse | None = None
        self._stager: DefaultStager | None = None
        self._group = mesh.new_cpu_group() if config.async_save else None
        self._lock: FolderLock | None = None
        if mesh.rank == 0:
            self._lock = FolderLock(save, run_id)
            self._clean_up(start)

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        finite: bool,
        last: bool,
        planner: SavePlanner | None = None,
    ) -> None:
        """Write a checkpoint with rank 0's state.  With --async-save, call `wait_copied` before the tensors change.

        finite: whether the iteration's loss and gradient were finite.  If any of loss, gradient, weights and moments is
        not, the checkpoint is kept, but the tracker does not change.  last: wait, because no later save will follow.
        planner: the source of values other than the tensors.
        Raises UserError if the save fails and is the last, or after ``MOST_FAILED`` consecutive failures.
        """
        self.wait()
        begin, text = time.perf_counter(), json.dumps({"version": VERSION, **state})
        aside = self.save_dir / f"{folder_of(self.save_dir, iteration).name}.writing-{self.run_id}"
        self._temporary = aside
        if self.mesh.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)

        def publish(written: Mapping[str, SavedTensor], not_finite: Sequence[str]) -> None:
            reasons = [*([] if finite else ["loss or gradient"]), *_few(not_finite)]
            self._publish(aside, iteration, text, written, reasons, begin)

        self._make_room()
        for again in (False, True):
            try:
                self._write(dict(tensors), CheckedWriter(aside, publish), planner, wait=last)
                break
            except CheckpointException as error:  # a BaseException, the same on every rank
                if again or not self._was_full(error):
                    self._failed(error, iteration, last)
                    break
        self.count, self.waited = self.count + 1, self.waited + time.perf_counter() - begin

    def wait_copied(self) -> None:
        """Wait until a background save has copied the tensors."""
        if self._running is not None and not self._running.staging_completion.done():
            begin = time.perf_counter()
            self._running.staging_completion.result()
            self.waited += time.perf_counter() - begin

    def wait(self) -> None:
        """Wait for a background save.  Errors as in `save`."""
        begin = time.perf_counter()
        try:
            self._finish()
        except CheckpointException as error:
            self._was_full(error)
            self._failed(error, None, False)
        self.waited += time.perf_counter() - begin

    def close(self) -> None:
        """Wait for a background save, even if it fails, and release the folder."""
        try:
            self.wait()
        except (Exception, CheckpointException) as error:  # another error, already reported, ends the run
            LOGGER.warning(f"the last background save failed: {error}")
        if self._stager is not None:
            self._stager.close()
        if self._lock is not None:
            self._lock.release()
        if self.count > 1:  # a single save logs its own time
            LOGGER.info(f"training waited {self.waited:.2f} s in total for {self.count} checkpoint saves")

    def _write(
        self, tensors: dict[str, Tensor], writer: CheckedWriter, planner: SavePlanner | None, *, wait: bool
    ) -> None:
        """Write, or start a background write and wait for it if asked.  Raises CheckpointException if it fails."""
        if self.config.async_save:
            self._running = self._start(tensors, writer)
            if wait:
                self._finish()
        else:
            dcp_save(tensors, storage_writer=writer, planner=planner)
            self.failed = 0

    def _finish(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.upload_completion.result()
            self.failed = 0

    def _start(self, tensors: dict[str, Any], writer: CheckedWriter) -> AsyncSaveResponse:
        """Copy the tensors in one thread, into memory that is reused, and write the copies in another."""
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if on_gpu:
            torch.cuda.synchronize()  # the stager copies on its own stream, which does not wait for the update
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(on_gpu, False, True, on_gpu))
            # torch 2.11 closes this after each copy, and the next copy would fail
            self._stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
        running = async_save(tensors, storage_writer=writer, async_stager=self._stager, process_group=self._group)
        assert isinstance(running, AsyncSaveResponse), "the stager copies in a thread"
        return running

    def _failed(self, error: CheckpointException, iteration: int | None, last: bool) -> None:
        """Warn and count.  Ends the run after too many failures, if the lock is lost, and for bugs of ours."""
        failures = sorted(error.failures.items())
        rank, (first, _) = failures[0]
        if lost := next((e for _, (e, _) in failures if isinstance(e, LockLost)), None):
            raise UserError(str(lost)) from error
        if not all(isinstance(e, (OSError, RuntimeError)) for _, (e, _) in failures):
            raise error
        self._drop_temporary()
        self.failed += 1
        what = "the background save" if iteration is None else f"the save of iteration {iteration}"
        text = f"{what} to {self.save_dir} failed on rank {rank} ({' '.join(str(first).split())[:300]})"
        again = f"continue with --load {self.save_dir}" if iterations(self.save_dir) else "start again"
        way_out = f"free space or give another --save, and {again}"
        if last:
            raise UserError(f"{text}, and it was the run's last; {way_out}") from error
        if self.failed >= MOST_FAILED:
            raise UserError(f"{text}, {self.failed} in a row; {way_out}") from error
        LOGGER.warning(f"{text}; training continues, and the next save tries again")

    def _publish(
        self,
        aside: Path,
        iteration: int,
        text: str,
        tensors: Mapping[str, SavedTensor],
        not_finite: Sequence[str],
        begin: float,
    ) -> None:
        """On rank 0, after all ranks have written: write state and manifest, rename the folder, update the tracker."""
        assert self._lock is not None
        self._lock.check()
        _write_readable(aside / STATE, text)
        small = {METADATA: (aside / METADATA).read_bytes(), STATE: text.encode()}
        manifest = Manifest(
            iteration=iteration,
            run_id=self.run_id,
            layout={name: getattr(self.mesh, name).size for name in ("tp", "pp", "dp")},
            small={name: (len(content), zlib.crc32(content)) for name, content in small.items()},
            tensors=dict(tensors),
            not_finite=tuple(not_finite),
        )
        _write_readable(aside / MANIFEST, manifest.to_text())
        _sync(aside)
        final = folder_of(self.save_dir, iteration)
        old = final.with_name(f"{final.name}.writing-old-{self.run_id}")
        if final.exists():  # the run rewound past it
            os.rename(final, old)
        os.rename(aside, final)
        _sync(self.save_dir)
        self._size = manifest.size
        shares = sorted(manifest.sizes().values())
        LOGGER.info(
            f"saved iteration {iteration} to {self.save_dir}: {manifest.size / 1e6:.1f} MB in "
            f"{time.perf_counter() - begin:.2f} s, {len(shares)} files of up to {shares[-1] / 1e6:.1f} MB"
        )
        if manifest.not_finite:
            LOGGER.warning(
                f"no run will continue from iteration {iteration} ({', '.join(manifest.not_finite)} not finite): "
                f"{TRACKER} is unchanged"
            )
        else:
            write_atomic(self.save_dir / TRACKER, f"{iteration}\n")
            self._newest = iteration
            self._prune()
        shutil.rmtree(old, ignore_errors=True)

    def _drop_temporary(self) -> None:
        """Remove the output of a failed save, which would keep a full disk full."""
        if self._temporary is not None and self._lock is not None and self._lock.held():
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _was_full(self, error: CheckpointException) -> bool:
        """Whether a save failed on a full disk under --keep-last.  If so, makes room for a retry."""
        found = [e for e, _ in error.failures.values()]
        if self.config.keep_last is None or not any(isinstance(e, OSError) and e.errno in _FULL for e in found):
            return False
        self._drop_temporary()
        self._make_room(sys.maxsize)  # free space does not reflect a quota
        return True

    def _make_room(self, need: int | None = None) -> None:
        """Under --keep-last, delete old checkpoints until a save fits, but keep one complete checkpoint.

        need: bytes that must be free; by default the size of the last checkpoint, which the next one should have too.
        """
        if self.config.keep_last is None or self._lock is None or not self._lock.held():
            return
        if need is None:
            if self._size is None:
                self._size = next((manifest.size for _, manifest in self._whole()), 0)
            need = self._size
        if self._has_free(need):
            return
        for folder in self._surplus(1, later=True):
            shutil.rmtree(folder, ignore_errors=True)
            LOGGER.warning(f"deleted iteration {iteration_of(folder)} of {self.save_dir} to make room for a save")
            if self._has_free(need):
                return

    def _has_free(self, need: int) -> bool:
        """Whether that many bytes are free.  True if the system does not say."""
        try:
            return shutil.disk_usage(self.save_dir).free >= need
        except OSError:
            return True

    def _prune(self) -> None:
        """Delete checkpoints up to the newest that neither --keep-last nor --keep-every keeps."""
        if self.config.keep_last is not None:
            for folder in self._surplus(self.config.keep_last, later=False):
                with contextlib.suppress(OSError):
                    shutil.rmtree(folder)

    def _surplus(self, keep: int, *, later: bool) -> list[Path]:
        """This run's checkpoints except the ``keep`` newest complete ones and those of --keep-every, oldest first.

        later: whether with those that are later than the newest, which no run continues from.
        """
        out, good, every = [], 0, self.config.keep_every
        for iteration, manifest in self._whole():
            if manifest.run_id != self.run_id or (iteration > self._newest and not later):
                continue
            counts = iteration <= self._newest and not manifest.not_finite
            good += counts
            if not (counts and good <= keep) and not (every and iteration % every == 0):
                out.append(folder_of(self.save_dir, iteration))
        return out[::-1]

    def _whole(self) -> Iterator[tuple[int, Manifest]]:
        """Complete checkpoints of the folder, from any run, newest first."""
        for iteration in iterations(self.save_dir):
            with contextlib.suppress(Damaged, OSError):
                yield iteration, check_whole(self.save_dir, iteration)

    def _clean_up(self, start: int) -> None:
        """Remove the output of killed saves, and rename checkpoints later than the one that the run continues from."""
        for path in self.save_dir.glob("iter_*.writing-*"):
            shutil.rmtree(path, ignore_errors=True)
        for iteration in iterations(self.save_dir):
            if iteration > start:
                folder = folder_of(self.save_dir, iteration)
                aside = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
                os.rename(folder, aside)
                LOGGER.warning(
                    f"{folder} is later than iteration {start}, from which this run continues; it is now {aside.name}"
                )


def _write_readable(path: Path, text: str) -> None:
    """Write a file that the reader accepts.  Raises OSError if it is larger than the reader's limit."""
    if len(text) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"{len(text)} bytes, but at most {MOST_BYTES} can be read", str(path))
    write_atomic(path, text)


def _few(names: Sequence[str]) -> list[str]:
    """Names, shortened to fit a line."""
    return [*names] if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more tensors"]


def _sync(folder: Path) -> None:
    """Sync a folder, so that its file names survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
