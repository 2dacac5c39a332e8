"""The own options of commands that import torch, apart from them: help waits for nothing slow.

A command's description is the docstring of its module.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_snip.cli.command import Parser
from megatron_snip.files.io import path_word

#: Presets of --tasks: name -> tasks.  zero-shot: the benchmarks of TinyLlama's model card, on whose checkpoints SNIP's
#: authors train (https://huggingface.co/TinyLlama/TinyLlama-1.1B-intermediate-step-1195k-token-2.5T).
PRESETS = {"zero-shot": ("hellaswag", "openbookqa", "winogrande", "arc_challenge", "arc_easy", "boolq", "piqa")}
#: Shares of FP4 that `analyse` plans.
SHARES = "0.5,0.75,0.9"


def _about(module: str) -> str | None:
    """The docstring of a module of this folder, which is not imported."""
    return ast.get_docstring(ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")))


def probe() -> Parser:
    """Options of `megatron-snip probe`."""
    parser = Parser(_about("collect_stats"))
    parser.add_argument(
        "--output", type=path_word, default="stats.json", help="file of the statistics (default: stats.json)"
    )
    return parser


def plan() -> Parser:
    """Options of `megatron-snip plan`."""
    parser = Parser(_about("generate_plan"))
    parser.add_argument(
        "--stats", required=True, type=path_word, help="statistics of `megatron-snip probe` or of a run"
    )
    parser.add_argument("--try", dest="trying", action="store_true", help="run a trial with the weights of --load")
    parser.add_argument("--num-random", type=int, default=5, help="number of random plans (default: 5)")
    parser.add_argument("--random-seed", type=int, default=0, help="seed of the first random plan (default: 0)")
    parser.add_argument("--output-dir", type=path_word, default="plans", help="output folder (default: plans)")
    return parser


def show() -> Parser:
    """Options of `megatron-snip show`."""
    parser = Parser(_about("show_plan"))
    parser.add_argument("plan", type=path_word, help="plan file, such as RUN_DIR/plans/iter_0000100.json")
    parser.add_argument("--against", type=path_word, help="another plan to compare with")
    return parser


def analyse() -> Parser:
    """Options of `megatron-snip analyse`."""
    parser = Parser(_about("analyse"))
    parser.add_argument("model", type=path_word, help="a Hugging Face folder, or a folder of checkpoints")
    parser.add_argument(
        "--data", required=True, type=path_word, help="text, JSON lines, or an indexed dataset's prefix"
    )
    parser.add_argument("--output", default="analysis", type=path_word, help="output folder (default: analysis)")
    parser.add_argument("--formats", default="fp8,fp4", help="formats that a linear may take (default: fp8,fp4)")
    parser.add_argument("--shares", help=f"FP4's shares of the FLOPs (default: {SHARES})")
    parser.add_argument("--batches", type=int, default=8, help="batches, each probed separately (default: 8)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a batch (default: 4)")
    parser.add_argument("--seq-length", type=int, default=1024, help="tokens in a sequence (default: 1024)")
    return parser


def export() -> Parser:
    """Options of `megatron-snip export`."""
    parser = Parser(_about("export_plan"))
    parser.add_argument("plan", type=path_word, help="plan file, such as RUN_DIR/plans/iter_0000100.json")
    parser.add_argument(
        "--to",
        choices=("megatron", "torchtitan", "transformer-engine", "modelopt", "torchao"),
        required=True,
        help="the program that will read it",
    )
    parser.add_argument("--output", type=path_word, required=True, help="output folder")
    parser.add_argument("--for-version", metavar="X.Y", help="version of that program")
    parser.add_argument(
        "--own-casts",
        action="store_true",
        help="keep formats that Transformer Engine lacks, such as fp4; megatron_snip, installed there, emulates them",
    )
    return parser


def convert() -> Parser:
    """Options of `megatron-snip convert`."""
    parser = Parser(_about("convert_checkpoint"))
    which = parser.add_subparsers(dest="which", required=True)
    into = which.add_parser("import", help="Hugging Face to a checkpoint")
    into.add_argument("--hf", type=path_word, required=True, help="folder with config.json and safetensors files")
    into.add_argument("--save", type=path_word, required=True, help="new folder for the checkpoint")
    out = which.add_parser("export", help="a checkpoint to Hugging Face")
    out.add_argument("--load", type=path_word, required=True, help="a folder of checkpoints, or an iter_ folder")
    out.add_argument("--ckpt-step", type=int, help="iteration to export (default: the newest)")
    out.add_argument("--hf", type=path_word, required=True, help="new folder for the model")
    out.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the weights (default: bfloat16 after --bf16, else float32)"
    )
    for one in (into, out):
        one.add_argument("--dry-run", action="store_true", help="print what would be written, but write nothing")
    return parser


def evaluate() -> Parser:
    """Options of `megatron-snip evaluate`."""
    parser = Parser(_about("evaluate"))
    parser.add_argument("model", type=path_word, help="a folder of checkpoints, one of them, or a Hugging Face folder")
    parser.add_argument(
        "--tasks", required=True, help=f"comma-separated tasks of lm-eval; also {', '.join(PRESETS)}, and YAML files"
    )
    parser.add_argument("--plan", type=path_word, help="quantise the forward: a plan FILE, or own")
    parser.add_argument("--include-path", type=path_word, help="folder with your own tasks")
    parser.add_argument("--num-fewshot", type=int, help="examples before each question (default: the task's)")
    parser.add_argument("--limit", type=int, help="questions per task, for a quick test (default: all)")
    parser.add_argument("--batch-size", type=int, default=8, help="requests that run at once (default: 8)")
    parser.add_argument("--max-length", type=int, help="context length in tokens (default: the model's)")
    parser.add_argument(
        "--add-bos", action=argparse.BooleanOptionalAction,
        help="begin texts with the tokenizer's BOS (default: as the tokenizer of a Hugging Face folder does; not for a "
        "run's checkpoint, whose training does not)",
    )  # fmt: skip
    parser.add_argument(
        "--bootstrap", type=int, default=1000, help="bootstrap samples for a standard error (default: 1000)"
    )
    parser.add_argument(
        "--output", type=path_word, help="file of scores (default: in the run folder, or evaluation.json)"
    )
    return parser


def report() -> Parser:
    """Options of `megatron-snip report`."""
    parser = Parser(_about("report"))
    parser.add_argument("runs", nargs="+", metavar="RUN", type=path_word, help="a run folder (--run-dir)")
    parser.add_argument("--compare", action="store_true", help="one report that compares the first run with the others")
    parser.add_argument("--output", type=path_word, metavar="FILE", help="file of the report")
    return parser


def profile() -> Parser:
    """Options of `megatron-snip profile`."""
    parser = Parser(_about("profile_gemms"))
    parser.add_argument("--output", required=True, type=path_word, help="the table, for --gemm-times")
    parser.add_argument(
        "--formats", default="fp8,fp4", help="comma-separated (default: fp8,fp4); bf16 is always measured"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each GEMM (default: 9)")
    parser.add_argument("--warmup", type=int, default=3, help="runs before them (default: 3)")
    return parser


#: Command -> its options, for help.
PARSERS: Mapping[str, Callable[[], Parser]] = {
    one.__name__: one for one in (probe, plan, show, analyse, export, convert, evaluate, report, profile)
}
