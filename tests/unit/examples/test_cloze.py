"""The cloze tasks: items are fixed and share no text, and an arm's scores are those of the judge's forward."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from examples.study import cloze
from examples.study.head_to_head import HeadToHead
from examples.study.head_to_head_table import table
from examples.study.judge import in_formats, linears_of
from examples.study.schedule import Schedule
from megatron_snip.errors import UserError
from tests.dist.helpers.evaluating import cloze_of_arms
from tests.dist.helpers.harness import run_ranks

WORDS = ["".join(letters) for letters in itertools.product("abcde", repeat=4)][:99]


def words_of(seed):
    return random.Random(seed).choices(WORDS, k=2500)


def test_items_are_fixed_share_no_text_and_end_with_the_word_that_follows():
    draw = random.Random(0)
    others = draw.choices([*WORDS, "in", "x1y2z3", "won't", "can't"], k=3000)
    text = "".join(word + draw.choice([" ", " ", " ", "  ", "\n", ".\n\n", ", "]) for word in others)
    items, end = cloze.items_of(text, 20), 0
    assert len(items) == 20 and items == cloze.items_of(text, 20)
    for number, item in enumerate(items):
        first, last = (len(text) * n // 20 for n in (number, number + 1))
        begin = text.index(item["context"] + item["target"], first)
        assert begin >= end and (begin == 0 or text[begin - 1].isspace())
        end = begin + len(item["context"] + item["target"])
        assert 60 <= len(item["context"].split()) <= 80 and end <= last
        assert item["target"][0] == " " and item["target"][1:] in WORDS and text[end] in " \n.,"


def test_a_text_that_is_too_short_for_the_items_is_named(tmp_path):
    for file in cloze.TASKS.values():
        (tmp_path / file).write_text(" ".join(words_of(0)))
    with pytest.raises(UserError, match=r"held_out_prose.txt has \d+ items in 60 stretches; ask for fewer"):
        cloze.write_tasks(tmp_path, tmp_path / "tasks", 60)


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder of a model that often repeats a word, and texts that do."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=128, eos_token_id=99,
        rms_norm_eps=1e-5, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder := tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "<end>"])}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    for seed, file in enumerate(cloze.TASKS.values()):
        (folder / file).write_text(" ".join(word for each in words_of(seed) for word in (each, each)))
    return folder


@torch.no_grad()
def expected(folder, task, fmt):
    """Accuracy and mean log-likelihood of the items by transformers' model with the judge's rounding."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer, found = Tokenizer.from_file(str(folder / "tokenizer.json")), []
    with in_formats(model, dict.fromkeys(linears_of(model), fmt)):
        for item in cloze.items_of((folder / cloze.TASKS[task]).read_text(), 16):
            *context, target = tokenizer.encode(item["context"] + item["target"]).ids
            logits = model(torch.tensor([context])).logits[0, -1]
            found.append((int(logits.argmax()) == target, float(F.log_softmax(logits, -1)[target])))
    return [fmean(each) for each in zip(*found, strict=True)]


@pytest.mark.dist
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="lm_eval is not installed")
def test_an_arm_is_scored_with_its_forward(folder, tmp_path):
    options = {
        "num-layers": 2, "hidden-size": 64, "ffn-hidden-size": 64, "num-attention-heads": 2, "seq-length": 128,
        "train-iters": 3,
    }  # fmt: skip
    arms = {"bf16": {"precision": "bf16"}, "fp4": {"precision": "fp4"}}
    work = HeadToHead(Schedule("toy", "smollm2", 1, options, arms, (1,), cloze=16), tmp_path / "out", folder, "cpu")
    cloze.write_tasks(folder, work.folder / "cloze", 16)
    (found,) = run_ranks(cloze_of_arms, 1, tmp_path / "cache", work, [*arms], folder, seconds=600)
    for fmt, scores in zip(arms, found, strict=True):
        assert scores.keys() == cloze.TASKS.keys()
        for task, values in scores.items():
            right, likelihood = expected(folder, task, fmt)
            assert 0 < values["acc"] < 1 and values["acc"] == pytest.approx(right)
            assert torch.tensor(values["perplexity"]).log().item() == pytest.approx(-likelihood, rel=1e-5)
            assert values["acc_stderr"] > 0
    assert found[0] != found[1]


def test_the_table_has_a_column_if_results_have_scores():
    rows = [
        {
            "arm": arm, "seed": seed, "losses": {"all": [1.0, 2.0]}, "unrounded": {"all": [1.0, 2.0]}, "saved": [],
            "plans": [], "planning, in iterations": 0.0,
        }
        for arm in ("bf16", "fp4") for seed in (1, 2)
    ]  # fmt: skip
    assert "cloze" not in table(rows)
    for row, right in zip(rows[:2], (0.25, 0.75), strict=True):
        row["cloze"] = {"cloze_prose": {"acc": right}, "cloze_code": {"acc": right / 2}}
    heads, _, bf16, fp4 = table(rows).splitlines()
    assert heads.endswith("| seeds | cloze, prose / code |")
    assert bf16.endswith("| 2 | 50.0% / 25.0% |") and fp4.endswith("| 2 |  |")
