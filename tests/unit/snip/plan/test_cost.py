"""What options save: FP4 shares and modelled time, by hand; tables of GEMM times, and one error for each fault."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.formats import format_names, get_format
from megatron_snip.formats.element import E2M1
from megatron_snip.model.llama import LLAMA
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan import cost
from megatron_snip.snip.plan.cost import (
    NOMINAL,
    PUBLISHED,
    GemmTimes,
    achieved,
    by_stage,
    efficiency,
    fused_ties,
    gemm_flops,
    linear_options,
    modelled_time,
    stages,
)

SHAPES = [LinearShape("a", 2, 3, stage=0), LinearShape("b", 6, 3, stage=1)]
BF16, FP8, FP4, MIXED = (LinearPrecision.parse(text) for text in ("bf16", "fp8", "fp4", "fp4/fp8/fp4"))


def test_fp4_share_by_hand():
    assert SHAPES[0].gemm_flops == 12
    found = efficiency(SHAPES, [BF16, FP8, MIXED, FP4])
    assert np.allclose(found, [[0, 0, 1 / 6, 1 / 4], [0, 0, 1 / 2, 3 / 4]], rtol=1e-12)


def test_time_by_hand():
    found = efficiency(SHAPES, [BF16, FP8, FP4], "time")
    assert np.allclose(found, [[0, 1 / 6, 1 / 4], [0, 1 / 2, 3 / 4]], rtol=1e-12)


def gemms(fprop, dgrad, wgrad):
    return {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}


TIMES = GemmTimes(
    "a card",
    {"fp8": gemms(0.5, 0.5, 0.8), "fp4": gemms(0.3, 0.6, 0.9)},
    {"6x3": {"bf16": gemms(2.0, 2.0, 2.0), "fp8": gemms(1.0, 1.5, 1.0)}},
)


def test_flops_of_every_gemm():
    assert gemm_flops(SHAPES).tolist() == [[12, 12, 12], [36, 36, 36]]


def test_modelled_time_by_hand():
    assert modelled_time(SHAPES, [BF16, FP8, FP4]) == pytest.approx(np.array([[4, 2, 1], [12, 6, 3]]) / 16)
    found = modelled_time(SHAPES, [BF16, FP8, MIXED], TIMES)
    assert found == pytest.approx(np.array([[3, 1.8, 1.7], [18, 10.5, 8.1]]) * 12 * [[1], [1]] / 144)
    with pytest.raises(ValueError, match="no format nvfp4_plain"):
        modelled_time(SHAPES, [LinearPrecision.parse("nvfp4_plain")], TIMES)


def test_time_saved_by_a_table():
    """1 is what the fastest format of each GEMM saves: of "a" .3, .5, .8; of "b", a shape of its own, .3, .6, .9."""
    most = (3 - 1.6) + (18 - 3 * 1.8)
    found = efficiency(SHAPES, [BF16, FP8, FP4], "time", TIMES)
    assert found == pytest.approx(np.array([[0, 1.2, 1.2], [0, 7.5, 12.6]]) / most)
    assert efficiency(SHAPES, [FP8, FP4], "fp4", TIMES) == pytest.approx(efficiency(SHAPES, [FP8, FP4]))
    slow = GemmTimes("a slow card", {"fp8": gemms(1.0, 1.5, 1.0)})
    with pytest.raises(ValueError, match="times of a slow card no format is faster than bf16"):
        efficiency(SHAPES, [BF16, FP8], "time", slow)


def test_shares_by_stage():
    plan = {"a": FP8, "b": MIXED}
    assert by_stage(SHAPES, plan) == {0: (0.0, pytest.approx(2 / 16)), 1: (pytest.approx(2 / 3), pytest.approx(1 / 4))}
    assert by_stage(SHAPES, plan, TIMES)[1][1] == pytest.approx(8.1 / 12)


def test_achieved_is_the_sum_of_the_chosen_entries():
    options = [FP8, MIXED, FP4]
    table = efficiency(SHAPES, options)
    for first, left in enumerate(options):
        for second, right in enumerate(options):
            total = achieved(SHAPES, {"a": left, "b": right})
            assert total == pytest.approx(table[0, first] + table[1, second])
    assert achieved([], {}) == 0.0


def test_options_by_granularity():
    assert linear_options(["fp8", "fp4", "fp8"], "linear") == [FP8, FP4]
    assert linear_options(["fp4", "fp4/fp8/fp4"], "fused") == [FP4, MIXED]
    triples = linear_options(["fp8", "fp4"], "gemm")
    assert len(set(triples)) == 8 and triples[0] == FP8 and triples[-1] == FP4 and MIXED in triples
    assert linear_options(["fp4/fp8/fp4", "fp8", "bf16/fp8/fp8"]) == [FP8, MIXED, LinearPrecision.parse("bf16/fp8/fp8")]
    with pytest.raises(ValueError, match="unknown granularity 'layer'; known: linear, gemm, fused"):
        linear_options(["fp4"], "layer")
    with pytest.raises(ValueError, match="name at least one"):
        linear_options([])
    with pytest.raises(ValueError, match="fp5"):
        linear_options(["fp5"])


def test_fused_ties_and_stages():
    shapes = LLAMA.linear_shapes(Config().replace(num_layers=2, hidden_size=128, num_attention_heads=1).model)
    assert fused_ties(shapes).tolist() == [0, 0, 0, -1, 1, 1, -1, 2, 2, 2, -1, 3, 3, -1]
    assert stages(SHAPES).tolist() == [0, 1]


HALF = {"fprop": 0.5, "dgrad": 0.5, "wgrad": 0.75}
FILE = {
    "version": 1,
    "hardware": "a card",
    "about": {"torch": "2.13"},
    "times": {"fp8": HALF, "fp4": {"fprop": 0.25, "dgrad": 0.25, "wgrad": 0.5}},
    "shapes": {"8x4": {"bf16": {"fprop": 1.5, "dgrad": 1.5, "wgrad": 1.5}, "fp8": {**HALF, "wgrad": 0.1}}},
}


def write(path, values) -> str:
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


def test_nominal_times_follow_the_bits():
    assert [NOMINAL.of(fmt, "fprop", 8, 4) for fmt in ("bf16", "fp8", "mxfp8", "fp4")] == [1, 0.5, 0.5, 0.25]
    assert NOMINAL.fastest("wgrad", 8, 4) == 0.25 and NOMINAL.hardware == "nominal"
    NOMINAL.check(["nvfp4_plain"])


def test_a_shape_goes_before_the_mean(tmp_path):
    times = GemmTimes.load(write(tmp_path / "t.json", FILE))
    assert times.of("fp8", "wgrad", 8, 4) == 0.1 and times.of("fp8", "wgrad", 4, 8) == 0.75
    assert times.of("fp4", "wgrad", 8, 4) == 0.5, "the shape does not tell"
    assert times.of("bf16", "dgrad", 8, 4) == 1.5 and times.of("bf16", "dgrad", 4, 8) == 1.0
    assert times.fastest("wgrad", 8, 4) == 0.1 and times.fastest("wgrad", 4, 8) == 0.5
    slow = GemmTimes("a slow card", {"fp8": dict.fromkeys(HALF, 2.0)})
    assert slow.fastest("fprop", 4, 8) == 1.0, "bf16 itself"
    times.check(["bf16", "fp8", "fp4"])
    said = "the GEMM times of a card have no format nvfp4_plain; known: fp8, fp4; measure it again"
    with pytest.raises(ValueError, match=said):
        times.check(["fp8", "nvfp4_plain"])
    with pytest.raises(ValueError, match=said):
        times.of("nvfp4_plain", "fprop", 8, 4)


def test_file_and_back(tmp_path):
    first = GemmTimes.load(write(tmp_path / "a.json", FILE))
    first.save(tmp_path / "b.json")
    assert GemmTimes.load(tmp_path / "b.json") == first and first.about == {"torch": "2.13"}
    short = {name: FILE[name] for name in ("version", "hardware", "times")}
    assert GemmTimes.load(write(tmp_path / "c.json", short)).of("fp8", "wgrad", 8, 4) == 0.75


def times_with(gemm, value):
    return {**FILE, "times": {"fp8": {**HALF, gemm: value}}, "shapes": {}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("{", "this table of GEMM times is not JSON"),
        ({**FILE, "version": 2}, "field version is 2, but this code reads version 1"),
        ({name: v for name, v in FILE.items() if name != "hardware"}, "field hardware is missing"),
        ({**FILE, "speed": 1}, "field speed is unknown"),
        ({**FILE, "times": {}}, "field times is {}, but must be an object of formats"),
        ({**FILE, "times": {"fp5": HALF}}, "field times: unknown format 'fp5'"),
        ({**FILE, "times": {"fp8": {"fprop": 1}}}, "field times.fp8.dgrad is missing"),
        (times_with("dgrad", -0.5), "field times.fp8.dgrad is -0.5: expected float > 0.0"),
        (times_with("dgrad", 0), "field times.fp8.dgrad is 0: expected float > 0.0"),
        (times_with("wgrad", "fast"), "field times.fp8.wgrad is 'fast': expected float, got str"),
        ({**FILE, "shapes": {"8": {"fp8": HALF}}}, "field shapes has '8', but must name shapes such as 4096x14336"),
        (
            {**FILE, "shapes": {"8x4": {"nvfp4_plain": HALF}}},
            "field shapes.8x4 has format nvfp4_plain, which times lacks",
        ),
        ({**FILE, "shapes": {"8x4": {"fp8": {**HALF, "fprop": -1}}}}, "field shapes.8x4.fp8.fprop is -1"),
    ],
)
def test_each_fault_is_named(values, said, tmp_path):
    path = write(tmp_path / "t.json", values)
    with pytest.raises(ValueError) as caught:
        GemmTimes.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and said in text and "\n" not in text
    assert text.endswith("measure it again with `megatron-snip profile`, or leave --gemm-times out for nominal times")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.json: cannot read the table of GEMM times .*megatron-snip profile"):
        GemmTimes.load(tmp_path / "none.json")


FILES = sorted((Path(cost.__file__).parent / "published").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_table_says_where_its_figures_are_from(path):
    values = json.loads(path.read_text())
    assert values["hardware"] == f"{PUBLISHED}{path.stem}" and "bf16" in values["times"]
    assert {"device", "source", "read", "shapes", "unit", "formats"} <= values["about"].keys()
    found = GemmTimes.published(path.stem)
    assert np.mean(list(found.times["bf16"].values())) == pytest.approx(1.0)
    assert found.told.startswith(f"of published:{path.stem}; ") and values["about"]["device"] in found.told
    for fmt, row in values["times"].items():
        for gemm, time in row.items():
            ratio = time / np.mean(list(values["times"]["bf16"].values()))
            assert found.of(fmt, gemm, 4096, 4096) == pytest.approx(ratio) and 0.2 < ratio < 1.1


def test_published_ratios_by_hand():
    """Transformer Engine's own summary of its figures: 1.42 and 1.98 on B300, 1.40 on H200; Megatron-Bridge's 1.35."""
    whole = {name: GemmTimes.published(name).times for name in ("b300", "h200", "gb200")}
    for name, fmt, speedup in (
        ("b300", "mxfp8", 1.42), ("b300", "nvfp4", 1.98), ("h200", "fp8_pow2", 1.40), ("gb200", "mxfp8", 1.35),
    ):  # fmt: skip
        assert 3 / sum(whole[name][fmt].values()) == pytest.approx(speedup, abs=0.006)


def test_formats_of_one_kernel_share_published_times():
    found = GemmTimes.published("b300")
    for fmt in format_names():
        if get_format(fmt).element == E2M1 and get_format(fmt).tile == 16:
            assert found.times[fmt] == found.times["nvfp4"]
    assert found.times["mxfp8_floor"] == found.times["mxfp8"]
    assert not {"fp4", "mxfp4", "fp8", "mxfp8_e5m2"} & found.times.keys(), "other kernels"
    b200 = GemmTimes.published("b200").times
    assert b200["mxfp8_floor"]["fprop"] < b200["mxfp8"]["fprop"], "each has its own figure"
    with pytest.raises(UserError, match=r"published:b200 have no format nvfp4; .* give --gemm-times another table"):
        GemmTimes.published("b200").check(["nvfp4"])


def test_an_unknown_published_table_names_the_known_ones():
    with pytest.raises(UserError, match=r"published:tpu: no such table; known: published:b200, .*, or give a file"):
        GemmTimes.published("tpu")
    with pytest.raises(UserError, match="no such table"):
        GemmTimes.published("../published/b200")


def test_nominal_times_are_told():
    assert NOMINAL.told.startswith("nominal: FP8 takes half of BF16's time")
