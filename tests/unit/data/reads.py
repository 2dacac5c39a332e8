"""Datasets for tests of workers, which import this module: it imports no torch, and no test."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import numpy as np


class Reads:
    """Sample i is i, i + 1, ...; reading one takes ``seconds``, and what ``at`` names goes wrong.

    sources, size: as of any dataset.  holding: keep the interpreter's lock for as long, as a page fault does.
    """

    sources = ()
    rounds = ranges = ()

    def __init__(self, size=10**6, seq_length=4, seconds=0.0, *, holding=False, fails_at=None, dies_at=None):
        self.size, self.seq_length, self.seconds, self.holding = size, seq_length, seconds, holding
        self.fails_at, self.dies_at = fails_at, dies_at

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.holding:
            ctypes.PyDLL(None).usleep(int(self.seconds * 1e6))
        elif self.seconds:
            time.sleep(self.seconds)
        if index == self.fails_at:
            raise OSError(5, "Input/output error", f"slow{index}.bin")
        if index == self.dies_at:
            os.kill(os.getpid(), 9)
        return np.arange(index, index + self.seq_length + 1, dtype=np.int64)


class WhoReads(Reads):
    """Each sample is the reader's process, whether it has torch, and whether SIGTERM and Ctrl-C are blocked."""

    def __getitem__(self, index):
        super().__getitem__(index)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return np.array([os.getpid(), "torch" in sys.modules, {2, 15} <= set(blocked)], dtype=np.int64)
