"""Tokenizers behind one small interface.

Source: Megatron-LM core 0.16.1, megatron/core/tokenizers: sentencepiece and Hugging Face tokenizers encode text without
BOS or EOS, and the end of a document (EOD) is the model's EOS.  One difference: NullTokenizer's EOD is the last of its
``vocab_size`` ids, so that --vocab-size stays the model's; Megatron adds one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron_snip.errors import UserError
from megatron_snip.files.io import open_file, parse_json, read_file, shown

MOST_BYTES = 1 << 28  # of a tokenizer's file; the largest have 40 MB
#: Unused ids that a vocabulary may have beyond its number of tokens.
_MOST_FREE = 1 << 16
# Possible names of EOS in a tokenizer.json without a config.
KNOWN_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<EOD>")


class Tokenizer(Protocol):
    """Text to ids and back.  ``eod`` is the id after each document; all ids are below ``vocab_size``.

    ``bos`` is the id that the tokenizer puts before a text when special tokens are on, or None.
    """

    vocab_size: int
    eod: int
    bos: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""


def _existing(tokenizer_type: str, model: str | None) -> Path:
    if not model:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model; give its file or folder")
    path = Path(model)
    if not path.exists():
        raise UserError(f"--tokenizer-model {model} does not exist; give a local file or folder")
    return path


class SentencePieceTokenizer:
    """A sentencepiece .model file, such as Llama-2's or an output of `megatron-snip tokenizer`."""

    def __init__(self, model: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise UserError("this tokenizer needs sentencepiece: pip install sentencepiece") from error
        if not model.is_file():
            raise UserError(f"--tokenizer-model {model} is not a file; give the sentencepiece .model file")
        self.processor = sentencepiece.SentencePieceProcessor()
        data = read_file(model, "sentencepiece model", "give another --tokenizer-model", most=MOST_BYTES)
        with _one_line_errors(f"--tokenizer-model {model} is not a sentencepiece model", "give another"):
            self.processor.LoadFromSerializedProto(data)
        self.vocab_size: int = self.processor.vocab_size()
        self.eod: int = self.processor.eos_id()
        if self.eod < 0:
            raise UserError(f"--tokenizer-model {model} has no EOS piece to end documents; train it with one")
        bos: int = self.processor.bos_id()
        self.bos = bos if bos >= 0 else None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS and EOS."""
        ids: list[int] = self.processor.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without control pieces."""
        text: str = self.processor.decode([int(token) for token in ids])
        return text


class HuggingFaceTokenizer:
    """Text to ids and back, and BOS, for both libraries that read Hugging Face's tokenizers.

    ids: text, whether to add special tokens -> ids.
    """

    def __init__(
        self, tokenizer: Any, path: Path, vocab_size: int, eod: int, ids: Callable[[str, bool], list[int]]
    ) -> None:
        self._tokenizer, self._path, self._ids = tokenizer, path, ids
        self.vocab_size, self.eod = vocab_size, eod
        plain, special = self.encode("a"), self._encode("a", special=True)
        begins = len(special) > len(plain) and special[1 : 1 + len(plain)] == plain
        self.bos: int | None = special[0] if begins else None

    def _encode(self, text: str, *, special: bool) -> list[int]:
        with _one_line_errors(f"--tokenizer-model {self._path} cannot encode {text[:40]!r}", "give another"):
            return self._ids(text, special)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens.  Raises UserError if the tokenizer's own rules fail."""
        return self._encode(text, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)
        return text


def _from_json(path: Path) -> HuggingFaceTokenizer:
    """A Hugging Face tokenizer.json, through the light `tokenizers` library.

    EOS comes from the tokenizer_config.json or special_tokens_map.json in the same folder, else from its usual names.
    Raises UserError if there is none.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("this tokenizer needs tokenizers: pip install tokenizers") from error
    data = read_file(path, "tokenizer", "give another --tokenizer-model", most=MOST_BYTES)
    with _one_line_errors(f"--tokenizer-model {path} is not a tokenizer.json", "give another"):
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    tokenizer.no_truncation()  # the file may enable both, which would cut or pad documents
    tokenizer.no_padding()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    size, named = _size_of(vocabulary, path), _configured_eos(path.parent)
    candidates = [eos for eos in ((named,) if named else KNOWN_EOS) if eos in vocabulary]
    if not candidates:
        raise UserError(
            f"--tokenizer-model {path} has no end-of-text token ({named or ', '.join(KNOWN_EOS)}); "
            'name it as "eos_token" in a tokenizer_config.json beside it'
        )

    def ids(text: str, special: bool) -> list[int]:
        # same ids as encode(), without the offsets, which take a fifth of the time
        found: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return found

    return HuggingFaceTokenizer(tokenizer, path, size, vocabulary[candidates[0]], ids)


@contextmanager
def _one_line_errors(what: str, way_out: str) -> Iterator[None]:
    """Turn any error of a tokenizer library into a one-line UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Rust panics are not Exceptions
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"{what} ({first[:300]}); {way_out}") from error


def _size_of(vocabulary: Mapping[str, int], path: Path) -> int:
    """One more than the largest id.  Raises UserError if most ids below it would not exist."""
    token, largest = max(vocabulary.items(), key=lambda each: each[1], default=("", -1))
    if largest >= 2 * len(vocabulary) + _MOST_FREE:
        raise UserError(
            f"--tokenizer-model {path} gives {token[:40]!r} the id {largest}, but has {len(vocabulary)} tokens; "
            "give another"
        )
    return largest + 1


def _configured_eos(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            settings = parse_json(read_file(path, "tokenizer's settings", "give another --tokenizer-model"))
        except ValueError as error:
            raise UserError(f"{path} is not JSON: {error}; give another --tokenizer-model") from error
        eos = settings.get("eos_token") if isinstance(settings, dict) else None
        if isinstance(eos, dict):
            eos = eos.get("content")
        if not isinstance(eos, str | None):
            raise UserError(f"{path}: eos_token is {shown(eos)}, not a token; correct the file")
        if eos:
            return eos
    return None


def _from_transformers(path: Path) -> HuggingFaceTokenizer:
    """Any other tokenizer in a local folder, through transformers (optional).

    It downloads nothing, runs no code of the folder, and never prompts.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"--tokenizer-model {path} has no tokenizer.json, so it needs transformers: pip install transformers"
        ) from error
    if path.is_dir() and not any([*path.glob("*token*"), *path.glob("vocab.*")]):
        raise UserError(
            f"--tokenizer-model {path} holds no tokenizer (tokenizer.json or tokenizer.model); give one that does"
        )
    for file in path.iterdir() if path.is_dir() else [path]:
        _check_file(file)
    way_out = "give a tokenizer.json, or a folder whose tokenizer needs no code of its own"
    with _one_line_errors(f"--tokenizer-model {path}: transformers cannot read it", way_out):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"--tokenizer-model {path} has no EOS token to end documents with; add one to it")
    size = max(len(tokenizer), _size_of(tokenizer.get_vocab(), path))

    def ids(text: str, special: bool) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=special)
        return found

    return HuggingFaceTokenizer(tokenizer, path, size, int(tokenizer.eos_token_id), ids)


def _check_file(path: Path) -> None:
    """Raise UserError for files that would block transformers or take too long to read."""
    if path.is_dir() or path.suffix not in (".json", ".model", ".txt", ".jinja"):
        return
    with open_file(path, "tokenizer", "give another --tokenizer-model") as file:
        if file.seek(0, 2) > MOST_BYTES:
            raise UserError(f"{path} has more than {MOST_BYTES >> 20} MiB; give another --tokenizer-model")


class NullTokenizer:
    """Text that consists of ids, such as "3 14 15".  The last id of the vocabulary is EOD."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise UserError(f"--vocab-size is {vocab_size}; NullTokenizer needs 2 or more, the last one being EOD")
        self.vocab_size, self.eod = vocab_size, vocab_size - 1
        self.bos: int | None = None

    def encode(self, text: str) -> list[int]:
        """The ids that the text spells out.  Raises UserError for anything that is not an id of the vocabulary."""
        words = text.split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise UserError(f"NullTokenizer reads ids below {self.vocab_size}, not {word[:40]!r}")
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids as text."""
        return " ".join(str(int(token)) for token in ids)


#: Values of --tokenizer-type.  Two are other names of SentencePieceTokenizer.
TOKENIZER_TYPES = (
    "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "NullTokenizer",
)  # fmt: skip


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer given by --tokenizer-type and --tokenizer-model (a local file or folder).

    ``vocab_size`` is used only by NullTokenizer.  Raises UserError for an unknown type, or a file that is missing or
    cannot be read.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {tokenizer_type} is unknown; use one of {', '.join(TOKENIZER_TYPES)}")
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise UserError(f"--tokenizer-type {tokenizer_type} needs --vocab-size")
        return NullTokenizer(vocab_size)
    path = _existing(tokenizer_type, tokenizer_model)
    if tokenizer_type != "HuggingFaceTokenizer":
        return SentencePieceTokenizer(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return _from_json(file)
    if (path / "tokenizer.model").is_file() and not (path / "tokenizer_config.json").is_file():
        return SentencePieceTokenizer(path / "tokenizer.model")  # transformers would give other tokens
    return _from_transformers(path)
