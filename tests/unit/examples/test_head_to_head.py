"""The head-to-head runs on a toy: arms go on from one prefix, are judged by code of their own, and are compared."""

from __future__ import annotations

import functools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from examples.study import head_to_head, head_to_head_table, real_text, scratch
from examples.study.head_to_head_table import described, difference, table
from examples.study.schedule import FROM_SCRATCH, read_schedule
from megatron_snip.errors import UserError
from tests.dist.helpers.faults import command
from tests.dist.helpers.harness import CONTEXT

read_once = functools.cache(read_schedule)
SCHEDULES = sorted((Path(head_to_head.__file__).parent / "schedules").glob("*.toml"))
TOY = """
name = "toy"
model = "smollm2"
prefix = 1
seeds = [5]
judged = 2

[options]
num-layers = 2
hidden-size = 64
ffn-hidden-size = 64
num-attention-heads = 2
seq-length = 128
global-batch-size = 2
train-iters = 3
eval-interval = 3
eval-iters = 1
snip-start = 2
snip-probe-tokens = 256
snip-trial-tokens = 256

[arms.bf16]
precision = "bf16"

[arms.fixed]
by-hand = "nvfp4, last 50% bf16"

[arms.recipes]
precision = "snip"
snip-options = "recipes:blackwell"
gemm-times = "published:b300"
same-time-as = "fixed"
"""


@pytest.fixture
def model(tmp_path):
    """A Hugging Face folder with a small model, its tokenizer and texts."""
    folder, words = tmp_path / "model", {f"w{i}": i for i in range(99)} | {"<|endoftext|>": 99}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=128, eos_token_id=99,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    draw = np.random.default_rng(0)
    for name in ("probe", "held_out_prose", "held_out_code"):
        (folder / f"{name}.txt").write_text(" ".join(f"w{i}" for i in draw.integers(0, 99, 1500)))
    return folder


def forked(words, log):
    """`head_to_head.run` in a process that is forked from one with torch loaded: ten take half a minute to load it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = CONTEXT.Process(target=command, args=(list(words), str(log)))
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 0, log.read_text()


def test_arms_are_trained_judged_and_compared(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(head_to_head, "run", forked)
    schedule, out = tmp_path / "toy.toml", tmp_path / "out"
    schedule.write_text(TOY)
    words = [str(schedule), "--output", str(out), "--model", str(model), "--json", str(tmp_path / "all.jsonl")]
    head_to_head.main([*words, "--jobs", "2"])
    rows = {row["arm"]: row for row in map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())}
    assert list(rows) == ["bf16", "fixed", "recipes"]
    losses = {name: row["training loss"] for name, row in rows.items()}
    assert all(len(each) == 2 for each in losses.values())  # after the prefix's iteration
    assert losses["bf16"][0] == losses["recipes"][0] != losses["fixed"][0]
    assert rows["bf16"]["losses"] == rows["bf16"]["unrounded"] != rows["fixed"]["unrounded"]
    assert rows["fixed"]["losses"] != rows["fixed"]["unrounded"]
    assert rows["recipes"]["plans"] and rows["recipes"]["saved"][-1] >= rows["recipes"]["plans"][-1]["target"] > 0.1
    assert rows["recipes"]["planning, in iterations"] > 0 == rows["bf16"]["planning, in iterations"]
    assert not [*out.rglob("*.safetensors")] and not (out / "toy/5/fixed/checkpoints").exists()
    said = capsys.readouterr().out
    assert "| bf16 | 0.0 ± 0.0 |" in said and ": done in" in said
    head_to_head.main(words)  # nothing is made again
    assert "trains" not in capsys.readouterr().out
    head_to_head_table.main([str(tmp_path / "all.jsonl"), "--picture", str(tmp_path / "arms.png")])
    assert (tmp_path / "arms.png").read_bytes().startswith(b"\x89PNG") and "| fixed |" in capsys.readouterr().out


def test_a_schedule_like_another(tmp_path):
    (tmp_path / "toy.toml").write_text(TOY)
    (path := tmp_path / "other.toml").write_text('like = "toy.toml"\nseeds = [7]\n[options]\nlr = 1e-2\n')
    toy, other = read_schedule(tmp_path / "toy.toml"), read_schedule(path)
    assert (other.seeds, other.arms, other.name) == ((7,), toy.arms, toy.name)
    assert other.options == {**toy.options, "lr": 1e-2}
    path.write_text('like = "none.toml"')
    with pytest.raises(UserError, match=r"none.toml: cannot read the schedule"):
        read_schedule(path)


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_a_picture_tells_arms_apart(path):
    words = [described(options) for options in read_once(path).arms.values()]
    assert len(set(words)) == len(words) and "bf16 everywhere" in words
    assert any(text.startswith("SNIP by GEMM: fp8,fp4, 75%") for text in words)


@pytest.mark.parametrize("kind", ["smollm2", FROM_SCRATCH])
def test_from_scratch_only_arms_load_weights(kind, model, tmp_path, monkeypatch):
    (path := tmp_path / "toy.toml").write_text(TOY.replace('"smollm2"', f'"{kind}"'))
    work, ran = head_to_head.HeadToHead(read_schedule(path), tmp_path / "out", model, "cpu"), []
    monkeypatch.setattr(head_to_head, "run", lambda words, log: ran.append(words))
    work.prepare()
    work.train(5, "bf16", work.prefix(5), [])
    loads = [words[words.index("--load") + 1] if "--load" in words else None for words in ran if words[0] == "train"]
    assert loads == [None if kind == FROM_SCRATCH else str(model), str(tmp_path / "out/5/prefix/checkpoints")]


def test_text_and_tokenizer_from_scratch(tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    for number in range(60):
        folder = packages / f"package{number}"
        folder.mkdir(parents=True)
        lines = [f"def function_{number}_{line}(argument):  # adds {line * number}" for line in range(40)]
        (folder / "module.py").write_text("\n".join(lines))
        (folder / "README.md").write_text(
            f"Number {number} is a package whose functions add numbers to arguments. " * 9
        )
    written = partial(real_text.write_texts, prose=packages, least=300, most=60_000)
    monkeypatch.setattr(scratch, "write_texts", lambda folder, code, **more: written(folder, code=packages))
    folder = scratch.made(tmp_path / "made")
    sizes = {name: (folder / f"{name}.txt").stat().st_size for name in ("probe", "held_out_prose", "held_out_code")}
    assert sizes["probe"] == 60_000 and sizes["held_out_code"] == 2_000
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "def functión_7(argument):\n\tpass\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(scratch.END) == 0 and tokenizer.get_vocab_size() <= scratch.VOCABULARY
    whole, capped = (sum(map(len, real_text.documents(packages, prose=False, of_package=n))) for n in (None, 0))
    assert capped == whole > 0, "a package's first file is taken"
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    scratch.made(folder)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before


def test_the_judge_rounds_as_an_arm_ends(tmp_path):
    late = (
        '[arms.late]\nby-hand = "nvfp4, last 50% bf16"\nsnip-final-precision = "bf16/plan/plan"\nsnip-final-iters = 1'
    )
    (path := tmp_path / "toy.toml").write_text(f"{TOY}\n{late}")
    schedule = read_schedule(path)
    work = head_to_head.HeadToHead(schedule, tmp_path, tmp_path, "cpu")
    names = [shape.name for shape in schedule.shapes()]
    for name in ("fixed", "late"):
        schedule.plan(schedule.arms[name]).save(tmp_path / "by_hand.json")
        at_end = {each: "nvfp4" if name == "fixed" and "layers.0" in each else "bf16" for each in names}
        assert work.formats(name, tmp_path, names) == at_end
    (tmp_path / "by_hand.json").unlink()
    assert set(work.formats("bf16", tmp_path, names).values()) == {"bf16"}
    schedule.arms["backward"] = {"precision": "mxfp8/nvfp4/nvfp4"}
    assert set(work.formats("backward", tmp_path, names).values()) == {"mxfp8"}


def of(arm, seed, values):
    return {
        "arm": arm, "seed": seed, "losses": {"prose": values[:2], "code": values[2:]}, "unrounded": {"all": values},
        "saved": [], "plans": [], "planning, in iterations": 0.0,
    }  # fmt: skip


def test_differences_are_paired_and_their_error_is_the_larger_one():
    base = {1: np.array([1.0, 2.0, 3.0, 4.0]), 2: np.array([2.0, 2.0, 2.0, 2.0])}
    arm = {1: base[1] + 0.1, 2: base[2] + 0.3, 3: base[2]}
    mean, error, seeds = difference(arm, base)
    assert (mean, seeds) == (pytest.approx(0.2), 2)
    assert error == pytest.approx(0.1)  # seeds differ more than sequences
    assert difference({1: base[1] + [0.1, 0.3, 0.1, 0.3]}, base)[1] == pytest.approx(0.2 / 12**0.5)
    rows = [of(name, seed, list(each)) for name, seeds in (("bf16", base), ("x", arm)) for seed, each in seeds.items()]
    assert "| x | 200.0 ± 100.0 |" in table(rows)
    assert "nothing to compare with" in table(rows[2:])


def test_unknown_models_arms_and_seeds_are_refused(tmp_path):
    (path := tmp_path / "toy.toml").write_text(TOY.replace('"smollm2"', '"scrach"'))
    with pytest.raises(UserError, match=r"toy.toml: model is 'scrach'; give one of smollm2, scratch"):
        read_schedule(path)
    path.write_text(TOY)
    with pytest.raises(UserError, match=r"--seeds: .*toy.toml has no seed 6; it has 5"):
        head_to_head.main([str(path), "--seeds", "5", "6"])
    with pytest.raises(UserError, match=r"--arms: .*toy.toml has no arm fp6; it has bf16, fixed, recipes"):
        head_to_head.main([str(path), "--arms", "fp6"])


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_schedules_are_sound(path):
    schedule = read_once(path)
    assert schedule.prefix < schedule.options["snip-start"] <= schedule.options["train-iters"]
    assert schedule.judged * schedule.options["seq-length"] >= 16384


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[arms.bf16]", "[arms.base]"), r"no arm bf16, which all are compared with; add \[arms.bf16\]"),
        (("prefix = 1", "prefixed = 1"), "unknown prefixed; known: name, model"),
        (("prefix = 1", ""), "prefix missing"),
        (("last 50% bf16", "and bf16"), 'by-hand is "?\'nvfp4, and bf16\'; give "FORMAT, last N% FORMAT"'),
        (("same-time-as = \"fixed\"", "same-time-as = \"late_\""), "same-time-as is 'late_'; give the name of an arm"),
        (("snip-start", "snip-begin"), "snip-begin"),
        (("recipes:blackwell", "fp8,fp4"), "GEMM times of published:b300 have no format fp"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_run_is_named(tmp_path, change, said):
    (path := tmp_path / "bad.toml").write_text(TOY.replace(*change))
    with pytest.raises(UserError, match=said) as found:
        read_schedule(path)
    assert str(path) in str(found.value)


def test_an_unknown_arm_and_a_failed_command_are_named(tmp_path):
    (schedule := tmp_path / "toy.toml").write_text(TOY)
    with pytest.raises(UserError, match=r"has no arm fp5; it has bf16, fixed"):
        head_to_head.main([str(schedule), "--output", str(tmp_path), "--arms", "fp5"])
    words = ["tokenizer", "--input", str(tmp_path / "no.json"), "--output-prefix", str(tmp_path / "made")]  # no torch
    with pytest.raises(UserError, match=r"snip tokenizer ended with status 2: .*no.json.*log.txt has all of it"):
        head_to_head.run(words, tmp_path / "log.txt")


def test_two_commands_never_work_at_one_arm(tmp_path):
    with head_to_head.alone(tmp_path) as first, head_to_head.alone(tmp_path) as second:
        assert first and not second
    with head_to_head.alone(tmp_path) as again:
        assert again
