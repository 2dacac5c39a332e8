"""tools/collect_stats.py: the statistics of the run's own probe, from a checkpoint that stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_snip import runtime
from megatron_snip.cli import collect_stats
from megatron_snip.cli.collect_stats import main, probe_config
from megatron_snip.config import Config
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.train.health import memory
from megatron_snip.train.validate import validate
from tests.unit.snip.made_up import assert_same
from tests.unit.train.conftest import TINY

TOOL = Path(__file__).resolve().parents[3] / "tools/collect_stats.py"


@pytest.fixture
def collect(finished_run, tmp_path, monkeypatch):
    """Call it with words of the command line: the statistics that it wrote."""
    monkeypatch.setattr(runtime, "stop", lambda: None)

    def call(*words: str, load: Path = finished_run / "checkpoints") -> Statistics:
        main(["--load", str(load), "--output", str(tmp_path / "new/stats.json"), *words])
        return Statistics.load(tmp_path / "new/stats.json")

    return call


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (os.stat(p).st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_it_is_what_the_run_itself_measured(collect, finished_run, capsys, tmp_path):
    """Bit for bit, by the run's own options: the next batch, its rounding, the optimiser's moments."""
    before = contents(finished_run)
    stats = collect(load=finished_run / "checkpoints/iter_0000002")
    assert_same(stats, Statistics.load(finished_run / "stats/iter_0000003.json"))
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path}/new/stats.json: 14 linears in fp4, fp8, before iteration 3, loss ")
    assert said.count("\n") == 1 and f"--load {finished_run}/checkpoints" in said
    assert contents(finished_run) == before and [p.name for p in (tmp_path / "new").iterdir()] == ["stats.json"]


def test_a_checkpoint_is_all_it_needs(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "stop", lambda: None)
    monkeypatch.chdir(tmp_path)
    main(["--load", str(finished_run / "checkpoints")])
    assert len(Statistics.load(tmp_path / "stats.json").names) == 14


def test_a_model_that_memory_cannot_hold_is_told_of(collect, monkeypatch, caplog):
    """Before it is built; a probe of the updates holds gradients and moments too."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    collect()
    (line,) = [line for line in caplog.messages if line.startswith("this machine cannot hold the run: weights, grad")]
    assert "need 0.0 GiB for 1 process, activations not counted, and 0.0 GiB are free" in line


def test_a_run_that_has_ended_is_probed_too(collect):
    """Its latest checkpoint, on the batch after its last; options of the command line win."""
    stats = collect("--snip-options", "fp8,mxfp4")
    assert stats.iteration == 5 and stats.formats == ["fp8", "mxfp4"]
    assert len(stats.names) == 14 and stats.not_finite == ()


def test_the_mean_over_several_batches(collect):
    """The first of them is that of a probe of one batch; all at the weights of the checkpoint."""
    several, one = collect("--snip-probe-tokens", "257"), collect()
    assert several.iteration == one.iteration == 5 and several.tokens == one.tokens == 2 * 128
    assert several.shapes == one.shapes and several.columns == one.columns and several.formats == ["fp4", "fp8"]
    assert several.loss != one.loss and (several.column("own/fp4") != one.column("own/fp4")).all()
    means = [not column.startswith(("spread/", "top_token/")) for column in one.columns]
    second = (2 * several.values - one.values)[:, means]
    assert (second >= -1e-9 * several.values[:, means]).all() and several.not_finite == ()
    assert several.column("norm/W") == pytest.approx(one.column("norm/W"), rel=1e-12)


def test_as_many_tokens_as_determine_the_plan_s_cost(collect, monkeypatch):
    """In batches of 256, here 512 at least."""
    monkeypatch.setattr(collect_stats, "LEAST_TOKENS", 512)
    asked = []
    monkeypatch.setattr(collect_stats, "suffices", lambda *of: asked.append(of) or len(asked) == 2)
    found = collect("--snip-probe-tokens", "auto")
    assert_same(found, collect("--snip-probe-tokens", "768"))
    assert [request.target for _, _, request in asked] == [0.75, 0.75], "that of the plans, not of the run that probes"


def test_a_run_in_samples_tells_its_iterations_by_them():
    """Whatever batch the options make of them: the saved --train-iters may be of another."""
    run = Config().replace(train_samples=40, train_iters=20, global_batch_size=4)
    assert probe_config(run, 3, 1).with_iterations().training.train_iters == 10


def test_a_run_under_a_memory_plan():
    """A probe keeps everything, so options that belong to plans go with the plan."""
    run = Config().replace(**TINY, memory_plan="auto", memory_gib=20.0, host_memory_gib=4.0, host_bandwidth=400.0)
    validate(probe_config(run, 3, 1), 1)


def test_other_data_replaces_the_runs(collect):
    with pytest.raises(ValueError, match=r"dataset nowhere has no file nowhere\.idx"):
        collect("--data-path", "nowhere")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objectives", "snip"], "unknown option --objectives"),
        (["--snip-probe-tokens", "0"], "--snip-probe-tokens is 0"),
        (["--snip-options", "fp8,fp3"], "--snip-options fp8,fp3: fprop: unknown format 'fp3'; known: bf16"),
        (["--hidden-size", "256"], "--hidden-size is 256, but the checkpoint in .* was trained with 128"),
        (["--seed", "5"], "--seed is 5, but the checkpoint"),
        (["--tensor-model-parallel-size", "2"], "world size 1 is not a multiple of tensor x pipeline parallel = 2 x 1"),
        (["--hiden-size", "2"], "unknown option --hiden-size; did you mean --hidden-size"),
    ],
)
def test_bad_options(words, said, collect, tmp_path):
    with pytest.raises(ValueError, match=said):
        collect(*words)
    assert not (tmp_path / "new/stats.json").exists()


def test_bad_places(collect, finished_run, tmp_path):
    with pytest.raises(ValueError, match=f"but {finished_run}/checkpoints does; give that folder"):
        collect(load=finished_run)
    with pytest.raises(ValueError, match=f"--load {tmp_path}: no checkpoint is there; give a folder of"):
        collect(load=tmp_path)
    with pytest.raises(ValueError, match="--load names no checkpoint"):
        main(["--output", str(tmp_path / "x")])
    with pytest.raises(ValueError, match="is a folder; give a file"):
        collect("--output", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); give another path"):
        collect("--output", str(tmp_path / "file/stats.json"))


def test_the_program_ends_with_one_line(tmp_path):
    words = [sys.executable, str(TOOL), "--load", str(tmp_path), "--output", str(tmp_path / "s.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=TOOL.parents[1])
    assert done.returncode == 2 and done.stderr.startswith(f"error: --load {tmp_path}: no checkpoint is there")
    assert done.stderr.count("\n") == 1 and done.stdout == ""
