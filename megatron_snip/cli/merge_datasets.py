"""Merge indexed datasets of the same dtype into one, with the documents in the order of the inputs.

Options and order (the prefixes of a folder sorted by name) are those of Megatron-LM's tools/merge_datasets.py.  You can
also list prefixes one by one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_snip.cli.command import Parser, reported
from megatron_snip.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output, path_word


def prefixes_of(inputs: Sequence[str]) -> list[str]:
    """Prefixes, with folders replaced by the pairs in them.  Raises UserError for a folder without a pair."""
    result: list[str] = []
    for name in inputs:
        if not Path(name).is_dir():
            result.append(name)
            continue
        stems = {path.stem for path in Path(name).iterdir() if path.suffix in (".bin", ".idx")}
        found = sorted(stem for stem in stems if not stem.startswith("."))
        if not found:
            raise UserError(f"--input {name} holds no .bin/.idx pair; give another folder, or prefixes")
        result.extend(os.path.join(name, stem) for stem in found)
    return result


def merge(prefixes: Sequence[str], output_prefix: str) -> IndexedDataset:
    """Write the merged pair and open it.  Raises UserError if an input is broken or has another dtype."""
    check_output("--output-prefix", Path(f"{output_prefix}.idx"))
    with IndexedDatasetBuilder(output_prefix, IndexedDataset(prefixes[0]).dtype) as builder:
        for prefix in prefixes:
            builder.merge(prefix)
    return IndexedDataset(output_prefix)


@reported
def main(argv: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, type=path_word, help="a folder of .bin/.idx pairs, or prefixes"
    )
    parser.add_argument("--output-prefix", required=True, type=path_word, help="prefix of the merged pair")
    arguments = parser.parse_args(argv)
    merged = merge(prefixes_of(arguments.input), arguments.output_prefix)
    documents = len(merged.document_indices) - 1
    print(f"{merged.prefix}: {documents:,} documents, {merged.num_tokens:,} tokens, {merged.dtype.name}")
    return 0
