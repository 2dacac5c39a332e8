"""examples/authors_workflow: all of its steps at toy size, and what is wrong with a folder told in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.authors_workflow import compare
from megatron_snip.cli import collect_stats
from megatron_snip.errors import UserError
from tests.test_examples import environment, program

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
num-layers = 2
hidden-size = 128
ffn-hidden-size = 256
num-attention-heads = 2
seq-length = 128
vocab-size = 512
micro-batch-size = 2
global-batch-size = 2
lr = 1e-2
lr-decay-iters = 6
tokenizer-type = "SentencePieceTokenizer"
eval-iters = 1
"""
SCHEMES = {"bf16", "fp8", "fp4", "best", "random_0", "layer_id", "layer_type", "abs_err", "rel_err"}


def run(folder: Path, stubs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.toml").write_text(CONFIG)
    sizes = {"BYTES": "2000000", "VOCAB": "512", "ITERS": "3", "MORE": "2", "RANDOM": "1", "DIR": str(folder / "w")}
    variables = {f"WORKFLOW_{name}": value for name, value in sizes.items()}
    env = environment(stubs, **variables, WORKFLOW_CONFIG=str(folder / "config.toml"), OMP_NUM_THREADS="1")
    script = str(ROOT / "examples/authors_workflow/run.sh")
    return subprocess.run(["bash", script, *words], env=env, cwd=folder, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_all_steps_at_toy_size(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "w/schemes.md").read_text().splitlines()[2:]]
    assert {row[0] for row in rows} == SCHEMES
    shares = {row[0]: float(row[1].rstrip("%")) for row in rows}
    assert shares["fp4"] == 100 and shares["fp8"] == 0
    assert all(shares[name] >= 75 for name in SCHEMES - {"bf16", "fp8", "fp4"})
    losses = [float(row[3]) for row in rows]
    assert losses == sorted(losses) and len(set(losses)) > 5
    iterations = [
        json.loads(line)["iteration"] for line in (tmp_path / "w/schemes/best/metrics.jsonl").read_text().splitlines()
    ]
    assert iterations[-1] == 5
    made = {path: os.stat(path).st_mtime_ns for path in (tmp_path / "w/tokens").iterdir()}
    again = run(tmp_path, tmp_path, "prepare")
    assert again.returncode == 0 and made == {path: os.stat(path).st_mtime_ns for path in made}


def test_statistics_newer_than_the_checkpoint_are_not_collected_again(tmp_path: Path) -> None:
    tracker = tmp_path / "w/bf16/checkpoints/latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    for path, when in ((tracker, 1000), (tmp_path / "w/stats.json", 2000)):
        path.write_text("3\n")
        os.utime(path, (when, when))
    done = run(tmp_path, tmp_path, "collect")
    assert done.returncode == 0 and (tmp_path / "w/stats.json").read_text() == "3\n"
    os.utime(tracker, (3000, 3000))
    program(tmp_path, "torchrun", "printf '%s\\n' \"$@\"\n")  # which prints its words
    words = run(tmp_path, tmp_path, "collect").stdout.splitlines()
    assert words[words.index("-m") : words.index("probe") + 1] == ["-m", "megatron_snip.cli", "probe"]
    with pytest.raises(UserError, match="iter_0000003"):  # there is no such checkpoint
        collect_stats.main(words[words.index("probe") + 1 :])


def test_a_step_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path, "eval")
    assert done.returncode == 1 and "no such step: eval; give prepare, train" in done.stderr


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """Call it with a folder that has no table; returns the one line that says so."""

    def refused(folder: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["compare.py", str(folder)])
        assert compare.main() == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        return said.err

    return refused


@pytest.mark.parametrize("content", ["{}", '{"plans": []}', '{"plans": {"best": 1}}', "{"])
def test_a_table_of_plans_that_is_none(content: str, tmp_path: Path, refused: Callable[[Path], str]) -> None:
    (tmp_path / "schemes/bf16").mkdir(parents=True)
    (tmp_path / "schemes/bf16/metrics.jsonl").write_text("")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans/pareto.json").write_text(content)
    said = refused(tmp_path)
    assert "plans/pareto.json: " in said and "run the step plans" in said


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({"bf16": 4, "best": 4}, ""),
        ({"bf16": 4, "best": 4, "random_0": 4}, "random_0 trained under plan old, and the plan of this name is new"),
        ({"bf16": 4, "best": 2}, "best ends at iteration 2, bf16 at 4; run the step schemes again"),
        ({"best": 4}, "has no run bf16 to compare with; run the step schemes first"),
        ({"bf16": None}, "bf16 has no validation loss"),
    ],
)
def test_the_table_is_made_of_runs_that_ended_alike(
    tmp_path: Path, ends: dict[str, int], said: str, refused: Callable[[Path], str]
) -> None:
    for name, end in ends.items():
        (tmp_path / "schemes" / name).mkdir(parents=True)
        rows = [{"iteration": 0, "lm loss": 5.0}]
        if end:
            loss = 3.5 if name == "best" else 3.25
            under = {} if name == "bf16" else {"snip/plan_hash": "old"}
            rows += [{"iteration": i, "lm loss validation": value, **under} for i, value in ((1, 9.0), (end, loss))]
        (tmp_path / "schemes" / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with (tmp_path / "schemes" / name / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 9, "lm lo')  # a kill cut it short
    (tmp_path / "plans").mkdir()
    plans = {"best": {"fp4_share": 0.751, "loss_divergence": 2e-3, "hash": "old"}, "random_0": {"hash": "new"}}
    (tmp_path / "plans/pareto.json").write_text(json.dumps({"plans": plans}))
    if said:
        assert said in refused(tmp_path)
    else:
        script = [sys.executable, str(ROOT / "examples/authors_workflow/compare.py"), str(tmp_path)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(script, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[2:] == [
            "| bf16 | 0.0% | - | 3.2500 | +0.0000 |",
            "| best | 75.1% | 2.00e-03 | 3.5000 | +0.2500 |",
        ]
