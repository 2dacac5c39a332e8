"""What a dry run counts and says; that it predicts a run is tested in tests/dist/test_dry_run.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_snip.config import Config
from megatron_snip.train.dry_run import command, measure
from megatron_snip.train.dry_run.counts import KINDS, Measured, Stretch, Tracker
from megatron_snip.train.dry_run.output import as_text, trial_passes

OPTIONS = {
    "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 512, "untie_embeddings_and_output_weights": True, "micro_batch_size": 2, "global_batch_size": 16,
    "train_iters": 20, "dry_run": True, "world_size": 4, "data_path": ("there/is/none",),
    "pipeline_model_parallel_size": 2,
}  # fmt: skip
MIB = 2**20


def made_up(rank: int, mib: int) -> Measured:
    counts = Counter({
        ("flops",): 10**12, ("gemm", 128, 256, 512, "fp4"): 3, ("launch", "mm"): 3, ("launch", "cast"): 2,
        ("count", "tp", "all-gather"): 5, ("bytes", "tp", "all-gather"): 2**30, ("read",): 1,
    })  # fmt: skip
    peak = {**dict.fromkeys(KINDS, 0), "parameters": mib * MIB // 4, "activations": mib * MIB * 3 // 4}
    return Measured(rank, rank // 2, 10**9, (Stretch("iteration, fp4", peak, counts, 3 * MIB),), 16 * 10**9)


@pytest.fixture
def peaks(monkeypatch):
    """Stands in for the processes of a dry run; peaks in MiB by what is tried, 1024 for what is not named."""
    known: dict[str, int] = {}

    def measure_all(config, world_size, ranks):
        p = config.parallel
        recompute = config.training.recompute_granularity
        tried = f"{recompute} {p.tensor_model_parallel_size} {p.pipeline_model_parallel_size}"
        if (strategy := p.data_parallel_sharding_strategy) != "optim":
            tried = strategy
        return [made_up(rank, known.get(tried, 1024) - rank) for rank in ranks]

    monkeypatch.setattr(measure, "measure_all", measure_all)
    return known


def test_storages_count_from_their_op_to_their_end() -> None:
    with Tracker(granule=512) as tracker:
        tracker.begin()
        x = torch.zeros(100, 10)  # 4000 bytes, 4096 of an allocator's
        y = x.view(10, 100)[2:]
        del x
        z = y + 1.0  # 3200, 3584
        del y
        w = torch.zeros(200)
    del z, w
    assert tracker.memory.peak()["activations"] == sum(tracker.memory.peak().values()) == 4096 + 3584


def test_a_storage_may_change_its_size_and_get_its_kind_later() -> None:
    with Tracker() as tracker:
        x = torch.zeros(1000, dtype=torch.uint8)
        tracker.begin()
        x.untyped_storage().resize_(0)
        y = torch.zeros(300, dtype=torch.uint8)
        x.untyped_storage().resize_(500)
        z = torch.zeros(400, dtype=torch.uint8)
        tracker.memory.mark([z], "gradients")
        peak = tracker.memory.peak()
    assert (peak["gathered"], peak["activations"], peak["gradients"]) == (500, 300, 400)
    assert torch.UntypedStorage.resize_ is tracker._resize and y.numel() == 300


def test_gemms_flops_and_launches() -> None:
    a, b = torch.ones(4, 8, requires_grad=True), torch.ones(16, 8)
    with Tracker() as tracker:
        (a @ b.T).sum().backward()
        assert float(a.detach()[0, 0]) == 1.0
    assert tracker.counts["gemm", 4, 16, 8, "fp32"] == tracker.counts["gemm", 4, 8, 16, "fp32"] == 1
    assert tracker.counts["flops",] == 2 * 2 * 4 * 16 * 8
    assert tracker.counts["read",] == 1 and tracker.counts["launch", "mm"] == 2
    assert not {"t", "view", "detach", "_local_scalar_dense"} & {what[1] for what in tracker.counts if what[1:]}


def test_text_and_no_file(peaks, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    command.dry_run(Config().replace(**OPTIONS, snip_granularity="linear", memory_gib=1.0, dry_run_gemms=True))
    text = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert "4 Hopper GPUs, tensor parallel 1 x pipeline parallel 2 x data parallel 2, 4 microbatches of 256" in text
    assert "rank 2, pipeline stage 1, holds 1.000e9 parameters, 16 bytes each" in text
    assert "a plan: 28 linears x 8 options" in as_text(Config().replace(**OPTIONS, precision="snip"), 4, [])
    assert "a plan:" not in text
    lines = [line.split("|") for line in text.splitlines()]
    rows = {line[1].strip(): line[2].strip() for line in lines[:25] if len(line) > 2}
    assert rows["peak, GiB"] == "1.00" and rows["activations, GiB"] == "0.75" and rows["TFLOP"] == "1"
    assert rows["a block keeps for backward, MiB"] == "3.00"
    assert rows["tp all-gather, calls: GiB"] == "5: 1.000" and rows["GEMM 128 x 256 x 512, fp4"] == "3"
    assert rows["kernel launches"] == "5" and rows["launches of casts"] == "2" and rows["launches of GEMMs"] == "3"
    assert "GEMM 128 x" not in as_text(Config().replace(**OPTIONS), 4, [made_up(0, 1)])
    told = [as_text(Config().replace(**OPTIONS, compile=on), 4, [made_up(0, 1)]) for on in (False, True)]
    assert ["as without --compile" in text for text in told] == [False, True]


def test_the_last_line_says_whether_it_fits(peaks, capsys) -> None:
    command.dry_run(Config().replace(**OPTIONS, memory_gib=80.0))
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "fits in 80 GiB with 79.0 to spare: rank 0, pipeline stage 0, needs 1.0 GiB (iteration, fp4)"
    command.dry_run(Config().replace(**OPTIONS))
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == ("rank 0, pipeline stage 0, needs 1.0 GiB (iteration, fp4); --memory-gib GIB says whether that fits")


def test_probes_and_trials_are_told_in_plain_iterations() -> None:
    """Of a pipeline of two: a batch of 4 microbatches takes 5 steps, a trial's 64 microbatches of 256 tokens 65."""
    peak, sent = dict.fromkeys(KINDS, 0), {("count", "tp", "all-gather"): 1, ("bytes", "tp", "all-gather"): 2**30}
    flops = {"iteration, bf16": 4e12, "iteration, plan": 4e12, "probe": 10e12, "pass of a trial": 8e12}
    stretches = [Stretch(name, peak, Counter({("flops",): int(n), **sent}), 0) for name, n in flops.items()]
    one = Measured(0, 0, 10**9, tuple(stretches), 0)
    config = Config().replace(**OPTIONS, precision="snip", snip_interval=100, snip_trials=10)
    config = config.replace(snip_trial_tokens=64 * 512)
    cost = 10 * 2 * (65 / 64) / (5 / 4)
    assert cost == 16.25
    text = as_text(config, 4, [one])
    assert "a probe: 2.50 plain iterations by FLOPs, 1.00 GiB in collectives (an iteration: 1.00); 2.500% of" in text
    assert (
        "a trial: 10 forward passes of 32768 tokens at most, or 2 if the plan costs what was predicted: 16.25 plain"
        in text
    )
    assert "16.25 plain iterations, 10.00 GiB in collectives; 16.250% of a run at --snip-interval 100" in text
    untried = config.replace(snip_trials=0)
    assert "a trial" not in as_text(untried, 4, [Measured(0, 0, 10**9, tuple(stretches[:3]), 0)])
    assert trial_passes(untried) == trial_passes(config.replace(snip_objective="layer_id")) == 0
    assert trial_passes(config) == 10 and trial_passes(config.replace(precision="fp8")) == 0


def test_what_would_make_it_fit_is_named(peaks) -> None:
    peaks |= {"full 1 2": 400, "none 2 2": 600, "none 1 4": 500, "optim_grads_params": 300}
    with pytest.raises(ValueError) as info:
        command.dry_run(Config().replace(**OPTIONS, memory_gib=0.5))
    assert str(info.value) == (
        "--memory-gib 0.5: rank 0, pipeline stage 0, needs 1.0 GiB (iteration, fp4); it fits with "
        "--recompute-granularity full (0.4 GiB) or --data-parallel-sharding-strategy optim_grads_params (0.3 GiB) or "
        "--pipeline-model-parallel-size 4 (0.5 GiB); --memory-plan auto recomputes no more than it must"
    )


def test_what_does_not_help_alone_is_named_too(peaks) -> None:
    peaks |= {"full 1 2": 700}
    some = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
    for given, words in (({}, "full"), (some, "full without --recompute-modules")):
        with pytest.raises(ValueError) as info:
            command.dry_run(Config().replace(**OPTIONS, memory_gib=0.5, **given))
        assert f"no single change makes it fit: --recompute-granularity {words} (0.7 GiB), " in str(info.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dry_run": False}, "--world-size 4 needs --dry-run; add it, or drop this option"),
        ({"world_size": 3}, "world size 3 is not a multiple of tensor x pipeline parallel = 1 x 2"),
        (
            {"optimizer_impl": "apex", "optimizer_cpu_offload": True},
            "--optimizer-cpu-offload updates weights on the host, which --optimizer-impl apex cannot",
        ),
    ],
)
def test_bad_options(options, said, peaks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        command.dry_run(Config().replace(**{**OPTIONS, **options}))


@pytest.mark.parametrize(
    ("pp", "layers", "options", "ranks"),
    [
        (2, 4, {}, [0, 2]),
        (4, 8, {}, [0, 3]),
        (4, 8, {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2}, [0, 3]),
        (4, 8, {"decoder_last_pipeline_num_layers": 2}, [0, 3]),
        (4, 7, {"decoder_first_pipeline_num_layers": 1}, [0, 1, 3]),
        (
            4,
            6,
            {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            [0, 1, 3],
        ),
    ],
)
def test_the_stage_that_may_need_the_most_is_measured(pp, layers, options, ranks) -> None:
    config = Config().replace(**{**OPTIONS, **options, "pipeline_model_parallel_size": pp, "num_layers": layers})
    assert measure.end_ranks(config, 4) == ranks
