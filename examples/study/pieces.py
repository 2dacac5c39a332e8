"""Pieces of work, each with a file of its own: made once, and again only if the file is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Piece:
    """``make`` writes ``path`` whole or not at all; ``kind`` tells which pieces take equally long."""

    kind: str
    path: Path
    make: Callable[[Path], None]


class Worker:
    """Makes pieces that are not there yet and tells how far it is."""

    def __init__(self, label: str, log: Path) -> None:
        self.label, self.log, self.made = label, log, 0
        self.seconds: dict[str, list[float]] = {}  # by kind

    def say(self, text: str) -> None:
        """One line to the terminal and to the log."""
        line = f"{time.strftime('%H:%M:%S')} {self.label}: {text}"
        print(line, flush=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file:
            file.write(line + "\n")

    def work(self, pieces: Sequence[Piece]) -> None:
        """Make what is missing, in order."""
        missing = [piece for piece in pieces if not piece.path.is_file()]
        for index, piece in enumerate(missing):
            start = time.perf_counter()
            piece.path.parent.mkdir(parents=True, exist_ok=True)
            piece.make(piece.path)
            taken, self.made = time.perf_counter() - start, self.made + 1
            self.seconds.setdefault(piece.kind, []).append(taken)
            rest = sum(self._expected(later.kind) for later in missing[index + 1 :])
            place = "/".join(piece.path.parts[-2:])
            self.say(f"{piece.kind} {index + 1} of {len(missing)} ({place}), {taken:.1f} s, about {rest:.0f} s left")

    def _expected(self, kind: str) -> float:
        """Mean seconds of a kind's pieces so far; 0 where none was made."""
        past = self.seconds.get(kind, [])
        return sum(past) / len(past) if past else 0.0
