"""The recipes of docs/data.md, each run as it stands there, on small files of the form that the datasets have."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard

from megatron_snip.arguments import parse
from megatron_snip.cli.preprocess_data import main
from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDataset
from megatron_snip.data.sampling import build_datasets
from tests.test_readme import ROOT, commands

COMMANDS = [shlex.split(command) for command in commands((ROOT / "docs/data.md").read_text())]
RECIPES = {words[words.index("--output-prefix") + 1]: words[2:] for words in COMMANDS if words[0] == "megatron-snip"}
TEXTS = [f"{number} the text of document {number} of many" for number in range(1500)]


def json_lines(texts: list[str], **meta: object) -> bytes:
    return "".join(json.dumps({"text": text, "meta": meta}) + "\n" for text in texts).encode()


def table(key: str, texts: list[str], **columns: object) -> pa.Table:
    return pa.table({**{name: [value] * len(texts) for name, value in columns.items()}, key: texts})


def slimpajama(folder: Path) -> None:
    meta = {"redpajama_set_name": "RedPajamaC4"}
    for number, texts in enumerate((TEXTS[:700], TEXTS[700:])):
        rows = table("text", texts, meta=meta, __index_level_0__=7)
        pq.write_table(rows, folder / f"train-{number:05}-of-00048-ab12cd34ef56ab78.parquet")
    pq.write_table(table("text", ["validation"], meta=meta), folder / "validation-00000-of-00001-0f.parquet")


def slimpajama_whole(folder: Path) -> None:
    for number, texts in enumerate((TEXTS[:700], TEXTS[700:])):
        data = zstandard.ZstdCompressor().compress(json_lines(texts, redpajama_set_name="RedPajamaBook"))
        (folder / f"example_train_{number}.jsonl.zst").write_bytes(data)


def starcoder(folder: Path) -> None:
    columns = {"max_stars_repo_path": "a.py", "max_stars_repo_name": "o/a", "max_stars_count": 3, "id": "1"}
    pq.write_table(table("content", TEXTS, **columns), folder / "train-00000-of-00059.parquet")


def redpajama(folder: Path) -> None:
    for name, texts in {"arxiv": TEXTS[:100], "book": TEXTS[100:900], "wikipedia": TEXTS[900:]}.items():
        (folder / f"{name}_sample.jsonl").write_bytes(json_lines(texts, timestamp="2023", language="en", url="u"))


def fineweb(folder: Path) -> None:
    columns = {"id": "<urn:uuid:1>", "dump": "CC-MAIN-2023-50", "url": "u", "file_path": "s3://a", "language": "en"}
    scores = {"language_score": 0.9, "token_count": 9, "score": 3.1, "int_score": 3}
    pq.write_table(table("text", TEXTS, **columns, **scores), folder / "000_00000.parquet")


#: Prefix of the tokens: where the dataset lies, and who makes files of its form.
FORMS = {
    "tokens/slimpajama": ("data/slimpajama/data", slimpajama),
    "tokens/slimpajama_1": ("data/slimpajama-627b/train/chunk1", slimpajama_whole),
    "tokens/starcoder": ("data/starcoder/python", starcoder),
    "tokens/redpajama": ("data/redpajama", redpajama),
    "tokens/fineweb_edu": ("data/fineweb-edu/sample/10BT", fineweb),
}


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tokenizers.Tokenizer:
    """A Hugging Face tokenizer in llama/ of an empty current folder."""
    monkeypatch.chdir(tmp_path)
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=400, special_tokens=["<|end_of_text|>"], show_progress=False)
    Path("llama").mkdir()
    trained.save("llama/tokenizer.json")
    return tokenizers.Tokenizer.from_file("llama/tokenizer.json")


def run(prefix: str) -> list[str]:
    """Run a recipe with one worker; the texts that it tokenised."""
    folder, make = FORMS[prefix]
    Path(folder).mkdir(parents=True)
    make(Path(folder))
    words = RECIPES[prefix]
    at = words.index("--workers") + 1
    assert main([*words[:at], "1", *words[at + 1 :]]) == 0
    key = words[words.index("--json-keys") + 1] if "--json-keys" in words else "text"
    dataset = IndexedDataset(f"{prefix}_{key}_document")
    decoder = tokenizers.Tokenizer.from_file("llama/tokenizer.json")
    found = [decoder.decode(dataset.get(i).tolist(), skip_special_tokens=False) for i in range(len(dataset))]
    assert all(text.endswith("<|end_of_text|>") for text in found)
    return [text.removesuffix("<|end_of_text|>") for text in found]


def test_each_recipe_has_a_form() -> None:
    assert RECIPES.keys() == FORMS.keys()


@pytest.mark.parametrize("prefix", FORMS)
def test_recipe(prefix: str, tokenizer: tokenizers.Tokenizer) -> None:
    found = run(prefix)
    if "--sample-fraction" in RECIPES[prefix]:
        assert 3 <= len(found) <= 32 and set(found) < set(TEXTS)  # 15 are expected, 4 is the standard deviation
    else:
        assert found == TEXTS


def test_mixing(tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of two corpora: 70% and 30% of its samples, each of 2048 tokens and the one that follows."""
    monkeypatch.setitem(globals(), "TEXTS", [text * 40 for text in TEXTS])  # so a hundredth is a sample
    for prefix in ("tokens/slimpajama", "tokens/starcoder"):
        run(prefix)
    words = next(words for words in COMMANDS if words[0] == "torchrun")
    words = words[words.index("train") + 1 :]
    at = words.index("--config") + 1
    config: Config = parse([*words[:at], str(ROOT / words[at]), *words[at + 1 :], "--train-iters", "10"])
    data, m = config.data, config.model
    train, _ = build_datasets(
        (), (), data.data_path, data.split, mock=False, num_train_samples=100, num_valid_samples=0,
        seq_length=m.seq_length, seed=1, vocab_size=512, cache_path=data.data_cache_path,
    )  # fmt: skip
    assert [len(train[i]) for i in (0, 50, 99)] == [2049] * 3
    shares = {source.files.prefix: source.weight for source in train.sources}
    assert shares == pytest.approx({"tokens/slimpajama_text_document": 0.7, "tokens/starcoder_content_document": 0.3})
