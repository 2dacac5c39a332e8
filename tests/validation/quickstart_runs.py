"""Runs of the quickstart's model in one process, for the tests of its quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_snip.config import parse
from megatron_snip.train.loop import train
from megatron_snip.train.metrics import read_metrics

CONFIG = Path(__file__).parents[2] / "examples/quickstart.toml"


def make_data(folder: Path) -> Path:
    """Text, tokenizer and tokens as examples/quickstart.sh makes them."""
    from tools import gather_text, preprocess_data, train_tokenizer

    text, model = folder / "text", folder / "tokenizer"
    gather_text.main(["--output", str(text), "--max-bytes", "16000000"])
    train = ["--input", str(text / "train.jsonl"), "--vocab-size", "4096", "--max-bytes", "8000000"]
    train_tokenizer.main([*train, "--output-prefix", str(model)])
    for part in ("train", "valid"):
        preprocess_data.main(
            ["--input", str(text / f"{part}.jsonl"), "--output-prefix", str(folder / part), "--append-eod",
             "--workers", "2", "--tokenizer-type", "SentencePieceTokenizer",
             "--tokenizer-model", f"{model}.model"]
        )  # fmt: skip
    return folder


def validation_losses(data: Path, run_dir: Path, precision: str, seed: int) -> list[float]:
    """Validation loss before training and at its end: the quickstart's own options, in one process."""
    lone = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--no-sequence-parallel"]
    paths = [
        "--train-data-path", str(data / "train_text_document"),
        "--valid-data-path", str(data / "valid_text_document"),
        "--tokenizer-model", str(data / "tokenizer.model"), "--run-dir", str(run_dir),
    ]  # fmt: skip
    chosen: list[Any] = ["--precision", precision, "--seed", seed, "--eval-interval", 100000, "--eval-iters", 16]
    words = ["--config", str(CONFIG), *lone, *paths, *map(str, chosen), "--save-interval", "100000"]
    train(parse(words))
    rows = read_metrics(run_dir / "metrics.jsonl")
    return [row["lm loss validation"] for row in rows if "lm loss validation" in row]
