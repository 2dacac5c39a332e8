"""A sentencepiece model as tokenizer.json: the ids of both are the same, also through transformers, or none is made."""

from __future__ import annotations

import io
import json

import pytest

from megatron_snip.data.tokenizer import build_tokenizer
from megatron_snip.errors import UserError
from megatron_snip.interop.sentencepiece_json import tokenizer_files

pytest.importorskip("tokenizers")
CORPUS = ["def add(a, b):", "    return a + b", "# the sum of two numbers", "while True: pass"] * 20
TEXTS = ["def add", "  return", " ", "", "\n\tx\n", "a + b  ", "\u00e9\u4e2d\U0001f600", "nu\0mbers of 1234", "\ufb01"]


def train(path, **options):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    settings = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 300, "minloglevel": 2}
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **settings | options)
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_ids_are_the_models(model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = build_tokenizer("SentencePieceTokenizer", str(train(tmp_path / "tokenizer.model")))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, value in tokenizer_files(tmp_path / "tokenizer.model").items():
        (tmp_path / name).write_text(json.dumps(value))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    again = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    for text in [*TEXTS, *CORPUS[:4]]:
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids == again.encode(text), text
        assert theirs.decode(ids) == ours.decode(ids) == again.decode(ids), text
    assert (theirs.eos_token_id, again.eod, again.bos) == (ours.eod, ours.eod, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, r"a tokenizer.json of .*a\.model would give other tokens for"),
        ({"remove_extra_whitespaces": True}, "would give other tokens for"),
        ({"add_dummy_prefix": False}, "would give other tokens for"),
        ({"model_type": "unigram", "vocab_size": 285}, r"a\.model is a unigram model"),
    ],
    ids=str,
)
def test_what_cannot_be_said_is_refused(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        tokenizer_files(train(tmp_path / "a.model", **options))
