"""Tokenizers: round trips, special ids, and the errors of wrong types and files."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from pathlib import Path

import pytest

from megatron_snip.data.tokenizer import TOKENIZER_TYPES, build_tokenizer
from megatron_snip.errors import UserError

TEXT = "def add(a, b):\n    return a + b  # 12 + 30\n\n\tUnseen: \u00e9\u4e2d\U0001f600"
CORPUS = ["def add(a, b):", "    return a + b", "# the sum of two numbers", "while True: pass"] * 20


def train_sentencepiece(**options):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    settings = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 300, "minloglevel": 2}
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **settings | options)
    return model.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentencepiece") / "tok.model"
    path.write_bytes(train_sentencepiece())
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a byte-level tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|begin|>", "<|endoftext|>", "<|other|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer", "GPTSentencePieceTokenizer"])
def test_sentencepiece(model, kind):
    tokenizer = build_tokenizer(kind, model)
    ids = tokenizer.encode(TEXT)
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 2)
    assert tokenizer.decode(ids) == TEXT and min(ids) >= 0 and max(ids) < 300
    assert not {1, 2} & set(ids)
    assert tokenizer.decode([1, *ids, 2]) == TEXT and tokenizer.encode("") == []


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_ids_are_megatrons(model, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        theirs = pytest.importorskip("megatron.core.tokenizers").MegatronTokenizer.from_pretrained(
            tokenizer_path=model, metadata_path={"library": "sentencepiece"}, legacy=False, special_tokens=None
        )
    ours = build_tokenizer(kind, model)
    assert ours.encode(TEXT) == theirs.tokenize(TEXT)
    assert (ours.eod, ours.vocab_size) == (theirs.eod, theirs.vocab_size)


def test_sentencepiece_without_eos_is_refused(tmp_path):
    (tmp_path / "a.model").write_bytes(train_sentencepiece(eos_id=-1))
    with pytest.raises(ValueError, match=r"a\.model has no EOS"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "a.model"))


@pytest.mark.parametrize("form", ["folder", "file"])
def test_tokenizer_json_needs_no_transformers(folder, monkeypatch, form):
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder if form == "folder" else folder / "tokenizer.json"))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode([*ids, tokenizer.eod]) == TEXT and 0 not in ids
    assert tokenizer.eod == 1 and max(ids) < tokenizer.vocab_size


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("eos", ["<|other|>", {"content": "<|other|>", "lstrip": False}])
def test_eos_is_taken_from_the_configuration(folder, name, eos):
    (folder / name).write_text(json.dumps({"eos_token": eos}))
    assert build_tokenizer("HuggingFaceTokenizer", str(folder)).eod == 2


def test_eos_that_is_not_in_the_vocabulary_is_named(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<absent>"}))
    with pytest.raises(ValueError, match="no end-of-text token \\(<absent>\\)"):
        build_tokenizer("HuggingFaceTokenizer", str(folder))
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        build_tokenizer("HuggingFaceTokenizer", str(folder))


def test_ids_agree_with_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = build_tokenizer("HuggingFaceTokenizer", str(folder))
    assert ours.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.vocab_size == len(theirs)


def test_documents_are_neither_cut_nor_filled_up_as_a_tokenizer_json_asks(folder):
    tokenizers = pytest.importorskip("tokenizers")
    plain = build_tokenizer("HuggingFaceTokenizer", str(folder)).encode(TEXT)
    for setting, value in (("enable_truncation", {"max_length": 4}), ("enable_padding", {"length": 500})):
        file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        getattr(file, setting)(**value)
        file.save(str(folder / "tokenizer.json"))
        assert build_tokenizer("HuggingFaceTokenizer", str(folder)).encode(TEXT) == plain


def test_a_folder_with_a_sentencepiece_model_alone_has_its_ids(model, tmp_path):
    """transformers would put no space before a text."""
    (tmp_path / "tokenizer.model").write_bytes(Path(model).read_bytes())
    ours, theirs = (build_tokenizer(kind, str(path)) for kind, path in
                    (("HuggingFaceTokenizer", tmp_path), ("SentencePieceTokenizer", model)))  # fmt: skip
    assert ours.encode(TEXT) == theirs.encode(TEXT) and ours.eod == theirs.eod


def test_other_folders_go_through_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["<unk>", "</s>", "a", "b", "ab"]
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *words]))
    settings = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert isinstance(tokenizer._tokenizer, transformers.PreTrainedTokenizerBase)
    assert tokenizer.eod == 2 and tokenizer.encode("a b") == [7, 8] and tokenizer.vocab_size == 10
    assert tokenizer.decode([7, 8, 2]) == "a b"


def test_transformers_missing_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="has no tokenizer.json, so it needs transformers: pip install"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_code_in_a_tokenizers_folder_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    auto = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**auto, "tokenizer_class": "Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({**auto, "model_type": "mine"}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: (tmp_path / "asked").touch() or "y")
    with pytest.raises(
        ValueError, match=r"--tokenizer-model .*: transformers cannot read it \(.*\); give a tokenizer.json"
    ):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert not (tmp_path / "ran").exists() and not (tmp_path / "asked").exists()


@pytest.mark.parametrize("text", ["[" * 10**5, '{"eos_token": "a", "eos_token": "b"}', "{"])
def test_broken_settings_beside_a_tokenizer_are_named(folder, text):
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not JSON: .*; give another --tokenizer-model"):
        build_tokenizer("HuggingFaceTokenizer", str(folder))


def test_null_tokenizer():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.encode(" 3 14\n15 ") == [3, 14, 15] and tokenizer.decode([3, 14]) == "3 14"
    for text in ("3 x", "100", "-1", "1.5"):
        with pytest.raises(ValueError, match="ids below 100"):
            tokenizer.encode(text)


def test_unknown_type_lists_the_known():
    with pytest.raises(ValueError, match="LamaTokenizer is unknown") as caught:
        build_tokenizer("LamaTokenizer")
    assert all(name in str(caught.value) for name in TOKENIZER_TYPES)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer"])
def test_missing_and_broken_files_are_named(kind, tmp_path):
    broken = tmp_path / "broken.model"
    broken.write_bytes(b"no model")
    with pytest.raises(ValueError, match="needs --tokenizer-model"):
        build_tokenizer(kind)
    with pytest.raises(ValueError, match="--tokenizer-model nowhere/t does not exist"):
        build_tokenizer(kind, "nowhere/t")
    with pytest.raises(ValueError, match=r"--tokenizer-model .*broken\.model"):
        build_tokenizer(kind, str(broken))
    broken.unlink()
    way_out = "holds no tokenizer .*; give one that does" if kind == "HuggingFaceTokenizer" else "is not a file; give"
    with pytest.raises(ValueError, match=f"--tokenizer-model {tmp_path} {way_out}"):
        build_tokenizer(kind, str(tmp_path))


def test_null_tokenizer_needs_a_vocabulary():
    with pytest.raises(ValueError, match="needs --vocab-size"):
        build_tokenizer("NullTokenizer")
    with pytest.raises(ValueError, match="--vocab-size is 1"):
        build_tokenizer("NullTokenizer", vocab_size=1)


def test_what_a_tokenizer_puts_before_a_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}))
    for template, bos in (("$A", None), ("<s> $A", 1), ("<s> $A </s>", 1), ("$A </s>", None)):
        special = [("<s>", 1), ("</s>", 2)]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        found = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        assert found.bos == bos and found.encode("a") == [0], template


def with_rule(folder, rule):
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    found["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(found))


def test_a_rule_that_panics_is_one_line(folder):
    """Rust's panics are no Exception; a text that the rule can do is encoded all the same."""
    with_rule(folder, "(a|aa)+$")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder))
    with pytest.raises(UserError, match=rf"--tokenizer-model {folder}/tokenizer.json cannot encode 'aaaa.*; give an"):
        tokenizer.encode("a" * 5000 + "b")
    assert tokenizer.encode("ab")


def test_a_panic_at_the_start_is_one_line(folder, monkeypatch):
    class PanicException(BaseException):
        """As pyo3 raises it."""

    class Panics:
        @staticmethod
        def from_buffer(data):
            raise PanicException("called `Option::unwrap()`\non a `None` value")

    monkeypatch.setattr("tokenizers.Tokenizer", Panics)
    with pytest.raises(UserError, match=r"is not a tokenizer.json \(called `Option::unwrap\(\)`\); give another$"):
        build_tokenizer("HuggingFaceTokenizer", str(folder))
    for ending in (KeyboardInterrupt, SystemExit):
        Panics.from_buffer = staticmethod(lambda data, ending=ending: (_ for _ in ()).throw(ending()))
        with pytest.raises(ending):
            build_tokenizer("HuggingFaceTokenizer", str(folder))


def test_ids_far_beyond_the_vocabulary_are_refused(folder):
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    found["model"]["vocab"]["zz"] = 2**32 - 1
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"gives 'zz' the id 4294967295, but has [0-9]+ tokens; give another"):
        build_tokenizer("HuggingFaceTokenizer", str(folder))
    found["model"]["vocab"]["zz"] = 5000  # models leave some ids free
    path.write_text(json.dumps(found))
    assert build_tokenizer("HuggingFaceTokenizer", str(folder)).vocab_size == 5001


def test_a_pipe_in_a_tokenizers_place_is_not_waited_for(folder, tmp_path):
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer.json: cannot read the tokenizer \(it is a pipe"):
        build_tokenizer("HuggingFaceTokenizer", str(folder))
    with pytest.raises(UserError, match="is a pipe|is not a file"):
        build_tokenizer("Llama2Tokenizer", str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="is a pipe"):
        build_tokenizer("HuggingFaceTokenizer", str(folder / "tokenizer.json"))


@pytest.mark.parametrize("eos", [["x"], {"content": 3}, 2, True])
def test_an_eos_that_is_no_text_is_named(folder, eos):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    with pytest.raises(UserError, match=r"tokenizer_config.json: eos_token is .*, not a token; correct the file"):
        build_tokenizer("HuggingFaceTokenizer", str(folder))
