"""Tokenise text into indexed datasets, ``{output_prefix}_{json_key}_document.{bin,idx}``.

Inputs are JSON lines (plain, .gz or .zst), parquet, datasets that Hugging Face's `save_to_disk` wrote, .txt files
with one document each, and folders of these.  Options, names and results are those of Megatron-LM's
tools/preprocess_data.py.  The output keeps the order of the input, whatever --workers is.  Output files appear only
when they are complete.  Work in progress is in ``{output_prefix}.partial/``: if you kill the command and repeat it, it
continues from there and writes the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_snip.cli.command import Parser, reported
from megatron_snip.data.documents import PIECE_BYTES, Piece, input_files, pieces, texts_of
from megatron_snip.data.indexed import token_dtype
from megatron_snip.data.resumable import ResumableBuilders
from megatron_snip.data.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from megatron_snip.data.workers import check_workers, end_with_parent
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output, one_line, path_word
from megatron_snip.megatron_options import instead_of

PENDING_PER_WORKER = 4  # Tasks per worker in progress; limits the results that wait for their turn.
MARK_SECONDS = 30.0  # Most work that a kill can lose.
#: Options of Megatron-LM's script that do not apply here, and what to do instead.
REFUSED = {
    "--split-sentences": "documents stay whole here, as for GPT and Llama; leave it out",
    "--keep-newlines": "documents keep their newlines; leave it out",
    "--find-optimal-num-workers": "set --workers to the number of cores",
    "--vocab-file": instead_of("vocab-file"),
    "--merge-file": instead_of("merge-file"),
}


@dataclass(frozen=True)
class Job:
    """Settings for a worker; small, because every piece carries them."""

    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    keys: tuple[str, ...]
    append_eod: bool
    sample_fraction: float = 1.0
    sample_seed: int = 0


@dataclass(frozen=True)
class Encoded:
    """The documents of one piece: per key, the ids as bytes and the lengths of the documents."""

    ids: dict[str, bytes]
    lengths: dict[str, array[int]]
    input_bytes: int


@lru_cache(maxsize=1)
def _tokenizer(tokenizer_type: str, model: str | None, vocab_size: int | None) -> Tokenizer:
    return build_tokenizer(tokenizer_type, model, vocab_size)


def _is_chosen(job: Job, text: str) -> bool:
    """Whether a document belongs to the sample, by a hash of its text."""
    seed = job.sample_seed.to_bytes(8, "little")
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=seed).digest()
    return int.from_bytes(digest, "little") < job.sample_fraction * 2**64


def _encode(tokenizer: Tokenizer, job: Job, record: bytes | dict[str, Any]) -> dict[str, list[int]]:
    """The ids of a document by key; empty if it does not belong to the sample."""
    result = {}
    for key, text in texts_of(record, job.keys, "--json-keys").items():
        if key == job.keys[0] and job.sample_fraction < 1 and not _is_chosen(job, text):
            return {}
        ids = tokenizer.encode(text)
        if ids and job.append_eod:
            ids.append(tokenizer.eod)
        result[key] = ids
    return result


def encode_piece(job: Job, piece: Piece) -> Encoded:
    """Tokenise one piece.  Raises UserError with the file and line of a bad record."""
    tokenizer = _tokenizer(job.tokenizer_type, job.tokenizer_model, job.vocab_size)
    dtype = token_dtype(tokenizer.vocab_size)
    ids: dict[str, list[bytes]] = {key: [] for key in job.keys}
    lengths = {key: array("q") for key in job.keys}
    for where, record in piece.records(job.keys):
        try:
            document = _encode(tokenizer, job, record)
        except ValueError as error:  # bad JSON and bad UTF-8 are ValueErrors too
            raise UserError(f"{where()} is unusable: {error}") from error
        for key, tokens in document.items():
            ids[key].append(np.array(tokens, dtype=dtype).tobytes())
            lengths[key].append(len(tokens))
    return Encoded({key: b"".join(parts) for key, parts in ids.items()}, lengths, piece.size)


def _start_worker() -> None:
    """Ignore Ctrl-C, which the main process handles, and end when the main process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


@contextmanager
def encoded_pieces(job: Job, tasks: Iterator[Piece], workers: int) -> Iterator[Iterator[Encoded]]:
    """The results of all pieces, in the order of the input."""
    work = partial(encode_piece, job)
    if workers == 1:
        yield map(work, tasks)
        return
    # Unlike multiprocessing.Pool, this notices a killed worker.
    pool = ProcessPoolExecutor(workers, initializer=_start_worker)
    try:
        yield _in_order(pool, work, tasks, PENDING_PER_WORKER * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: Executor, work: Callable[[Piece], Encoded], tasks: Iterator[Piece], most: int) -> Iterator[Encoded]:
    """Results in the order of the tasks, with at most ``most`` tasks in progress."""
    pending: deque[Future[Encoded]] = deque()
    for task in tasks:
        pending.append(pool.submit(work, task))
        if len(pending) == most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _stamp(path: str | Path) -> list[Any]:
    """Path, size and time, to recognise a changed file."""
    state = Path(path).stat()
    return [os.path.abspath(path), state.st_size, state.st_mtime_ns]


def _identity(job: Job, paths: Sequence[str]) -> dict[str, Any]:
    """Everything that the result depends on, so that a repeated command continues only the same work."""
    model = Path(job.tokenizer_model) if job.tokenizer_model else None
    files = sorted(path for path in (model.iterdir() if model.is_dir() else [model]) if path.is_file()) if model else []
    return {
        "input": [_stamp(path) for path in paths],
        "tokenizer": [_stamp(path) for path in files],
        "set of options": {**asdict(job), "piece_bytes": PIECE_BYTES},
    }


class _Progress:
    """Counts pieces, bytes and documents that are done, shows a bar, and marks the progress every half minute."""

    def __init__(self, builders: ResumableBuilders, total: int, log_interval: int) -> None:
        self._builders, self._log_interval, self._started = builders, log_interval, time.perf_counter()
        self.at: dict[str, int] = {"pieces": 0, "bytes": 0, "documents": 0} | (builders.found or {})
        self._found, self._marked = dict(self.at), self._started
        self._shown = self.at["documents"]
        self.bar = tqdm(total=total, initial=self.at["bytes"], unit="B", unit_scale=True, desc="tokenise")

    def advance(self, input_bytes: int, documents: int) -> None:
        """Count a piece that was added to the builders."""
        self.at = {
            "pieces": self.at["pieces"] + 1,
            "bytes": self.at["bytes"] + input_bytes,
            "documents": self.at["documents"] + documents,
        }
        if self.at["documents"] - self._shown >= self._log_interval:
            self._shown = self.at["documents"]
            self.bar.set_postfix_str(
                f"{self._shown:,} docs, {self._per_second('documents'):,.0f} docs/s", refresh=False
            )
        self.bar.update(input_bytes)
        if time.perf_counter() - self._marked >= MARK_SECONDS:
            self.mark()

    def mark(self) -> None:
        """Save the progress so far."""
        self._builders.mark(self.at)
        self._marked = time.perf_counter()

    def _per_second(self, what: str) -> float:
        return (self.at[what] - self._found[what]) / (time.perf_counter() - self._started)

    def summary(self) -> str:
        """Time and speed since the command started."""
        seconds = time.perf_counter() - self._started
        bytes_, documents = self._per_second("bytes"), self._per_second("documents")
        return f"{seconds:.1f} s, {bytes_ / 1e6:.2f} MB/s, {documents:,.0f} docs/s"


def preprocess(job: Job, paths: Sequence[str], output_prefix: str, workers: int, log_interval: int) -> None:
    """Tokenise all inputs and write one dataset per key.  Raises UserError for bad input."""
    tokenizer = _tokenizer(job.tokenizer_type, job.tokenizer_model, job.vocab_size)
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = [f"{output_prefix}_{key}_document" for key in job.keys]
    for prefix in prefixes:
        check_output("--output-prefix", Path(f"{prefix}.idx"))
    with ExitStack() as stack:
        all_builders = ResumableBuilders(Path(f"{output_prefix}.partial"), prefixes, dtype, _identity(job, paths))
        stack.enter_context(all_builders)
        builders = dict(zip(job.keys, all_builders.builders))
        progress = _Progress(all_builders, sum(Path(path).stat().st_size for path in paths), log_interval)
        stack.enter_context(progress.bar)
        if progress.at["pieces"]:
            print(f"continuing from {all_builders.folder}: {progress.at['documents']:,} documents are done", flush=True)
        tasks = islice(pieces(paths, job.keys), progress.at["pieces"], None)
        for encoded in stack.enter_context(encoded_pieces(job, tasks, workers)):
            for key, builder in builders.items():
                builder.add_encoded(encoded.ids[key], encoded.lengths[key])
            progress.advance(encoded.input_bytes, len(encoded.lengths[job.keys[0]]))
        tokens = {key: builder.num_tokens for key, builder in builders.items()}
        if not any(tokens.values()):
            sample = "" if job.sample_fraction == 1 else f" in its sample of {job.sample_fraction:g}"
            raise UserError(f"--input {' '.join(paths)} holds no text{sample}; wrote nothing")
        all_builders.finalize(progress.at)
    for prefix, count in zip(prefixes, tokens.values()):
        print(f"{prefix}: {progress.at['documents']:,} documents, {count:,} tokens, {dtype.name}")
    print(progress.summary())


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, type=path_word, help="files or folders; * and ? are expanded"
    )
    parser.add_argument(
        "--output-prefix", required=True, type=path_word, help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys or columns to tokenise, one dataset each (default: text)"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the EOD token")
    parser.add_argument("--workers", type=int, default=1, help="number of worker processes (default: 1)")
    parser.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="accepted for Megatron's scripts, without effect: the input is always cut into pieces",
    )
    parser.add_argument(
        "--keep-sequential-samples", action="store_true", help="accepted for Megatron's scripts; order is always kept"
    )
    parser.add_argument(
        "--sample-fraction",
        type=float,
        default=1.0,
        help="share of the documents to take, chosen by a hash (default: 1)",
    )
    parser.add_argument("--sample-seed", type=int, default=0, help="seed of that choice (default: 0)")
    parser.add_argument("--tokenizer-type", required=True, help=", ".join(TOKENIZER_TYPES))
    parser.add_argument("--tokenizer-model", default=None, help="the tokenizer's file or folder")
    parser.add_argument("--vocab-size", type=int, default=None, help="for NullTokenizer")
    parser.add_argument(
        "--log-interval", type=int, default=1000, help="documents between two updates of the progress (default: 1000)"
    )
    for name in REFUSED:
        parser.add_argument(name, nargs="?", const="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for name, instead in REFUSED.items():
        if getattr(arguments, name[2:].replace("-", "_")) is not None:
            parser.error(f"{name}: {instead}")
    if not 0 < arguments.sample_fraction <= 1:
        parser.error(f"--sample-fraction is {arguments.sample_fraction:g}; give a share above 0, up to 1")
    if not 0 <= arguments.sample_seed < 1 << 63:
        parser.error(f"--sample-seed is {arguments.sample_seed}; give 0 or more, below 2^63")
    for name in ("workers", "partitions", "log_interval"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; give 1 or more")
    return arguments


@reported
def main(argv: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    arguments = parse_arguments(argv)
    job = Job(
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_model=arguments.tokenizer_model,
        vocab_size=arguments.vocab_size,
        keys=tuple(dict.fromkeys(arguments.json_keys)),
        append_eod=arguments.append_eod,
        sample_fraction=arguments.sample_fraction,
        sample_seed=arguments.sample_seed,
    )
    kept = f"{arguments.output_prefix}.partial"
    try:
        check_workers("--workers", arguments.workers)
        paths = input_files(arguments.input)
        preprocess(job, paths, arguments.output_prefix, arguments.workers, arguments.log_interval)
    except BrokenProcessPool:
        raise UserError(_failed(kept, "a worker was killed (out of memory?); use fewer --workers")) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_failed(kept, "interrupted")) from None
    except (UserError, OSError) as error:
        raise UserError(_failed(kept, one_line(error))) from error
    return 0


def _failed(kept: str, message: str) -> str:
    done = os.path.exists(f"{kept}/progress.json") and kept not in message
    return f"{message}; {kept} keeps what is done, and the same command continues it" if done else message
