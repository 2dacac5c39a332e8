"""From samples to the microbatches of one data-parallel rank.

Source of the assignment: Megatron-LM core 0.16.1, legacy/data/data_samplers.py (MegatronPretrainingSampler).
Convention: L = seq_length; microbatch m of rank r holds the global samples
consumed + m * (micro_batch_size * dp_size) + r * micro_batch_size + [0, micro_batch_size).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import numpy as np
import torch

from megatron_snip.data.indexed import IndexedDatasetError
from megatron_snip.data.sampling import Dataset
from megatron_snip.data.workers import Workers, read
from megatron_snip.files.io import one_line
from megatron_snip.parallel.pipeline import Batch as Batch


class Loader:
    """Batches of a dataset for data-parallel rank ``dp_rank`` of ``dp_size``.

    global_batch_size: samples per batch, or a function of the samples consumed before the batch.

    Prefetched batches are its only state.  The cursor is ``consumed_samples``, so a run resumes exactly on any number
    of ranks.  It prefetches two batches.  The next batch must be there before the current update, so that all ranks
    learn in time if one cannot read it.  With more than two ``workers``, each prefetches one batch.  Without workers,
    threads of this process read.
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
        self.dataset = dataset
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self._prefetch = prefetch
        self._workers = workers
        self._ahead: dict[int, Future[Batch]] = {}

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

        Starts to prefetch the next batches.  Raises any error of reading a sample.
        """
        pending = self._ahead.pop(consumed_samples, None)
        batch = pending.result() if pending is not None else self.make(consumed_samples)
        depth = max(2, self._workers.count if self._workers else 0)
        following = [self.cursor(consumed_samples, ahead) for ahead in range(1, depth + 1)]
        self._ahead = {number: self._ahead[number] for number in following if number in self._ahead}
        for number in following if self._prefetch else ():
            self._read_ahead(number)
        return batch

    def _read_ahead(self, consumed_samples: int) -> Future[Batch]:
        """The batch at a cursor, made in the background."""
        if consumed_samples in self._ahead:
            return self._ahead[consumed_samples]
        made = self._ahead[consumed_samples] = Future()

        def run() -> None:
            try:
                made.set_result(self.make(consumed_samples))
            except BaseException as error:
                made.set_exception(error)

        # a daemon, so a blocked read never keeps the process alive
        threading.Thread(target=run, name=f"prefetch of sample {consumed_samples}", daemon=True).start()
        return made

    def problem(self, consumed_samples: int) -> str:
        """The problem with the files of a coming batch, or "".  Waits until the batch is read.

        `batch` later returns the batch, or raises any other error.
        """
        error = self._read_ahead(consumed_samples).exception()
        return one_line(error) if isinstance(error, (IndexedDatasetError, OSError)) else ""

    def make(self, consumed_samples: int, size: int | None = None) -> Batch:
        """Make the batch in this thread: a pure function of the dataset and the cursor.

        size: by default, that of the batch at this cursor.
        """
        size = self.size(consumed_samples) if size is None else size
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
        wait(self._ahead.values(), timeout=10.0)
        self._ahead = {}
