"""From samples to the microbatches of one data-parallel rank.

Source of the assignment: Megatron-LM core 0.16.1, legacy/data/data_samplers.py (MegatronPretrainingSampler).
Convention: L = seq_length; microbatch m of rank r holds the global samples
consumed + m * (micro_batch_size * dp_size) + r * micro_batch_size + [0, micro_batch_size).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch

from megatron_snip.data.indexed import IndexedDatasetError
from megatron_snip.data.sampling import Dataset
from megatron_snip.data.workers import Workers, read
from megatron_snip.errors import UserError
from megatron_snip.files.io import one_line
from megatron_snip.parallel.pipeline import Batch as Batch


class _Prefetch(threading.Thread):
    """Makes one batch in the background.  A daemon thread, so a blocked read never keeps the process alive."""

    def __init__(self, loader: Loader, consumed_samples: int) -> None:
        super().__init__(name=f"prefetch of sample {consumed_samples}", daemon=True)
        self._loader, self.consumed_samples = loader, consumed_samples
        self._result: Batch | BaseException | None = None

    def run(self) -> None:
        """Make the batch.  Errors are kept for the caller of `result`."""
        try:
            self._result = self._loader.make(self.consumed_samples)
        except BaseException as error:  # re-raised in the caller by result()
            self._result = error

    def error(self) -> BaseException | None:
        """Wait for the batch.  Returns the error raised while making it, or None."""
        self.join()
        return self._result if isinstance(self._result, BaseException) else None

    def result(self) -> Batch:
        """Wait for the batch.  Re-raises any error raised while making it."""
        self.join()
        assert self._result is not None
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class Loader:
    """Batches of a dataset for data-parallel rank ``dp_rank`` of ``dp_size``.

    global_batch_size: samples per batch, or a function of the samples consumed before the batch.

    Prefetched batches are its only state.  The cursor is ``consumed_samples``, so a run resumes exactly on any number
    of ranks.  It prefetches two batches.  The next batch must be there before the current update, so that all ranks
    learn in time if one cannot read it.  With more than two ``workers``, each prefetches one batch.  Without workers,
    threads of this process read.  Raises UserError if the first batch does not divide into microbatches.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int | Callable[[int], int],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        prefetch: bool = True,
        workers: Workers | None = None,
    ) -> None:
        self.size = global_batch_size if callable(global_batch_size) else lambda consumed_samples: global_batch_size
        together, first = micro_batch_size * dp_size, self.size(0)
        if first < 1 or together < 1 or first % together:
            raise UserError(
                f"--global-batch-size {first} is not a multiple of --micro-batch-size "
                f"{micro_batch_size} times {dp_size} data-parallel ranks; make it one"
            )
        assert 0 <= dp_rank < dp_size
        self.dataset = dataset
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self._prefetch = prefetch
        self._workers = workers
        self._ahead: dict[int, _Prefetch] = {}

    def cursor(self, consumed_samples: int, ahead: int = 1) -> int:
        """First sample of the batch that is ``ahead`` batches after the one at ``consumed_samples``."""
        for _ in range(ahead):
            consumed_samples += self.size(consumed_samples)
        return consumed_samples

    def sample_index(self, consumed_samples: int, size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Global numbers of this rank's samples in a batch, int64 [M, B]."""
        microbatch = np.arange(size // (self.micro_batch_size * self.dp_size), dtype=np.int64)[:, None]
        within = np.arange(self.micro_batch_size, dtype=np.int64)[None, :]
        return consumed_samples + (microbatch * self.dp_size + self.dp_rank) * self.micro_batch_size + within

    def batch(self, consumed_samples: int) -> Batch:
        """This rank's share of the global batch that starts at sample ``consumed_samples``.

        Starts to prefetch the next batches.  Raises UserError if the dataset ends before the batch does, and any error
        of reading a sample.
        """
        pending = self._ahead.pop(consumed_samples, None)
        batch = pending.result() if pending is not None else self.make(consumed_samples)
        depth = max(2, self._workers.count if self._workers else 0)
        following = [self.cursor(consumed_samples, ahead) for ahead in range(1, depth + 1)]
        self._ahead = {number: self._ahead[number] for number in following if number in self._ahead}
        for number in following if self._prefetch else ():
            self._read_ahead(number)
        return batch

    def _read_ahead(self, consumed_samples: int) -> None:
        if consumed_samples not in self._ahead and self.cursor(consumed_samples) <= len(self.dataset):
            self._ahead[consumed_samples] = _Prefetch(self, consumed_samples)
            self._ahead[consumed_samples].start()

    def problem(self, consumed_samples: int) -> str:
        """The problem with the files of a coming batch, or "".  Waits until the batch is read.

        `batch` later returns the batch, or raises any other error.
        """
        self._read_ahead(consumed_samples)
        pending = self._ahead.get(consumed_samples)
        error = pending.error() if pending is not None else None
        return one_line(error) if isinstance(error, (IndexedDatasetError, OSError)) else ""

    def make(self, consumed_samples: int, size: int | None = None) -> Batch:
        """Make the batch in this thread: a pure function of the dataset and the cursor.

        size: by default, that of the batch at this cursor.
        """
        size = self.size(consumed_samples) if size is None else size
        last = consumed_samples + size
        if consumed_samples < 0 or last > len(self.dataset):
            raise UserError(
                f"the batch of samples [{consumed_samples}, {last}) lies outside the dataset of "
                f"{len(self.dataset)} samples; build it with more samples"
            )
        index = self.sample_index(consumed_samples, size)
        samples = (self._workers.read if self._workers is not None else read)(self.dataset, index.ravel())
        shape = (*index.shape, samples.shape[1] - 1)
        return Batch(
            tokens=torch.from_numpy(np.ascontiguousarray(samples[:, :-1]).reshape(shape)),
            labels=torch.from_numpy(np.ascontiguousarray(samples[:, 1:]).reshape(shape)),
            sample_index=torch.from_numpy(index),
        )

    def close(self) -> None:
        """Drop prefetched batches and end the workers.  Does not wait for a read that hangs in a daemon thread."""
        if self._workers is not None:
            self._workers.close()
        pending, self._ahead = self._ahead, {}
        for thread in pending.values():
            thread.join(timeout=10.0)
