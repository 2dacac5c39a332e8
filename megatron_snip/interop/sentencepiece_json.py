"""A sentencepiece model as Hugging Face's tokenizer.json, with the same ids.

For a lone tokenizer.model, transformers 5 guesses, and omits the space that sentencepiece puts before a text.
Source: Llama 2's tokenizer.json, and generate_merges of transformers' convert_slow_tokenizer.py: every two pieces that
spell a piece merge into it, pieces of higher score first.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megatron_snip.data.tokenizer import SentencePieceTokenizer
from megatron_snip.errors import UserError

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's symbol for a space
_TRIED = (
    "hello  world",
    " a",
    "a ",
    "\n\n\tx = 1234",
    "\ufb01 \u00e9\u0301 \u2460 \uff21",
    "\U0001f600\0\u4e2d",
    " ",
    "",
)


def tokenizer_files(model: Path) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json of a sentencepiece model, as JSON values.  Texts do not start with BOS.

    Raises UserError if tokenizer.json cannot express the model, such as a unigram model, or if tokenizers is missing.
    """
    try:
        import tokenizers
        from tokenizers import decoders, models, normalizers
    except ImportError as error:
        raise UserError(f"{model} needs tokenizers to become a tokenizer.json: pip install tokenizers") from error
    ours = SentencePieceTokenizer(model)
    of = ours.processor
    pieces = [of.id_to_piece(i) for i in range(ours.vocab_size)]
    special = [piece for i, piece in enumerate(pieces) if of.is_unknown(i) or of.is_control(i)]
    normal = {p: of.get_score(i) for i, p in enumerate(pieces) if p not in special and not of.is_byte(i)}
    if not all(score.is_integer() for score in normal.values()):  # BPE's are ranks, unigram's logarithms
        raise UserError(f"{model} is a unigram model, which cannot become a tokenizer.json")
    vocabulary, unknown = {piece: i for i, piece in enumerate(pieces)}, pieces[of.unk_id()]
    merges = _merges(normal, vocabulary)
    made: Any = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in special])
    for text in _texts(list(normal)):
        if made.encode(text, add_special_tokens=False).ids != ours.encode(text):
            raise UserError(f"a tokenizer.json of {model} would give other tokens for {text[:40]!r}")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": pieces[ours.eod], "unk_token": unknown,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if ours.bos is not None:
        settings["bos_token"] = pieces[ours.bos]
    return {"tokenizer.json": json.loads(made.to_str()), "tokenizer_config.json": settings}


def _merges(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    found = []
    for piece, score in scores.items():
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        both = [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
        found += [(score, pair) for pair in sorted(both, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))]
    found.sort(key=lambda each: (each[0], len(each[1][0]), len(each[1][1])), reverse=True)
    return [pair for _, pair in found]


def _texts(pieces: list[str]) -> list[str]:
    """Every piece as a text, then many pieces joined in random order, and texts that models normalise differently."""
    words = [piece.replace(_SPACE, " ") for piece in pieces]
    mixed = random.Random(0).sample(words, len(words))
    return [*_TRIED, *words, *("".join(mixed[i : i + 50]) for i in range(0, len(mixed), 50))]
