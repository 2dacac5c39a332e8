"""tools/train_tokenizer.py: Llama-like ids, equal runs, and the errors."""

from __future__ import annotations

import json
import re

import pytest

from megatron_snip.cli.train_tokenizer import main
from megatron_snip.data.tokenizer import build_tokenizer

pytest.importorskip("sentencepiece")
TEXT = "class A:\n    def f(self, x):\n        return x * 12345\n\n# why? \u00fc\u00fc\u00fc"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = [f"{TEXT}\nnumber {i} of {i * i}" for i in range(50)] + ["x" * 50_000 + "\0", ""]
    path.write_text("\n".join(json.dumps({"text": text, "other": "no"}) for text in texts) + "\n\n")
    return str(path)


def run(tmp_path, corpus, *options, name="tok"):
    return main(["--input", corpus, "--vocab-size", "320", "--output-prefix", str(tmp_path / name), *options])


def test_llama_like_model(tmp_path, corpus, capfd):
    import sentencepiece

    assert run(tmp_path, corpus) == 0
    captured = capfd.readouterr()
    assert "320 pieces" in captured.out and captured.err == ""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tok.model"))
    pieces = [processor.id_to_piece(i) for i in range(4)]
    assert pieces == ["<unk>", "<s>", "</s>", "<0x00>"] and processor.pad_id() == -1
    assert processor.vocab_size() == 320 and processor.is_byte(258)
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tok.model"))
    for text in (TEXT, "  two  spaces  ", "\t\ttabs\n\n", "\u4e2d\U0001f600"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = [processor.id_to_piece(i) for i in tokenizer.encode("12345")]
    assert [p for p in digits if p != "\u2581"] == list("12345")


def test_equal_input_gives_an_equal_model(tmp_path, corpus):
    run(tmp_path, corpus, name="a"), run(tmp_path, corpus, name="b")
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


def test_max_bytes_and_key_are_heeded(tmp_path, corpus):
    run(tmp_path, corpus, name="a"), run(tmp_path, corpus, "--max-bytes", "2000", name="b")
    assert (tmp_path / "a.model").read_bytes() != (tmp_path / "b.model").read_bytes()


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"text": "a"', (), "a.jsonl:2 is unusable: "),
        ('["text"]', (), "a.jsonl:2 is unusable: it is a list, not an object"),
        ('{"text": "a \\ud800"}', (), "a.jsonl:2 is unusable: "),
        ("[" * 10**5, (), "a.jsonl:2 is unusable: "),
        ('{"text": 3}', (), 'a.jsonl:2 is unusable: it has a int for the key "text", not a string'),
        ('{"text": "a b"}', ("--json-key", "body"), 'a.jsonl:1 is unusable: it has no key "body"; .* --json-key'),
        ('{"text": "a b"}', (), "sentencepiece: .*Vocabulary size"),
        ('{"text": "a b"}', ("--input", "nowhere.jsonl"), "--input nowhere.jsonl does not exist"),
    ],
)
def test_errors_leave_nothing(tmp_path, capsys, line, options, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "first"}\n' + line + "\n")
    status = main(["--input", str(path), "--output-prefix", str(tmp_path / "tok"), *options])
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1
    assert re.search(message, error), error
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
