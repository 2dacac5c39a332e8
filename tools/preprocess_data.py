"""Tokenise text into indexed datasets, ``{output_prefix}_{json_key}_document.{bin,idx}``.

Inputs are JSON lines, plain or compressed (.gz, .zst), parquet, folders that Hugging Face's `save_to_disk` wrote,
folders of all these, and .txt files, a document each.  Source: Megatron-LM's tools/preprocess_data.py, whose
options, names and results are kept.  Results are written in the order of the input, so they do not depend on --workers.
Outputs get their names when all is written, so none is ever half a file.
"""

from __future__ import annotations

import argparse
import glob
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_snip.data.documents import Piece, files_of, pieces
from megatron_snip.data.indexed import IndexedDatasetBuilder, token_dtype
from megatron_snip.data.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from megatron_snip.errors import UserError
from megatron_snip.files import check_output, one_line, parse_json, path_word

PENDING_PER_WORKER = 4  # Tasks under way per worker; bounds the results that wait for their turn.


@dataclass(frozen=True)
class Job:
    """What a worker needs to know; it is sent with each piece, so it is small."""

    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Encoded:
    """The documents of one piece: for each key the ids as bytes and the documents' lengths."""

    ids: dict[str, bytes]
    lengths: dict[str, array[int]]
    input_bytes: int


@lru_cache(maxsize=1)
def _tokenizer(tokenizer_type: str, model: str | None, vocab_size: int | None) -> Tokenizer:
    return build_tokenizer(tokenizer_type, model, vocab_size)


def _encode(tokenizer: Tokenizer, job: Job, record: bytes | dict[str, Any]) -> dict[str, list[int]]:
    record = parse_json(record) if isinstance(record, bytes) else record
    if not isinstance(record, dict):
        raise UserError(f"it is a {type(record).__name__}, not an object")
    result = {}
    for key in job.keys:
        if not isinstance(text := record.get(key), str):
            kind = "no" if text is None else f"a {type(text).__name__} for the"
            raise UserError(f'it has {kind} key "{key}"' + ("" if text is None else ", not a string"))
        ids = tokenizer.encode(text)
        if ids and job.append_eod:
            ids.append(tokenizer.eod)
        result[key] = ids
    return result


def encode_piece(job: Job, piece: Piece) -> Encoded:
    """Tokenise one piece.  Raises UserError naming the file and line that is bad."""
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


@contextmanager
def encoded_pieces(job: Job, paths: Sequence[str], workers: int) -> Iterator[Iterator[Encoded]]:
    """All pieces' results in the order of the input."""
    work = partial(encode_piece, job)
    if workers == 1:
        yield map(work, pieces(paths, job.keys))
        return
    # Unlike multiprocessing.Pool, this one notices a worker that was killed.
    pool = ProcessPoolExecutor(workers)
    try:
        yield _in_order(pool, work, pieces(paths, job.keys), PENDING_PER_WORKER * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: Executor, work: Callable[[Piece], Encoded], tasks: Iterator[Piece], most: int) -> Iterator[Encoded]:
    """Results in the order of the tasks, of which at most ``most`` are under way."""
    pending: deque[Future[Encoded]] = deque()
    for task in tasks:
        pending.append(pool.submit(work, task))
        if len(pending) == most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def preprocess(job: Job, paths: Sequence[str], output_prefix: str, workers: int, log_interval: int) -> None:
    """Tokenise all inputs and write one dataset per key.  Raises UserError for bad input."""
    tokenizer = _tokenizer(job.tokenizer_type, job.tokenizer_model, job.vocab_size)
    dtype = token_dtype(tokenizer.vocab_size)
    started, documents, shown = time.perf_counter(), 0, 0
    total = sum(Path(path).stat().st_size for path in paths)
    for key in job.keys:
        check_output("--output-prefix", Path(f"{output_prefix}_{key}_document.idx"))
    with ExitStack() as stack:
        builders = {
            key: stack.enter_context(IndexedDatasetBuilder(f"{output_prefix}_{key}_document", dtype))
            for key in job.keys
        }
        bar = stack.enter_context(tqdm(total=total, unit="B", unit_scale=True, desc="tokenise"))
        for encoded in stack.enter_context(encoded_pieces(job, paths, workers)):
            for key, builder in builders.items():
                builder.add_encoded(encoded.ids[key], encoded.lengths[key])
            documents += len(encoded.lengths[job.keys[0]])
            if documents - shown >= log_interval:
                shown = documents
                rate = documents / (time.perf_counter() - started)
                bar.set_postfix_str(f"{documents:,} docs, {rate:,.0f} docs/s", refresh=False)
            bar.update(encoded.input_bytes)
        tokens = {key: builder.num_tokens for key, builder in builders.items()}
        if not any(tokens.values()):
            raise UserError(f"--input {' '.join(paths)} holds no text; nothing is written")
    seconds = time.perf_counter() - started
    for key, count in tokens.items():
        print(f"{output_prefix}_{key}_document: {documents:,} documents, {count:,} tokens, {dtype.name}")
    print(f"{seconds:.1f} s, {total / seconds / 1e6:.2f} MB/s, {documents / seconds:,.0f} docs/s")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, type=path_word, help="files or folders; * and ? are expanded"
    )
    parser.add_argument(
        "--output-prefix", required=True, type=path_word, help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys, or columns, to tokenise, a dataset each"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the EOD token")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenise")
    parser.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="kept for Megatron's scripts; it has no effect, as the input is always cut into pieces",
    )
    parser.add_argument("--tokenizer-type", required=True, help=", ".join(TOKENIZER_TYPES))
    parser.add_argument("--tokenizer-model", default=None, help="the tokenizer's file or folder")
    parser.add_argument("--vocab-size", type=int, default=None, help="for NullTokenizer")
    parser.add_argument("--log-interval", type=int, default=1000, help="documents between two rates shown")
    arguments = parser.parse_args(argv)
    for name in ("workers", "partitions", "log_interval"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; give 1 or more")
    return arguments


def _expand(inputs: Sequence[str]) -> list[str]:
    result: list[str] = []
    for name in inputs:
        found = [name] if Path(name).exists() else sorted(glob.glob(name))
        if not found:
            raise UserError(f"--input {name} does not exist")
        result += [path for one in found for path in files_of(one)]
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns the exit status."""
    arguments = parse_arguments(argv)
    try:
        job = Job(
            tokenizer_type=arguments.tokenizer_type,
            tokenizer_model=arguments.tokenizer_model,
            vocab_size=arguments.vocab_size,
            keys=tuple(dict.fromkeys(arguments.json_keys)),
            append_eod=arguments.append_eod,
        )
        paths = _expand(arguments.input)
        preprocess(job, paths, arguments.output_prefix, arguments.workers, arguments.log_interval)
    except BrokenProcessPool:
        print("preprocess_data: a worker was killed (out of memory?); use fewer --workers", file=sys.stderr)
        return 1
    except (UserError, OSError) as error:
        print(f"preprocess_data: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
