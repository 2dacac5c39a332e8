r"""Tokenising a file: tools/preprocess_data.py beside Megatron-LM's script of that name.

    python benchmarks/preprocess.py --megatron Megatron-LM --input train.jsonl --workers 2 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --json preprocess.json

--megatron is a checkout of Megatron-LM.  Both commands run as a user starts them, in turns, with the same file,
tokenizer and number of workers, and must write the same .bin and .idx bytes.  Each is measured on the whole file and
on its first hundredth, which is start-up for the most part; the difference is the throughput without start-up.
CPU seconds are those of all its processes, which other work on the machine disturbs less than it does the wall clock.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import machine, report, save

ROOT = Path(__file__).resolve().parents[1]
#: Megatron-LM's package asks for Python 3.12; its script runs on 3.11, too, with this name added.
LAUNCH = """
import runpy, sys, typing, typing_extensions
typing.override = getattr(typing, "override", typing_extensions.override)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def commands(megatron: Path) -> dict[str, tuple[list[str], Path]]:
    """How each is started, and the folder of its packages."""
    theirs = [sys.executable, "-W", "ignore", "-c", LAUNCH, str(megatron / "tools/preprocess_data.py")]
    return {
        "Megatron-LM": (theirs, megatron),
        "megatron_snip": ([sys.executable, str(ROOT / "tools/preprocess_data.py")], ROOT),
    }


def measure(words: list[str], packages: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a command, its children included."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    begin = time.perf_counter()
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(words)} failed:\n{output.decode()}")
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime


def first_lines(source: Path, target: Path, share: float) -> int:
    """Copy the first lines of a file, about this share of it; returns their bytes."""
    with source.open("rb") as stream, target.open("wb") as out:
        wanted = source.stat().st_size * share
        while out.tell() < wanted:
            out.write(stream.readline())
        return out.tell()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokenizer-type", required=True)
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"whole": args.input.stat().st_size, "start": first_lines(args.input, folder / "start.jsonl", 0.01)}
        inputs = {"whole": args.input.absolute(), "start": folder / "start.jsonl"}
        for _ in range(args.repeats):
            for part, path in inputs.items():
                for who, (command, packages) in commands(args.megatron.absolute()).items():
                    words = [*command, "--input", str(path), "--output-prefix", str(folder / who), "--append-eod"]
                    words += ["--workers", str(args.workers), "--tokenizer-type", args.tokenizer_type]
                    words += ["--tokenizer-model", args.tokenizer_model]
                    taken.setdefault((who, part), []).append(measure(words, packages))
                for suffix in (".bin", ".idx"):
                    both = {(folder / f"{who}_text_document{suffix}").read_bytes() for who in commands(args.megatron)}
                    assert len(both) == 1, f"the two {suffix} files differ"
    results: dict[str, dict[str, float]] = {}
    for who in commands(args.megatron):
        wall, cpu = ({part: statistics.median(t[i] for t in taken[who, part]) for part in sizes} for i in (0, 1))
        work = sizes["whole"] - sizes["start"]
        results[who] = {
            "MB/s": sizes["whole"] / wall["whole"] / 1e6,
            "MB/s without start-up": work / (wall["whole"] - wall["start"]) / 1e6,
            "MB by CPU second": sizes["whole"] / cpu["whole"] / 1e6,
            "MB by CPU second without start-up": work / (cpu["whole"] - cpu["start"]) / 1e6,
        }
    peer, ours = results["Megatron-LM"], results["megatron_snip"]
    results["ratio"] = {name: ours[name] / peer[name] for name in ours}
    about = {
        **machine("cpu"),
        "packages": ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("sentencepiece", "tokenizers", "transformers")
        ),
        "size": f"{sizes['whole'] / 1e6:.1f} MB, {args.workers} workers, {args.tokenizer_type}",
    }
    rows = [[who, *(f"{value:.2f}" for value in found.values())] for who, found in results.items()]
    print(report("Tokenising", ["", *ours], rows, about))
    save(args.json, about, results)


if __name__ == "__main__":
    main()
