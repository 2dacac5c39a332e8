"""Hugging Face models in and out: a run from their weights, and back into their classes."""

from __future__ import annotations

import functools
import json
import shutil
import tomllib
import zlib

import msgspec
import pytest
import torch

from megatron_snip.checkpoint.manifest import read_manifest
from megatron_snip.data.tokenizer import build_tokenizer
from megatron_snip.interop.huggingface import model_options
from tests.dist.helpers.converting import collect, convert, first_batch, logits_of, refused, told, tokenizer_files, warned
from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.runs import train_run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES = {
    "small": {"vocab_size": 500, "tie_word_embeddings": False},
    "32k, scaled rope": {"vocab_size": 32000, "tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "32k, tied": {"vocab_size": 32000, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "vocab_size": 500, "tie_word_embeddings": False, "head_dim": 64},
    "qwen3, tied": {"model_type": "qwen3", "vocab_size": 500, "tie_word_embeddings": True, "head_dim": 64},
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def theirs(folder, model_type="llama", **more):
    """A random model of theirs, and its folder."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SHAPE, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, p in model.named_parameters():
        if p.ndim == 2:  # their own initialisation leaves logits near zero
            torch.nn.init.normal_(p, std=0.1)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(p, mean=1.0, std=0.3)
    model.save_pretrained(folder, max_shard_size="1MB")
    return model


def forge(folder, **data):
    """Other options of the data in a checkpoint's state.json, with the checksums that go with them."""
    iteration = folder / "iter_0000000"
    state, manifest = json.loads((iteration / "state.json").read_text()), read_manifest(iteration)
    state["config"]["data"] |= data
    text = json.dumps(state)
    (iteration / "state.json").write_text(text)
    small = {**manifest.small, "state.json": (len(text), zlib.crc32(text.encode()))}
    (iteration / "manifest.json").write_text(msgspec.structs.replace(manifest, small=small).to_text())


@functools.cache
def made(folder, case):
    """One of CASES, and its conversion, in folders of theirs."""
    model = theirs(folder / case / "hf", **CASES[case])
    words = ("--hf", str(folder / case / "hf"), "--save", str(folder / case / "in"))
    assert run_ranks(convert, 1, "import", *words) == [""]
    return model


def imported(tmp_path, case):
    """Their model, and the options of a run from its conversion; both folders are the test's own."""
    model = made(tmp_path.parent, case)
    for name in ("hf", "in"):
        shutil.copytree(tmp_path.parent / case / name, tmp_path / name)
    options = tomllib.loads((tmp_path / "in/model.toml").read_text())
    return model, {**options, "run_dir": str(tmp_path / "run"), "seq_length": 128, "lr_warmup_iters": 1}


@pytest.mark.parametrize(
    "case", ["small", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "small")]
)
def test_in_trained_and_out_again(case, tmp_path):
    model, options = imported(tmp_path, case)
    layout = {**TP2, "pipeline_model_parallel_size": 2}
    run = {**options, **layout, "load": str(tmp_path / "in"), "finetune": True, "train_iters": 3}
    run_ranks(train_run, 4, run)
    out = tmp_path / "out"
    words = ("export", "--load", str(tmp_path / "run/checkpoints"), "--hf", str(out))
    assert run_ranks(convert, 1, *words) == [""]
    again = transformers.AutoModelForCausalLM.from_pretrained(out).float().eval()
    tokens = torch.randint(0, 500, (2, 128), generator=torch.Generator().manual_seed(1))
    (ours,) = run_ranks(logits_of, 1, options, tmp_path / "run/checkpoints", 3, tokens)
    with torch.no_grad():
        expected, before = again(tokens).logits, model(tokens).logits
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (expected - before).abs().max() > 0.01, "training has changed the weights"
    assert "tokens trained on | 1,536 |" in (out / "README.md").read_text()


@pytest.mark.parametrize("case", ["small", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_the_first_loss_is_theirs_from_either_kind_of_folder(case, tmp_path):
    """Converted or as it is, on one process and sharded."""
    model, options = imported(tmp_path, case)
    (one,) = run_ranks(first_batch, 1, {**options, "load": str(tmp_path / "in"), "finetune": True})
    direct = {**options, "load": str(tmp_path / "hf"), "run_dir": str(tmp_path / "direct")}
    (other,) = run_ranks(first_batch, 1, direct)
    with torch.no_grad():
        logits = model(one["tokens"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), one["labels"].flatten()).item()
    assert one["loss"] == other["loss"] == pytest.approx(expected, abs=1e-5)
    pretrained = {**direct, "load": str(tmp_path / "own/checkpoints"), "run_dir": str(tmp_path / "own")}
    (again,) = run_ranks(first_batch, 1, {**pretrained, "pretrained_checkpoint": str(tmp_path / "hf")})
    assert again["loss"] == one["loss"]
    sharded = {**direct, **TP2, "run_dir": str(tmp_path / "sharded")}
    assert run_ranks(first_batch, 4, sharded)[0]["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_plan_s_run_exports_its_plan(tmp_path):
    _, options = imported(tmp_path, "small")
    snip = {"precision": "snip", "snip_start": 1, "snip_interval": 5, "snip_apply_lag": 1, "snip_target": 0.5}
    run_ranks(train_run, 1, {**options, **snip, "load": str(tmp_path / "hf"), "train_iters": 3, "bf16": True})
    words = ("export", "--load", str(tmp_path / "run/checkpoints/iter_0000003"), "--hf", str(tmp_path / "out"))
    assert run_ranks(convert, 1, *words) == [""]
    plan = json.loads((tmp_path / "out/precision_plan.json").read_text())
    assert plan["achieved"] >= 0.5 and len(plan["linears"]) == 14
    card = (tmp_path / "out/README.md").read_text()
    assert "% of the linears' FLOPs in FP4" in card and "| compute | BF16 |" in card
    weights = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}, "what a --bf16 run computed with"


@pytest.mark.parametrize("case", ["small", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_their_folder_is_probed_as_the_converted_one(case, tmp_path):
    _, options = imported(tmp_path, case)
    run = [
        *"--seq-length 128 --global-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 500".split(),
        *"--lr 1e-3 --train-iters 1 --snip-probe-tokens 1".split(),
    ]
    for folder in ("hf", "in"):
        words = ["--load", str(tmp_path / folder), "--output", str(tmp_path / f"{folder}.json"), *run]
        run_ranks(collect, 1, *words)
    one, other = (json.loads((tmp_path / f"{folder}.json").read_text()) for folder in ("hf", "in"))
    assert one == other and len(one["linears"]) == 14


def test_a_dry_run_tells_and_writes_nothing(tmp_path):
    theirs(tmp_path / "hf", **CASES["small"])
    words = ("import", "--hf", str(tmp_path / "hf"), "--save", str(tmp_path / "in"), "--dry-run")
    (said,) = run_ranks(told, 1, *words)
    assert "model.layers.1.mlp.down_proj.weight" in said and "128x256" in said and "21 tensors, 0.00 GB" in said
    assert not (tmp_path / "in").exists()
    assert run_ranks(convert, 1, *words[:-1]) == [""]
    (said,) = run_ranks(told, 1, "export", "--load", str(tmp_path / "in"), "--hf", str(tmp_path / "out"), "--dry-run")
    assert "model.layers.1.mlp.down_proj.weight" in said and said.count(" model.safetensors\n") == 21
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures is ['MixtralForCausalLM'], but only Llama"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_size": None}, "hidden_size is None: expected int, got null; correct the file"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "config.json: factor of rope_type llama3 is missing"),
        ({"intermediate_size": 512}, "gate_proj.weight has shape [256, 128], but the model's is [512, 128]"),
    ],
)
def test_what_cannot_be_read_is_one_line(change, message, tmp_path):
    theirs(tmp_path / "hf", **CASES["small"])
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    if "intermediate_size" in change:
        options = {"num_query_groups": 2, "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 512,
                   "norm_epsilon": 1e-5, "vocab_size": 500, "make_vocab_size_divisible_by": 4,
                   "kv_channels": 32, "load": str(tmp_path / "hf"), "run_dir": str(tmp_path / "run")}  # fmt: skip
        with pytest.raises(AssertionError) as info:
            run_ranks(train_run, 1, options)
        assert message in str(info.value) and "UserError" in str(info.value)
        return
    (said,) = run_ranks(convert, 1, "import", "--hf", str(tmp_path / "hf"), "--save", str(tmp_path / "in"))
    assert message in said and not (tmp_path / "in").exists()


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_model_with_a_part_missing_is_not_imported(dry_run, tmp_path):
    theirs(tmp_path / "hf", **CASES["small"])
    sorted((tmp_path / "hf").glob("*.safetensors"))[-1].unlink()
    words = ("import", "--hf", str(tmp_path / "hf"), "--save", str(tmp_path / "in"), *dry_run)
    assert "its .safetensors have no model." in run_ranks(convert, 1, *words)[0] and not (tmp_path / "in").exists()


def test_a_model_that_nothing_can_load_is_told(tmp_path):
    """A checkpoint of it would not be one to continue from; tensors that the model does not have stay behind."""
    model = theirs(tmp_path / "hf", **CASES["small"])
    weights = {**model.state_dict(), "model.layers.2.mlp.up_proj.weight": torch.zeros(256, 128)}
    model.save_pretrained(tmp_path / "more", state_dict=weights)
    words = ("import", "--hf", str(tmp_path / "more"), "--save", str(tmp_path / "more_in"))
    ((refused, said),) = run_ranks(warned, 1, *words)
    assert refused == "" and "1 tensors do not belong to the model that its config.json describes, and were left out" in said
    assert "layers.2" not in run_ranks(told, 1, "export", "--load", str(tmp_path / "more_in"), "--hf", "x", "--dry-run")[0]
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    words = ("import", "--hf", str(tmp_path / "nan"), "--save", str(tmp_path / "nan_in"))
    (said,) = run_ranks(convert, 1, *words)
    assert said == f"{tmp_path}/nan: model.norm.weight is not finite; give another model"
    assert not (tmp_path / "nan_in").exists()


def test_every_process_refuses_a_weight_that_one_finds_not_finite(tmp_path):
    """Each reads its own part alone, and the part of the second has it."""
    model = theirs(tmp_path / "hf", **CASES["small"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[255, 3] = float("inf")
    model.save_pretrained(tmp_path / "inf")
    options = {
        **model_options(tmp_path / "inf"), **TP2, "load": str(tmp_path / "inf"), "run_dir": str(tmp_path / "run"),
        "seq_length": 128, "lr_warmup_iters": 1, "make_vocab_size_divisible_by": 4,
    }  # fmt: skip
    said = f"{tmp_path}/inf: model.layers.1.mlp.up_proj.weight is not finite; give another model"
    assert run_ranks(refused, 2, options) == [said, said]


def test_a_strangers_checkpoint_names_no_file_that_an_export_publishes(tmp_path):
    """Its state.json says where the tokenizer is, and a checksum in its manifest is its maker's."""
    imported(tmp_path, "small")
    (tmp_path / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nsecret\n")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/tokenizer.json").write_text('{"token": "secret"}')
    for number, (kind, path) in enumerate(
        [("Llama2Tokenizer", "id_rsa"), ("HuggingFaceTokenizer", "id_rsa"), ("HuggingFaceTokenizer", "keys")]
    ):
        forge(tmp_path / "in", tokenizer_type=kind, tokenizer_model=str(tmp_path / path))
        out = tmp_path / f"out{number}"
        ((problem, said),) = run_ranks(warned, 1, "export", "--load", str(tmp_path / "in"), "--hf", str(out))
        assert problem == "" and f"wrote no tokenizer, and config.json has no EOS: --tokenizer-model {tmp_path}" in said
        assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
        assert not any(b"secret" in path.read_bytes() for path in out.iterdir())
    forge(tmp_path / "in", tokenizer_type="NullTokenizer", tokenizer_model=str(tmp_path / "id_rsa"))
    out = tmp_path / "out of none"
    ((problem, said),) = run_ranks(warned, 1, "export", "--load", str(tmp_path / "in"), "--hf", str(out))
    assert problem == "" and "tokenizer" not in said, "it reads no file"
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    files = tokenizer_files(tmp_path)
    forge(tmp_path / "in", tokenizer_type="Llama2Tokenizer", tokenizer_model=str(files["SentencePieceTokenizer"]))
    (said,) = run_ranks(told, 1, "export", "--load", str(tmp_path / "in"), "--hf", str(tmp_path / "out"))
    assert f"copied the tokenizer from {files['SentencePieceTokenizer']}, as the checkpoint says" in said
    assert (tmp_path / "out/tokenizer.model").read_bytes() == files["SentencePieceTokenizer"].read_bytes()


def test_import_follows_no_link_out_of_the_folder(tmp_path):
    theirs(tmp_path / "hf", **CASES["small"])
    (tmp_path / "secret").write_text('{"token": "secret"}')
    (tmp_path / "hf/tokenizer.json").symlink_to("../secret")
    (said,) = run_ranks(convert, 1, "import", "--hf", str(tmp_path / "hf"), "--save", str(tmp_path / "in"))
    assert f"{tmp_path}/hf/tokenizer.json is a link out of its folder, to {tmp_path}/secret; put a copy" in said
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize("name", ["ck\N{ROCKET}", 'a "b" \\ \t\x7f\x01\u00e9'])
def test_a_folder_of_any_name_has_options_that_can_be_read(name, tmp_path):
    theirs(tmp_path / "hf", **CASES["small"])
    files = tokenizer_files(tmp_path)
    for path in files["HuggingFaceTokenizer"].iterdir():
        path.rename(tmp_path / "hf" / path.name)
    save = tmp_path / name
    assert run_ranks(convert, 1, "import", "--hf", str(tmp_path / "hf"), "--save", str(save)) == [""]
    assert tomllib.loads((save / "model.toml").read_text("utf-8"))["tokenizer_model"] == str(save)
    options = {"seq_length": 128, "mock_data": True, "run_dir": str(tmp_path / "run"), "train_iters": 1, "lr_warmup_iters": 0}
    run_ranks(train_run, 1, {**tomllib.loads((save / "model.toml").read_text("utf-8")), **options, "load": str(save), "finetune": True})


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_an_exported_tokenizer_makes_the_runs_tokens_and_ends_where_they_end(kind, tmp_path):
    """Without an entry of its own, config.json would mean the tokens 1 and 2 by BOS and EOS."""
    path = tokenizer_files(tmp_path)[kind]
    options = {
        "num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
        "train_iters": 1, "lr_warmup_iters": 0, "mock_data": True, "tokenizer_type": kind, "tokenizer_model": str(path),
        "vocab_size": None, "run_dir": str(tmp_path / "run"),
    }  # fmt: skip
    run_ranks(train_run, 1, options)
    out = tmp_path / "out"
    words = ("export", "--load", str(tmp_path / "run/checkpoints"), "--hf", str(out))
    assert run_ranks(convert, 1, *words) == [""]
    ours, theirs = build_tokenizer(kind, str(path)), transformers.AutoTokenizer.from_pretrained(out)
    for text in ("def add(a, b):", "  return", "\n\tx = 12"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text), text
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    for where in (model.config, model.generation_config, theirs):
        assert where.eos_token_id == ours.eod != 1
    assert model.config.bos_token_id == model.generation_config.bos_token_id == ours.bos
    assert (out / "model.safetensors").stat().st_mode & 0o777 == out.stat().st_mode & 0o666


def test_a_card_tells_of_no_training_that_was_not(tmp_path):
    imported(tmp_path, "small")
    words = ("export", "--load", str(tmp_path / "in"), "--hf", str(tmp_path / "out"))
    assert run_ranks(convert, 1, *words) == [""]
    card = (tmp_path / "out/README.md").read_text()
    assert "# LlamaForCausalLM converted by megatron_snip" in card and "| heads, key/value heads | 4, 2 |" in card
    assert "learning rate" not in card and "tokens trained on" not in card
    (said,) = run_ranks(convert, 1, *words[:-1], ".")
    assert said == "--hf . does not end in a name; give a new folder"


def test_a_damaged_checkpoint_is_named(tmp_path):
    """By every tool that reads its tensors, as none takes an earlier one instead."""
    imported(tmp_path, "small")
    path = tmp_path / "in/iter_0000000/__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    (said,) = run_ranks(convert, 1, "export", "--load", str(tmp_path / "in"), "--hf", str(tmp_path / "out"))
    assert said.startswith(f"{tmp_path}/in/iter_0000000: __0_0.distcp") and said.endswith("; load another iteration")
    run = "--seq-length 128 --global-batch-size 1 --mock-data --tokenizer-type NullTokenizer --train-iters 1"
    words = ["--load", str(tmp_path / "in"), "--output", str(tmp_path / "x.json"), "--snip-probe-tokens", "1", *run.split()]
    with pytest.raises(AssertionError, match="UserError: .*in/iter_0000000: __0_0.distcp .*; load another iteration"):
        run_ranks(collect, 1, *words)


def test_weights_alone_are_no_run_to_go_on_with(tmp_path):
    _, options = imported(tmp_path, "small")
    for more, message in (
        ({"load": str(tmp_path / "in")}, "holds only weights; give --finetune"),
        ({"load": str(tmp_path / "hf"), "rotary_base": 5.0}, "--rotary-base comes to 5.0, but the model in"),
        ({"load": str(tmp_path / "hf"), "ckpt_step": 3}, "has no iterations; drop --ckpt-step"),
    ):
        with pytest.raises(AssertionError) as info:
            run_ranks(train_run, 1, {**options, **more})
        assert message in str(info.value)
    full = tmp_path / "in"
    assert "is not empty" in run_ranks(convert, 1, "import", "--hf", str(tmp_path / "hf"), "--save", str(full))[0]
