"""tools/collect_stats.py: the statistics of the run's own probe, from a checkpoint that stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_snip import runtime
from megatron_snip.snip.probes import PASSES
from megatron_snip.snip.stats import ProbeStats
from tests.unit.snip.made_up import linear_stats, probe_stats
from tools import collect_stats
from tools.collect_stats import main, mean_of, passes_of

TOOL = Path(collect_stats.__file__)


@pytest.fixture
def collect(finished_run, tmp_path, monkeypatch):
    """Call it with words of the command line: the statistics that it wrote."""
    monkeypatch.setattr(runtime, "stop", lambda: None)

    def call(*words: str, load: Path = finished_run / "checkpoints") -> ProbeStats:
        main(["--load", str(load), "--output", str(tmp_path / "new/stats.json"), *words])
        return ProbeStats.load(tmp_path / "new/stats.json")

    return call


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (os.stat(p).st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_it_is_what_the_run_itself_measured(collect, finished_run, capsys, tmp_path):
    """Bit for bit, by the run's own options: the next batch, its noise, the optimiser's moments."""
    before = contents(finished_run)
    stats = collect(load=finished_run / "checkpoints/iter_0000002")
    assert stats == ProbeStats.load(finished_run / "stats/iter_0000003.json")
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path}/new/stats.json: 14 linears in fp4, fp8, before iteration 3, loss ")
    assert said.count("\n") == 1 and f"--load {finished_run}/checkpoints" in said
    assert contents(finished_run) == before and [p.name for p in (tmp_path / "new").iterdir()] == ["stats.json"]


def test_a_checkpoint_is_all_it_needs(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "stop", lambda: None)
    monkeypatch.chdir(tmp_path)
    main(["--load", str(finished_run / "checkpoints")])
    assert len(ProbeStats.load(tmp_path / "stats.json").linears) == 14


def test_a_run_that_has_ended_is_probed_too(collect):
    """Its latest checkpoint, on the batch after its last; options of the command line win."""
    stats = collect("--snip-options", "fp8,mxfp4", "--objectives", "abs_err,rel_err")
    assert stats.iteration == 5 and stats.noise_sq == {}
    assert stats.linears["layers.0.mlp.up_proj"].token_square_sum.keys() == {"fp8", "mxfp4"}


def test_all_passes_over_several_batches(collect):
    several = collect("--objectives", "snip,paper,ggn", "--batches", "2")
    assert several.iteration == 5 and several.noise_sq.keys() == {"backward_noise", "forward_noise"}
    one = collect("--objectives", "snip,paper,ggn")
    name = "layers.1.self_attn.q_proj"
    assert several.loss != one.loss and several.linears[name].sampled_square_sum.keys() == {"fp4", "fp8"}
    assert several.linears[name].forward_update_sq > 0 and one.linears[name].forward_update_sq > 0


def test_other_data_replaces_the_runs(collect):
    with pytest.raises(ValueError, match=r"dataset nowhere has no file nowhere\.idx"):
        collect("--data-path", "nowhere")


def test_the_mean_over_batches():
    def made(value: float, **more) -> ProbeStats:
        return probe_stats(3, value, 8, {"a": linear_stats({"fp4": value}, value, {"fp4": 1.0}, **more)})

    mean = mean_of([made(1.0, noise_update_sq=None), made(4.0, noise_update_sq=None)])
    assert mean == made(2.5, noise_update_sq=None, error_sq=mean.linears["a"].error_sq)
    assert mean.linears["a"].error_sq["fp4/fprop/input"] == pytest.approx(2.5 + 1e-3)
    assert mean_of([made(1.0)]) == made(1.0)


def test_passes_follow_the_objectives():
    assert passes_of(["snip"], 1) == ({"backward_noise", "quantised_fprop"}, 1)
    assert passes_of(["snip_loss", "paper"], 5) == ({"backward_noise", "forward_noise"}, 5)
    assert passes_of(["snip", "paper", "ggn"], 1) == (set(PASSES), 3)
    assert passes_of(["rel_err"], 1) == (set(), 1)
    with pytest.raises(ValueError, match="--objectives random,layer_id need no statistics; those that do: snip,"):
        passes_of(["random", "layer_id"], 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objectives", "snap"], "unknown objective 'snap'; known: snip"),
        (["--batches", "0"], "--batches is 0; give 1 or more"),
        (["--snip-options", "fp8,fp3"], "unknown format 'fp3'; known: bf16"),
        (["--hidden-size", "256"], "--hidden-size is 256, the checkpoint in .* was trained with 128"),
        (["--seed", "5"], "--seed is 5, the checkpoint"),
        (["--tensor-model-parallel-size", "2"], "world size 1 is not a multiple of tensor x pipeline parallel = 2 x 1"),
        (["--hiden-size", "2"], "unknown option hiden_size in the command line; did you mean hidden_size"),
    ],
)
def test_bad_options(words, said, collect, tmp_path):
    with pytest.raises(ValueError, match=said):
        collect(*words)
    assert not (tmp_path / "new/stats.json").exists()


def test_bad_places(collect, finished_run, tmp_path):
    with pytest.raises(ValueError, match=f"--load {finished_run}: no checkpoint is there; give a folder of"):
        collect(load=finished_run)
    with pytest.raises(ValueError, match="--load names no checkpoint"):
        main(["--output", str(tmp_path / "x")])
    with pytest.raises(ValueError, match="is a folder; give a file"):
        collect("--output", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="its folder cannot be made .*; give another"):
        collect("--output", str(tmp_path / "file/stats.json"))


def test_the_program_ends_with_one_line(tmp_path):
    words = [sys.executable, str(TOOL), "--load", str(tmp_path), "--output", str(tmp_path / "s.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=TOOL.parents[1])
    assert done.returncode == 2 and done.stderr.startswith(f"error: --load {tmp_path}: no checkpoint is there")
    assert done.stderr.count("\n") == 1 and done.stdout == ""
