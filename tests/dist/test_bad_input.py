"""Bad input: exit status 2, one line that names the thing and the way out, and nothing made, changed or overwritten."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDatasetBuilder
from megatron_snip.model.llama import LLAMA
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.setup import check
from tests.dist.helpers.faults import PROGRAM, program
from tests.dist.helpers.harness import CONTEXT
from tests.unit.snip.plan.plan_edits import edits, wrong_linears

MODEL = {
    "num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2, "seq_length": 128,
    "vocab_size": 64, "global_batch_size": 2, "train_iters": 2, "distributed_timeout_minutes": 2,
}  # fmt: skip


def words(options: dict[str, Any]) -> list[str]:
    """Options as words; a boolean is a switch that is on."""
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]


def start(options: dict[str, Any], output: Path) -> tuple[int | None, str]:
    """Run the program in a process of its own: its exit status and what it wrote to stderr.

    The process is forked from one that has torch loaded; the first and last test below start Python itself.
    """
    output.mkdir(exist_ok=True)
    process = CONTEXT.Process(target=program, args=(words({**MODEL, **options}), str(output)))
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, (output / "err").read_text()


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def the_error(status: int | None, err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("error")]
    assert status == 2 and len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prefix of a good pair of files."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for i in range(40):
            builder.add_document(np.arange(50) % 60 + i % 4)
    return prefix


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run folder after a run that went well."""
    folder = tmp_path_factory.mktemp("trained")
    status, err = start({"train_data_path": data, "run_dir": folder / "run"}, folder / "output")
    assert status == 0 and "error" not in err, err
    assert (folder / "run/checkpoints/iter_0000002").is_dir(), "the cases below are one step from what works"
    return folder / "run"


@pytest.fixture
def inputs(data, trained, tmp_path):
    """A folder of everything that the cases below name."""
    here = tmp_path / "inputs"
    here.mkdir()
    for name in ("good", "no_idx", "short_idx", "short_bin", "foreign_idx"):
        for suffix in (".bin", ".idx"):
            (here / name).with_suffix(suffix).write_bytes(data.with_suffix(suffix).read_bytes())
    (here / "no_idx.idx").unlink()
    for path in (here / "short_idx.idx", here / "short_bin.bin"):
        path.write_bytes(path.read_bytes()[:-10])
    (here / "foreign_idx.idx").write_bytes(b"PK\x03\x04" * 30)
    for name in ("recorded", "unrecorded"):
        with IndexedDatasetBuilder(here / name, np.uint16) as builder:
            for _ in range(40):
                builder.add_document([*range(48), 64, 1])
    (here / "unrecorded.ids.json").unlink()
    Plan.uniform(LLAMA.linear_names(2), "fp4").save(here / "deeper.json")
    Plan.uniform(LLAMA.linear_names(1), "fp4").save(here / "good.json")
    plan = json.loads((here / "good.json").read_text())
    (here / "damaged.json").write_text(json.dumps({**plan, "achieved": "much"}))
    (here / "fp5.json").write_text(json.dumps(plan).replace('"wgrad": "fp4"', '"wgrad": "fp5"', 1))
    (here / "no_target.json").write_text(json.dumps({name: v for name, v in plan.items() if name != "target"}))
    Plan.uniform(LLAMA.linear_names(1)[1:], "fp4").save(here / "one_less.json")
    (here / "edited.json").write_text(json.dumps(plan).replace('"fprop": "fp4"', '"fprop": "fp8"', 1))
    vocabulary = {"</s>": 0} | {f"w{i}": i for i in range(1, 100)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "</s>"}}
    (here / "tokenizer.json").write_text(json.dumps({**tokenizer, "added_tokens": []}))
    (here / "options.toml").write_text("num_layers = 1\nglobl_batch_size = 2\n")
    os.mkfifo(here / "pipe")
    (here / "used").mkdir()
    (here / "used/metrics.jsonl").write_text('{"iteration": 1}\n')
    (here / "trained").symlink_to(trained)
    return here


MOCK = {"mock_data": True}
HF = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "@tokenizer.json"}
SAVES = "@trained/checkpoints"
#: name -> (options, what the line must say); @ stands for the folder of inputs.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no data": ({}, ["no data: give --data-path, --train-data-path or --mock-data"]),
    "missing data": ({"train_data_path": "@none"}, ["dataset @none has no file @none.idx", "check the prefix"]),
    "missing .idx": ({"train_data_path": "@no_idx"}, ["dataset @no_idx has no file @no_idx.idx", "check the prefix"]),
    "truncated .idx": ({"train_data_path": "@short_idx"}, ["@short_idx.idx is truncated: ", "make it again"]),
    "truncated .bin": ({"train_data_path": "@short_bin"}, ["@short_bin.bin has 3990 bytes, shorter than the 4000"]),
    "foreign .idx": ({"train_data_path": "@foreign_idx"}, ["@foreign_idx.idx starts with", "no Megatron .idx"]),
    "missing validation .idx": (
        {"train_data_path": "@good", "valid_data_path": "@no_idx", "eval_interval": 1}, ["@no_idx.idx"],
    ),
    "too little data": ({"train_data_path": "@good", "seq_length": 2048}, ["@good has 2000 tokens", "add data"]),
    "big tokenizer": ({**MOCK, **HF}, ["the tokenizer has 100 tokens, but --vocab-size is 64", "raise it or drop it"]),
    "missing tokenizer": ({**MOCK, **HF, "tokenizer_model": "@none"}, ["--tokenizer-model @none does not exist"]),
    "world size": (
        {**MOCK, "tensor_model_parallel_size": 2},
        ["world size 1 is not a multiple of tensor x pipeline parallel = 2 x 1", "start 2 processes"],
    ),
    "another model's plan": (
        {**MOCK, "precision": "plan", "precision_plan": "@deeper.json"},
        ["@deeper.json: field linears: plan of iteration 0 names no such linear: layers.1.", "; give a plan of this"],
    ),
    "plan that leaves out a linear": (
        {**MOCK, "precision": "plan", "precision_plan": "@one_less.json"},
        ["@one_less.json: field linears: plan of iteration 0 leaves out linears: layers.0.self_attn.q_proj; give"],
    ),
    "plan with an unknown format": (
        {**MOCK, "precision": "plan", "precision_plan": "@fp5.json"},
        ["@fp5.json: field linears['layers.0.self_attn.q_proj']: wgrad: unknown format 'fp5'; known: ", "a new plan"],
    ),
    "plan without a field": (
        {**MOCK, "precision": "plan", "precision_plan": "@no_target.json"},
        ["@no_target.json: field target is missing", "make a new plan"],
    ),
    "damaged plan": (
        {**MOCK, "precision": "plan", "precision_plan": "@damaged.json"},
        ["@damaged.json: field achieved is 'much': expected float, got str", "make a new plan"],
    ),
    "edited plan": ({**MOCK, "precision": "plan", "precision_plan": "@edited.json"}, ["@edited.json: field hash is"]),
    "missing plan": ({**MOCK, "precision": "plan", "precision_plan": "@none"}, ["@none: cannot read the plan"]),
    "plan without file": ({**MOCK, "precision": "plan"}, ["--precision plan needs a plan; give --precision-plan FILE"]),
    "plan that is a pipe": (
        {**MOCK, "precision": "plan", "precision_plan": "@pipe"},
        ["@pipe: cannot read the plan (it is a pipe, not a file); use a plan that a run"],
    ),
    "unknown format": ({**MOCK, "precision": "fp5"}, ["--precision fp5 is unknown; known: ", "fp4", "snip"]),
    "unknown objective": (
        {**MOCK, "precision": "snip", "snip_objective": "luck"}, ["unknown objective 'luck'; known: snip"],
    ),
    "unknown implementation": ({**MOCK, "linear_impl": "gpu"}, ["--linear-impl gpu is unknown; known: auto, emulated"]),
    "unreachable target": (
        {**MOCK, "precision": "snip", "snip_options": "fp8"}, ["--snip-target 0.75 is more than", "add an option"],
    ),
    "unknown option in the file": (
        {**MOCK, "config": "@options.toml"},
        ["unknown option globl_batch_size in @options.toml; did you mean global_batch_size?"],
    ),
    "missing file of options": ({**MOCK, "config": "@none"}, ["--config @none: no such file"]),
    "wrong type": ({**MOCK, "hidden_size": "wide"}, ["--hidden-size", "'wide'", "--help"]),
    "checkpoint of another shape": (
        {**MOCK, "load": SAVES, "run_dir": "@trained", "train_iters": 4, "ffn_hidden_size": 256},
        [f"--ffn-hidden-size is 256, but the checkpoint in {SAVES} was trained with 128; give --ffn-hidden-size 128"],
    ),
    "checkpoint of another vocabulary": (
        {**MOCK, "load": SAVES, "run_dir": "@trained", "train_iters": 4, "vocab_size": 200},
        ["iter_0000002: model.embed_tokens.weight has shape [128, 128], but the model's is [256, 128]",
         "match the model options to its state.json"],
    ),
    "checkpoint of a shallower model": (
        {**MOCK, "load": SAVES, "finetune": True, "num_layers": 2},
        [f"--num-layers is 2, but the checkpoint in {SAVES} was trained with 1; give --num-layers 1"],
    ),
    "missing checkpoint": (
        {**MOCK, "load": "@none", "exit_on_missing_checkpoint": True}, ["--load @none: no checkpoint is there"],
    ),
    "used run folder": ({**MOCK, "run_dir": "@trained"}, [f"{SAVES} already holds checkpoints up to iteration 2"]),
    "used folder of checkpoints": ({**MOCK, "save": SAVES}, [f"{SAVES} already holds checkpoints"]),
    "run folder with metrics alone": ({**MOCK, "run_dir": "@used"}, ["--run-dir @used already holds a run; --load"]),
    "empty run folder": ({**MOCK, "run_dir": ""}, ["--run-dir is empty; give it a value, or leave it out"]),
    "run folder below a file": (
        {**MOCK, "run_dir": "@good.json/run"}, ["--run-dir @good.json/run lies below @good.json, which is not a folder; give"],
    ),
    "checkpoints below a file": (
        {**MOCK, "save": "@good.json/a/b"}, ["--save @good.json/a/b lies below @good.json, which is not a folder; give"],
    ),
    "a name that is too long": ({**MOCK, "run_dir": "@" + "n" * 300}, ["@nnn", ": File name too long; give a shorter path"]),
    "a time-out that no clock holds": (
        {**MOCK, "distributed_timeout_minutes": 1e300}, ["--distributed-timeout-minutes is 1e+300; give a number above 0"],
    ),
    "a recorded id outside the vocabulary": (
        {"train_data_path": "@recorded"}, ["dataset @recorded holds token id 64, outside the vocabulary of 64; give"],
    ),
    "an id outside the vocabulary without a record": (
        {"train_data_path": "@unrecorded"}, ["sequence ", "of dataset @unrecorded holds token id 64, outside the"],
    ),
    "another run's folder": ({**MOCK, "run_dir": "@trained", "load": SAVES, "finetune": True}, ["already holds"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_touched(case, inputs, trained, tmp_path):
    options, said = CASES[case]
    place = lambda text: text.replace("@", f"{inputs}/")  # noqa: E731
    options = {name: place(value) if isinstance(value, str) else value for name, value in options.items()}
    before = contents(tmp_path), contents(trained)
    line = the_error(*start({"run_dir": tmp_path / "run", **options}, tmp_path / "output"))
    assert line.startswith("error: ") and [part for part in map(place, said) if part not in line] == [], line
    for name in ("out", "err"):
        (tmp_path / "output" / name).unlink()
    (tmp_path / "output").rmdir()
    assert (contents(tmp_path), contents(trained)) == before


PLAN = Plan.uniform(LLAMA.linear_names(1), "fp4")
PLAN_EDITS = {name: (values, said) for kind in (edits, wrong_linears) for name, values, said in kind(PLAN)}
PLAN_EDITS["another share"] = {**PLAN.to_dict(), "achieved": 0.75}, "field achieved is 0.75, but in a model of these"


@pytest.mark.parametrize("edit", PLAN_EDITS)
def test_a_plan_edited_by_hand_is_found_before_processes_meet(edit, tmp_path):
    """`check` as `train` calls it first, for each edit; what the program makes of its error is tested above."""
    values, said = PLAN_EDITS[edit]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    options = {"precision": "plan", "precision_plan": str(path), "run_dir": str(tmp_path / "run")}
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: field .+; .+$") as caught:
        check(Config().replace(**MODEL, **MOCK, **options), 1)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert list(contents(tmp_path)) == ["plan.json"]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def test_the_program_itself_leaves_with_2(tmp_path):
    got = subprocess.run(
        [sys.executable, PROGRAM, "--tensor-model-paralel-size", "2"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert the_error(got.returncode, got.stderr) == (
        "error: unknown option --tensor-model-paralel-size; did you mean --tensor-model-parallel-size?"
    )
    assert got.stdout == "" and contents(tmp_path) == {}


def test_under_torchrun_one_rank_speaks(inputs, tmp_path):
    """Both ranks find the error, after they have met."""
    before = contents(tmp_path)
    options = {**MODEL, "train_data_path": inputs / "no_idx", "run_dir": tmp_path / "run"}
    command = ["-m", "torch.distributed.run", "--rdzv-backend=one_node", "--nproc_per_node=2", PROGRAM, *words(options)]
    got = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    lines = [line for line in got.stderr.splitlines() if line.startswith("error")]
    assert got.returncode != 0 and len(lines) == 1, got.stderr
    assert lines[0] == f"error: dataset {inputs}/no_idx has no file {inputs}/no_idx.idx; check the prefix"
    assert contents(tmp_path) == before
