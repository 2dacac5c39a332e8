"""Train a sentencepiece BPE tokenizer with byte fallback on JSON lines, with Llama-2's settings.

Source of the settings: Llama 2's tokenizer.model (identity normalisation, digits split, whitespace kept, ids
0 <unk>, 1 <s>, 2 </s>, then 256 bytes).  Equal input and options give an equal model.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_snip.cli.command import Parser, reported
from megatron_snip.errors import UserError
from megatron_snip.files.io import atomic_output, check_output, parse_json, path_word

LONGEST_LINE = 1 << 14  # Bytes.  sentencepiece ignores longer lines, so we cut them.


def texts(paths: Sequence[str], key: str) -> Iterator[str]:
    """The text under ``key`` in each line.  Raises UserError with the file and line if there is none."""
    for name in paths:
        with open(name, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    text = parse_json(line)[key]
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f'{name}:{number} is not a JSON object with the key "{key}"') from error
                if not isinstance(text, str):
                    raise UserError(f'{name}:{number} has "{key}" of type {type(text).__name__}, not a string')
                yield text


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
    parser.add_argument("--input", nargs="+", required=True, type=path_word, help="JSON lines files")
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
    lines = list(training_lines(arguments.input, arguments.json_key, arguments.max_bytes))
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
    arguments = parse_arguments(argv)
    missing = [name for name in arguments.input if not Path(name).is_file()]
    if missing:
        raise UserError(f"--input {missing[0]} does not exist; check the path")
    train(arguments)
    return 0
