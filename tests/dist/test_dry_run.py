"""Dry runs predict what the same run does on real tensors, and every example has one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks.megatron_counts import Megatron, over, sent_by
from megatron_snip.arguments import parse
from megatron_snip.model.flops import iteration_flops, parameters
from megatron_snip.train.dry_run.measure import end_ranks, measure_all
from megatron_snip.train.dry_run.device import device_of
from megatron_snip.train.dry_run.output import as_text, trial_samples
from tests.dist.helpers.dry_runs import collectives, few_and_whole, few_and_whole_trials, options_of, real_counts, real_rises
from tests.dist.helpers.harness import CONTEXT, run_ranks
from tests.dist.helpers.runs import LAYOUTS, world_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORLD_SIZES = {"llama_1b": 8, "llama_3b": 8, "llama_7b": 8, "llama_70b": 512}
SMALL = {"num_layers": 2, "bf16": True, "precision": "snip"}
#: Where microbatches do not matter.
ONE = {"global_batch_size": 1}
TWO = {**SMALL, "global_batch_size": 2}


# weights without a master are on one process below, in test_peaks_are_those_of_a_run
@pytest.mark.parametrize("precision", ["fp32", pytest.param("collage-plus", marks=pytest.mark.slow)])
def test_collectives_and_peaks_are_those_of_a_run(precision: str) -> None:
    """Two microbatches a process, both of which the dry run makes.  Neither leaves a tensor to the garbage collector."""
    layout = "tp2 x pp2 x dp2"
    options = {**SMALL, **LAYOUTS[layout], "hidden_size": 128, "snip_weight": 1.0, "global_batch_size": 4}
    options["optimizer_precision"] = precision
    real = run_ranks(real_counts, world_of(layout), options, seconds=240.0)
    for one in measure_all(options_of(options), world_of(layout), [0, 4]):
        iteration, _, probe, _ = one.stretches
        assert [collectives(iteration.counts), collectives(probe.counts)] == [sent for sent, _ in real[one.rank]]
        # what differs are tensors of some bytes each, such as the batch's numbers
        assert [iteration.total, probe.total] == pytest.approx([peak for _, peak in real[one.rank]], rel=0.002)
        assert {what[1] for what in collectives(probe.counts)} == {"tp", "pp", "dp", "world"}


@pytest.mark.parametrize(
    "chunk", [pytest.param(None, marks=pytest.mark.slow, id="plain"), pytest.param(1, id="interleaved")]
)
def test_microbatches_that_are_left_out_change_nothing(chunk: int | None) -> None:
    """Nor do they take memory: a pipeline holds what is under way, and of the whole batch its tokens alone."""
    options = {
        "num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": chunk,
        "seq_length": 128, "hidden_size": 128, "micro_batch_size": 1, "global_batch_size": 8, "precision": "fp8",
        "bf16": True,
    }  # fmt: skip
    with ProcessPoolExecutor(2, CONTEXT) as pool:
        for few, whole, left_out in pool.map(few_and_whole, [options] * 2, [2] * 2, [0, 1]):
            assert few.counts == whole.counts and few.kept == whole.kept > 0
            tokens_and_labels, losses = 128 * 2 * 8, 64
            assert few.total <= whole.total <= few.total + left_out * (tokens_and_labels + losses) and left_out > 0


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.slow), 2])  # they are counted in one place
def test_a_trial_s_microbatches_that_are_left_out_change_nothing(pp: int) -> None:
    options = {
        **SMALL, "pipeline_model_parallel_size": pp, "seq_length": 128, "hidden_size": 128, "micro_batch_size": 1,
        "global_batch_size": pp, "snip_trial_tokens": 128 * 8,
    }  # fmt: skip
    with ProcessPoolExecutor(2, CONTEXT) as pool:
        for few, whole in pool.map(few_and_whole_trials, [options] * pp, [pp] * pp, range(pp)):
            for counts in (few.counts, whole.counts):
                del counts["read",]  # among them one for each sequence's number, which is on the host already
            assert few.counts == whole.counts and few.counts["flops",] > 0


@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_sends_and_keeps_no_more_than_one_of_megatron_lm(cp: int) -> None:
    """By the formulas of benchmarks/megatron_counts.py; FP8's inputs are gathered as codes.  dp 2, or cp 2."""
    layout = "tp2 x pp2 x dp2"
    options = {
        **SMALL, **LAYOUTS[layout], "seq_length": 256 * cp, "context_parallel_size": cp, "distributed_backend": "auto",
    }  # fmt: skip
    plain, fp8 = (options_of({**options, "precision": precision}) for precision in ("bf16", "fp8"))
    world, ranks = world_of(layout), [0, 4]
    for one, other in zip(measure_all(plain, world, ranks), measure_all(fp8, world, ranks), strict=True):
        theirs = Megatron(plain, world, one.stage)
        expected, ours, codes = theirs.sent(), sent_by(one.stretches[0]), sent_by(other.stretches[0])
        for kind in ("all-gather", "reduce-scatter"):  # one of each weight and its gradient
            assert ours["dp", kind][1] == codes["dp", kind][1] == expected["dp", kind][1]
        assert over("pp", ours, 2) <= over("pp", expected, 2) + 4  # a number that torch sends at first
        assert ours["tp", "reduce-scatter"] == codes["tp", "reduce-scatter"] == expected["tp", "reduce-scatter"]
        assert over("tp", codes, 2) < over("tp", ours, 2) <= over("tp", expected, 2)
        inputs = 4 * theirs.blocks * theirs.microbatches * theirs.shard  # in forward, and in backward for wgrad
        saved = ours["tp", "all-gather"][1] - codes["tp", "all-gather"][1]
        assert inputs - saved <= 0.6 * inputs
        assert over("cp", ours, 2) == over("cp", codes, 2) <= over("cp", expected, 2)
        if cp == 1:  # else attention keeps gathered keys and values
            assert other.stretches[0].kept < one.stretches[0].kept == theirs.kept()


def test_a_gpu_may_be_asked_for_where_there_is_none() -> None:
    tiny = options_of({**SMALL, **ONE, "precision": "fp8/nvfp4_plain/fp4", "seq_length": 128, "distributed_backend": "auto"})
    asked = [tiny, tiny.replace(distributed_backend="nccl"), tiny.replace(device="cuda")]
    auto, nccl, cuda = ([dataclasses.asdict(one) for one in measure_all(config, 1, [0])] for config in asked)
    assert auto == nccl == cuda and auto[0]["stretches"][0]["kept"] > 0


def test_blackwells_formats_are_counted_as_on_one() -> None:
    """Two elements of NVFP4 are in a byte, and nothing is emulated."""
    tiny = options_of({**ONE, "num_layers": 2, "seq_length": 128, "bf16": True, "distributed_backend": "nccl"})
    fp4, plain = (measure_all(tiny.replace(precision=name), 1, [0])[0].stretches[0] for name in ("fp4", "nvfp4_plain"))
    products = [{what: n for what, n in one.counts.items() if what[0] in ("gemm", "flops")} for one in (fp4, plain)]
    assert products[0] == products[1] and {what[4] for what in products[1] if what[0] == "gemm"} == {"fp4", "bf16"}
    assert plain.counts["launch", "_scaled_mm_v2"] == fp4.counts["launch", "_scaled_mm_v2"] > 0
    assert plain.counts["launch", "dequantize"] == 0 and plain.kept < fp4.kept


def test_what_is_cast_again_is_kept_once() -> None:
    """Weights have one kept cast in place of two, and the input of a wgrad in BF16 is kept as codes."""
    tiny = options_of({**ONE, "num_layers": 2, "seq_length": 128, "bf16": True, "distributed_backend": "nccl"})
    names = ("mxfp8", "mxfp8_dequantized", "mxfp8/bf16/bf16", "mxfp8/bf16_dequantized/bf16_dequantized")
    plain, again, bf16, codes = (
        measure_all(tiny.replace(precision=name), 1, [0])[0].stretches[0] for name in names
    )
    assert plain.kept == again.kept == codes.kept < bf16.kept
    assert again.peak["casts"] < 0.7 * plain.peak["casts"] and codes.total < bf16.total
    for one, other in ((plain, again), (bf16, codes)):
        products = [Counter[tuple]() for _ in range(2)]
        for found, each in zip(products, (one, other), strict=True):
            for what, number in each.counts.items():
                found[what[:4]] += number if what[0] == "gemm" else 0
        assert products[0] == products[1]


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"precision": "bf16"}, "hopper"),
        ({"precision": "fp8_pow2/fp4/fp8_e5m2"}, "hopper"),
        ({"precision": "fp8/mxfp8/fp8"}, "blackwell"),
        ({"precision": "snip"}, "hopper"),
        ({"precision": "snip", "snip_options": "fp8,nvfp4"}, "blackwell"),
        ({"precision": "snip", "snip_warmup_precision": "mxfp8"}, "blackwell"),
        ({"precision": "mxfp8", "distributed_backend": "gloo"}, "cpu"),
    ],
)
def test_devices_are_those_that_multiply_its_formats(options: dict, device: str) -> None:
    config = options_of({"distributed_backend": "auto", **options})
    assert device_of(config) == device
    assert f": 1 {device.title() + ' GPU' if device != 'cpu' else 'CPU'}s, tensor" in as_text(config, 1, [])


@pytest.mark.parametrize("precision", ["bf16", "fp4/nvfp4_plain/mxfp8"])
def test_blocks_to_be_compiled_are_counted_as_they_are(precision: str) -> None:
    tiny = options_of({**ONE, "num_layers": 2, "seq_length": 128, "precision": precision})
    plain, compiled = (measure_all(config, 1, [0]) for config in (tiny, tiny.replace(compile=True)))
    assert [dataclasses.asdict(one) for one in compiled] == [dataclasses.asdict(one) for one in plain]
    assert compiled[0].stretches[0].kept > 0


def test_a_process_that_holds_the_embedding_alone() -> None:
    ends = {"num_layers": 1, "pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True}
    (first,) = measure_all(options_of({**SMALL, **ends}), 2, [0])
    assert [stretch.kept for stretch in first.stretches] == [0] * 4 and first.worst.total > 4 * first.parameters


def test_what_a_block_keeps_is_the_same_for_one_microbatch_and_several() -> None:
    """The first makes casts of weights, which are not the block's own."""
    options = {**SMALL, "precision": "fp8", "micro_batch_size": 1}
    found = [measure_all(options_of({**options, "global_batch_size": size}), 1, [0])[0] for size in (1, 2)]
    one, several = (each.stretches[0].kept for each in found)
    assert one == several > 0


@pytest.mark.slow
def test_collectives_of_a_tied_model_in_unequal_stages() -> None:
    options = {
        **SMALL, "num_layers": 6, "pipeline_model_parallel_size": 3, "untie_embeddings_and_output_weights": False,
        "decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1,
    }  # fmt: skip
    real = run_ranks(real_counts, 3, options, seconds=240.0)
    config = options_of(options)
    ranks = end_ranks(config, 3)
    assert ranks == [0, 1, 2], "the middle has the most blocks"
    for one in measure_all(config, 3, ranks):
        assert [collectives(one.stretches[i].counts) for i in (0, 2)] == [sent for sent, _ in real[one.rank]]


@pytest.mark.parametrize(
    "options",
    [
        {**TWO, "snip_weight": 1.0},
        {"num_layers": 2, "global_batch_size": 2, "precision": "fp4", "recompute_granularity": "full"},
        {**TWO, "snip_weight": 1.0, "optimizer_precision": "collage-plus"},
    ],
    ids=["snip", "fp4 with recomputation", "without a master"],
)
def test_peaks_are_those_of_a_run(options: dict) -> None:
    (real,), (one,) = run_ranks(real_rises, 1, options), measure_all(options_of(options), 1, [0])
    for stretch, rise in zip([one.stretches[0], *one.stretches[2:3]], real, strict=True):
        before = stretch.peak["parameters"] + stretch.peak["optimiser"]
        stored = 5 * 2 if "optimizer_precision" in options else 3 * 4
        assert before == pytest.approx(stored * one.parameters, rel=0.01)
        assert stretch.total - before == pytest.approx(rise, rel=0.1)


@pytest.mark.parametrize(
    ("precision", "stored"),
    [("fp32", 16), ("collage-plus", 12), ("collage-light", 10), ("bf16-stochastic", 8), ("bf16", 8)],
)
def test_bytes_of_a_parameter(precision: str, stored: int) -> None:
    options = {**ONE, "num_layers": 1, "bf16": True, "precision": "bf16", "optimizer_precision": precision}
    (one,) = measure_all(options_of(options), 1, [0])
    assert one.stored == stored * one.parameters and one.stretches[0].counts["read",] < 12


def test_an_iteration_that_logs_lost_updates_is_counted_as_others() -> None:
    options = {"num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 128, "vocab_size": 256}
    plain, logged = (measure_all(options_of({**options, "log_edq_interval": every}), 1, [0]) for every in (0, 1))
    assert logged == plain


def test_a_run_to_a_loss_is_counted_at_the_default_target() -> None:
    options = {**SMALL, **ONE, "hidden_size": 128, "seq_length": 128}
    found = [measure_all(options_of({**options, **more}), 1, [0]) for more in ({}, {"snip_max_loss": 0.1})]
    assert [stretch.counts for stretch in found[0][0].stretches] == [stretch.counts for stretch in found[1][0].stretches]


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_every_example(name: str) -> None:
    """With a block a stage: the processes hold the model together, and multiply as often as it takes."""
    world = WORLD_SIZES[name]
    config = parse(["--config", str(EXAMPLES / name / f"{name}.toml"), "--mock-data"])
    pp, tied = config.parallel.pipeline_model_parallel_size, not config.model.untie_embeddings_and_output_weights
    config = config.replace(num_layers=pp, global_batch_size=8 * world)
    measured = measure_all(config, world, end_ranks(config, world))
    seen = dataclasses.replace(config.model, num_layers=len(measured))  # both ends of a pipeline, without its middle
    held = sum(one.parameters for one in measured) * world // pp
    assert held == pytest.approx(parameters(seen, tied=tied), rel=1e-3)
    for one in measured:
        iteration, plan, probe, trial = one.stretches
        assert iteration.counts["flops",] == plan.counts["flops",] < probe.counts["flops",]
        share = trial_samples(config, config.data_parallel_size(world)) / config.training.global_batch_size
        forward = trial.counts["flops",] / share / plan.counts["flops",]  # of three, or four where blocks go twice
        least = 1 / 4 if config.training.recompute_granularity == "full" else 1 / 3
        assert 0.94 * least < forward < 1.06 / 3
        assert {what[4] for what in plan.counts if what[0] == "gemm"} <= {"fp4", "fp8", "bf16"}
        assert not any(what == ("launch", "dequantize") for what in plan.counts)  # it is a Hopper GPU's scaled_mm
    sequences = config.training.global_batch_size
    expected = iteration_flops(seen, sequences)
    if config.training.recompute_granularity == "full":  # blocks go forward twice, the output layer once
        expected += expected / 3 - 2 * seen.padded_vocab_size * seen.hidden_size * seen.seq_length * sequences
    flops = sum(one.stretches[0].counts["flops",] for one in measured) * world // pp
    assert flops == pytest.approx(expected, rel=0.05)
