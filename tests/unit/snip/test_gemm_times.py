"""Tables of GEMM times: what they mean, that they survive their file, and one error for each way to be wrong."""

from __future__ import annotations

import json

import pytest

from megatron_snip.snip.gemm_times import NOMINAL, GemmTimes

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
    NOMINAL.check(["nvfp4"])


def test_a_shape_goes_before_the_mean(tmp_path):
    times = GemmTimes.load(write(tmp_path / "t.json", FILE))
    assert times.of("fp8", "wgrad", 8, 4) == 0.1 and times.of("fp8", "wgrad", 4, 8) == 0.75
    assert times.of("fp4", "wgrad", 8, 4) == 0.5, "the shape does not tell"
    assert times.of("bf16", "dgrad", 8, 4) == 1.5 and times.of("bf16", "dgrad", 4, 8) == 1.0
    assert times.fastest("wgrad", 8, 4) == 0.1 and times.fastest("wgrad", 4, 8) == 0.5
    slow = GemmTimes("a slow card", {"fp8": dict.fromkeys(HALF, 2.0)})
    assert slow.fastest("fprop", 4, 8) == 1.0, "bf16 itself"
    times.check(["bf16", "fp8", "fp4"])
    said = "the GEMM times of a card have no format nvfp4; known: fp8, fp4; measure it anew"
    with pytest.raises(ValueError, match=said):
        times.check(["fp8", "nvfp4"])
    with pytest.raises(ValueError, match=said):
        times.of("nvfp4", "fprop", 8, 4)


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
        ("{", "this table of GEMM times is no JSON"),
        ({**FILE, "version": 2}, "field version is 2, but this code reads version 1"),
        ({name: v for name, v in FILE.items() if name != "hardware"}, "field hardware is missing"),
        ({**FILE, "speed": 1}, "field speed is unknown"),
        ({**FILE, "times": {}}, "field times is {}, but must be an object of formats"),
        ({**FILE, "times": {"fp5": HALF}}, "field times: unknown format 'fp5'"),
        ({**FILE, "times": {"fp8": {"fprop": 1}}}, "field times.fp8.dgrad is missing"),
        (times_with("dgrad", -0.5), "field times.fp8.dgrad is -0.5, but must be a number above 0"),
        (times_with("dgrad", 0), "field times.fp8.dgrad is 0, but must be a number above 0"),
        (times_with("wgrad", "fast"), "field times.fp8.wgrad is 'fast', but must be a finite number"),
        ({**FILE, "shapes": {"8": {"fp8": HALF}}}, "field shapes has '8', but must name shapes such as 4096x14336"),
        ({**FILE, "shapes": {"8x4": {"nvfp4": HALF}}}, "field shapes.8x4 has format nvfp4, which times has not"),
        ({**FILE, "shapes": {"8x4": {"fp8": {**HALF, "fprop": -1}}}}, "field shapes.8x4.fp8.fprop is -1"),
    ],
)
def test_each_fault_is_named(values, said, tmp_path):
    path = write(tmp_path / "t.json", values)
    with pytest.raises(ValueError) as caught:
        GemmTimes.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and said in text and "\n" not in text
    assert text.endswith("measure it anew with tools/profile_gemms.py, or leave --gemm-times out for nominal times")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.json: cannot read the table of GEMM times .*profile_gemms"):
        GemmTimes.load(tmp_path / "none.json")
