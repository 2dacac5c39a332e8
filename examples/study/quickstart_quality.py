"""Whether the quickstart's model learns as well under SNIP as in BF16.

    python -m examples.study.quickstart_quality [--seeds 1,2,3] [--output runs/quality]

The quickstart's own options in one process, in BF16 and under SNIP, for three seeds; half an hour on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from megatron_snip.arguments import parse
from megatron_snip.train.loop import train
from megatron_snip.train.run.metrics import read_metrics

CONFIG = Path(__file__).parents[2] / "examples/quickstart.toml"


def make_data(folder: Path) -> Path:
    """Text, tokenizer and tokens as examples/quickstart.sh makes them."""
    from megatron_snip.cli import gather_text, preprocess_data, train_tokenizer

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


def main(words: list[str] | None = None) -> None:
    """Print each run's validation losses, and the mean of SNIP less BF16 at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3", help="by comma")
    parser.add_argument("--output", type=Path, default=Path("runs/quality"), help="new folder for data and runs")
    args = parser.parse_args(words)
    data = make_data(args.output / "data")
    ends: dict[str, list[float]] = {"bf16": [], "snip": []}
    for seed in map(int, args.seeds.split(",")):
        for precision, values in ends.items():
            losses = validation_losses(data, args.output / f"{precision}-{seed}", precision, seed)
            values.append(losses[-1])
            print(f"seed {seed}, {precision}: validation loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
    differences = np.subtract(ends["snip"], ends["bf16"])
    print(f"SNIP - BF16 at the end: {differences.round(4)}, mean {differences.mean():.4f} nats")


if __name__ == "__main__":
    main()
