"""Train a sentencepiece BPE tokenizer with byte fallback on text, with Llama-2's settings.

Source of the settings: Llama 2's tokenizer.model (identity normalisation, digits split, whitespace kept, ids
0 <unk>, 1 <s>, 2 </s>, then 256 bytes).  Equal input and options give an equal model.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_snip.cli.command import Parser, reported
from megatron_snip.data.documents import input_files, pieces, texts_of
from megatron_snip.errors import UserError
from megatron_snip.files.io import atomic_output, check_output, path_word

LONGEST_LINE = 1 << 14  # Bytes.  sentencepiece ignores longer lines, so we cut them.


def texts(paths: Sequence[str], key: str) -> Iterator[str]:
    """The text under ``key`` in each document.  Raises UserError with the file and line if there is none."""
    for where, record in (record for piece in pieces(paths, [key]) for record in piece.records([key])):
        try:
            yield texts_of(record, [key], "--json-key")[key]
        except ValueError as error:  # bad JSON and bad UTF-8 are ValueErrors too
            raise UserError(f"{where()} is unusable: {error}") from error


def training_lines(paths: Sequence[str], key: str, max_bytes: int) -> Iterator[str]:
    """Lines for the trainer, about ``max_bytes`` in total at most."""
    taken = 0
    for text in texts(paths, key):
        for line in text.split("\n"):
            for start in range(0, len(line), LONGEST_LINE // 4):
                piece = line[start : start + LONGEST_LINE // 4].replace("\0", "")
                if piece:
                    taken += len(piece.encode("utf-8", errors="ignore"))
                    yield piece
        if taken >= max_bytes:
            return


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, type=path_word, help="files or folders, as of preprocess_data.py"
    )
    parser.add_argument("--json-key", default="text", help="key of the text (default: text)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of pieces (default: 4096)")
    parser.add_argument("--output-prefix", required=True, type=path_word, help="writes PREFIX.model")
    parser.add_argument("--max-bytes", type=int, default=200_000_000, help="most text to use, from the start")
    return parser.parse_args(argv)


def train(arguments: argparse.Namespace) -> None:
    """Train and write the model.  Raises UserError if the input cannot be read or is too small."""
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError("training a tokenizer needs sentencepiece: pip install sentencepiece") from error
    check_output("--output-prefix", Path(f"{arguments.output_prefix}.model"))
    # Read first, because sentencepiece hides errors in our iterator.
    lines = list(training_lines(input_files(arguments.input), arguments.json_key, arguments.max_bytes))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=arguments.vocab_size,
            model_type="bpe",
            byte_fallback=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            character_coverage=0.99995,
            max_sentence_length=LONGEST_LINE,
            shuffle_input_sentence=False,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(f"sentencepiece: {str(error).strip().splitlines()[-1]} (--vocab-size, --input)") from error
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    with atomic_output(f"{arguments.output_prefix}.model") as path:
        path.write_bytes(model.getvalue())
    print(f"{arguments.output_prefix}.model: {len(processor):,} pieces")


@reported
def main(argv: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    train(parse_arguments(argv))
    return 0
