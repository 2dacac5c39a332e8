"""Tokenizers behind one small interface.

Source: Megatron-LM core 0.16.1, megatron/core/tokenizers: sentencepiece and Hugging Face text is encoded
without BOS or EOS, and the end of a document (EOD) is the model's EOS.  One difference: NullTokenizer's EOD
is the last of its ``vocab_size`` ids, where Megatron adds one more, so that --vocab-size stays the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_snip.errors import UserError
from megatron_snip.files import parse_json, read_file

# What a lone tokenizer.json, which names no EOS, may call it.
KNOWN_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<EOD>")


class Tokenizer(Protocol):
    """Text to ids and back.  ``eod`` is the id put after each document; all ids are below ``vocab_size``.

    ``bos`` is the id that the tokenizer itself, were it asked for special tokens, would put before a text, or None.
    """

    vocab_size: int
    eod: int
    bos: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any special token."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out."""


def _existing(tokenizer_type: str, model: str | None) -> Path:
    if not model:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model; give its file or folder")
    path = Path(model)
    if not path.exists():
        raise UserError(f"--tokenizer-model {model} does not exist; give a local file or folder")
    return path


class SentencePieceTokenizer:
    """A sentencepiece .model file, such as Llama-2's or one of tools/train_tokenizer.py."""

    def __init__(self, model: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise UserError("this tokenizer needs sentencepiece: pip install sentencepiece") from error
        if not model.is_file():
            raise UserError(f"--tokenizer-model {model} is not a file; give the sentencepiece .model file")
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            data = read_file(model, "sentencepiece model", "give another --tokenizer-model", most=1 << 28)
            self.processor.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise UserError(
                f"--tokenizer-model {model} is not a sentencepiece model ({error}); give another"
            ) from error
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
        """The text of ids; control pieces are left out."""
        text: str = self.processor.decode([int(token) for token in ids])
        return text


class TokenizerJson:
    """A Hugging Face tokenizer.json, through the light `tokenizers` library.

    The EOS is taken from the tokenizer_config.json or special_tokens_map.json beside it, else by its usual
    names.  Raises UserError if there is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise UserError("this tokenizer needs tokenizers: pip install tokenizers") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"--tokenizer-model {path} is not a tokenizer.json ({error}); give another") from error
        self._tokenizer.no_truncation()  # a file may ask for them, and documents would be cut or filled up
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        named = _configured_eos(path.parent)
        candidates = [eos for eos in ((named,) if named else KNOWN_EOS) if eos in vocabulary]
        if not candidates:
            raise UserError(
                f"--tokenizer-model {path} has no end-of-text token ({named or ', '.join(KNOWN_EOS)}); "
                'name it as "eos_token" in a tokenizer_config.json beside it'
            )
        self.eod = vocabulary[candidates[0]]
        self.bos = _first(lambda special: self._tokenizer.encode("a", add_special_tokens=special).ids)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        # the same ids as encode's, without the places in the text, which take a fifth of the time
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out."""
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)
        return text


def _first(encode: Callable[[bool], list[int]]) -> int | None:
    """What stands before a text with special tokens and not without them."""
    plain, special = encode(False), encode(True)
    return special[0] if len(special) > len(plain) and special[1 : 1 + len(plain)] == plain else None


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
        if eos:
            return str(eos)
    return None


class TransformersTokenizer:
    """Any other tokenizer in a local folder, through transformers (optional).

    Nothing is downloaded, no code of the folder is run, and nobody is asked whether to.
    """

    def __init__(self, path: Path) -> None:
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
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises many kinds
            first = str(error).strip().partition("\n")[0]
            raise UserError(
                f"--tokenizer-model {path}: transformers cannot read it: {first}; give a tokenizer.json, or a folder "
                "whose tokenizer needs no code of its own"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise UserError(f"--tokenizer-model {path} has no EOS token to end documents with; add one to it")
        self.vocab_size = max(len(self._tokenizer), max(self._tokenizer.get_vocab().values()) + 1)
        self.eod = int(self._tokenizer.eos_token_id)
        self.bos = _first(lambda special: self._tokenizer.encode("a", add_special_tokens=special))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out."""
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)
        return text


class NullTokenizer:
    """Text that is ids already, "3 14 15"; the last id of the vocabulary is EOD."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise UserError(f"--vocab-size is {vocab_size}; NullTokenizer needs 2 or more, the last one being EOD")
        self.vocab_size, self.eod = vocab_size, vocab_size - 1
        self.bos: int | None = None

    def encode(self, text: str) -> list[int]:
        """The ids that the text spells.  Raises UserError for anything else than ids of the vocabulary."""
        words = text.split()
        for word in words:
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise UserError(f"NullTokenizer reads ids below {self.vocab_size}, not {word[:40]!r}")
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, spelled out."""
        return " ".join(str(int(token)) for token in ids)


def _sentencepiece(tokenizer_type: str, model: str | None, vocab_size: int | None) -> Tokenizer:
    return SentencePieceTokenizer(_existing(tokenizer_type, model))


def _hugging_face(tokenizer_type: str, model: str | None, vocab_size: int | None) -> Tokenizer:
    path = _existing(tokenizer_type, model)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return TokenizerJson(file)
    if (path / "tokenizer.model").is_file() and not (path / "tokenizer_config.json").is_file():
        return SentencePieceTokenizer(path / "tokenizer.model")  # transformers would make other tokens
    return TransformersTokenizer(path)


def _null(tokenizer_type: str, model: str | None, vocab_size: int | None) -> Tokenizer:
    if vocab_size is None:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs --vocab-size")
    return NullTokenizer(vocab_size)


_BUILDERS: dict[str, Callable[[str, str | None, int | None], Tokenizer]] = {
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "HuggingFaceTokenizer": _hugging_face,
    "NullTokenizer": _null,
}
TOKENIZER_TYPES = tuple(_BUILDERS)


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer that --tokenizer-type and --tokenizer-model (a local file or folder) name.

    ``vocab_size`` is NullTokenizer's alone.  Raises UserError for an unknown type or a file that is missing
    or cannot be read.
    """
    if tokenizer_type not in _BUILDERS:
        raise UserError(f"--tokenizer-type {tokenizer_type} is unknown; use one of {', '.join(TOKENIZER_TYPES)}")
    return _BUILDERS[tokenizer_type](tokenizer_type, tokenizer_model, vocab_size)
