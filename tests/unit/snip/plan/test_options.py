"""What the command line lets linears take: granularity, fixes, constraints; each error named."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from megatron_snip.config import Config, SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.model.llama import LLAMA
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.coordinator import check_snip
from megatron_snip.snip.plan import options
from megatron_snip.snip.plan.cost import GemmTimes, by_stage
from megatron_snip.snip.plan.options import (
    changed_gemms,
    check_choices,
    device_options,
    measure_of,
    measured_options,
    read_choices,
    read_fixes,
    read_times,
    solve_request,
)
from megatron_snip.snip.plan.program import Limit
from megatron_snip.snip.plan.recipes import RECIPES

#: Twelve blocks on two stages, every linear as large as any other, and nothing besides them.
SHAPES = [
    dataclasses.replace(shape, out_features=128, in_features=128, stage=shape.block // 6, other_flops=0)
    for shape in LLAMA.linear_shapes(Config().replace(num_layers=12, hidden_size=128, num_attention_heads=1).model)
]
NAMES = [shape.name for shape in SHAPES]
BF16, FP8, FP4 = (LinearPrecision.parse(text) for text in ("bf16", "fp8", "fp4"))


def by_linear(**options) -> SnipConfig:
    """Options of plans by linear, whose FP4 is whole linears; a test of another granularity names it."""
    return SnipConfig(**{"snip_granularity": "linear", **options})


def solved(snip: SnipConfig, quality=None, **more):
    """Precision by name of what the options' request solves to; Q falls with the linear's number."""
    choices = check_choices(snip, SHAPES)
    if quality is None:
        lost = np.array([sum(f == "fp4" for f in (o.fprop, o.dgrad, o.wgrad)) for o in choices.options])
        quality = np.arange(len(NAMES), 0, -1)[:, None] * lost
    found = solve_request(snip, SHAPES, choices, quality.astype(float), **more).solve()
    return {name: choices.options[o] for name, o in zip(NAMES, found.choice)}


def test_granularity_makes_options_and_ties():
    linear = read_choices(by_linear(), SHAPES)
    assert linear.options == (FP8, FP4) and linear.ties is None and not linear.reserved.any()
    assert (linear.fixed == -1).all() and linear.formats == {"fp8", "fp4"} and linear.measure == "fp4"
    gemm = read_choices(by_linear(snip_granularity="gemm", snip_options="bf16, fp8,fp4"), SHAPES)
    assert len(gemm.options) == 27 and gemm.ties is None and gemm.measure == "time"
    fused = read_choices(by_linear(snip_granularity="fused"), SHAPES)
    assert fused.options == (FP8, FP4) and fused.ties[:7].tolist() == [0, 0, 0, -1, 1, 1, -1]
    assert measure_of([FP8]) == "fp4" and measure_of([FP8, LinearPrecision.parse("bf16/fp8/fp8")]) == "time"


@pytest.mark.parametrize(
    ("capability", "cuda", "options"),
    [((9, 0), "13.0", "fp8,fp4"), ((10, 0), "13.0", "mxfp8,nvfp4"), ((10, 0), "12.6", "fp8,fp4"),
     ((12, 0), "13.0", "mxfp8,nvfp4")],
)  # fmt: skip
def test_auto_follows_the_device(capability, cuda, options, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    index = int(f"{capability[0]}{cuda[-1]}")  # answers are kept by device
    assert device_options("auto", torch.device("cuda", index)) == options
    assert device_options("auto", torch.device("cpu")) == "fp8,fp4"
    recipes = "recipes:blackwell" if options.startswith("mx") else "recipes:hopper"
    assert device_options("recipes", torch.device("cuda", index)) == recipes
    assert device_options("fp8", torch.device("cpu")) == "fp8", "what is named stays"


def test_auto_follows_the_statistics_where_there_is_no_device():
    assert measured_options("auto", ["mxfp8", "nvfp4"]) == "mxfp8,nvfp4"
    assert measured_options("auto", ["fp4", "fp8"]) == measured_options("auto", ["nvfp4"]) == "fp8,fp4"


def test_fused_linears_get_one_precision_in_every_stage():
    for constraint in ("none", "each", "makespan"):
        plan = solved(by_linear(snip_granularity="fused", snip_target=0.4, snip_stage_constraint=constraint))
        for i in range(12):
            for group in (slice(7 * i, 7 * i + 3), slice(7 * i + 4, 7 * i + 6)):
                assert len({plan[name] for name in NAMES[group]}) == 1
        in_fp4 = [sum(plan[name] == FP4 for name in NAMES[half : half + 42]) / 42 for half in (0, 42)]
        assert sum(in_fp4) >= 0.8 and (constraint == "none" or min(in_fp4) >= 0.4), (constraint, in_fp4)
        assert constraint != "none" or min(in_fp4) < 0.4, "else the constraint shows nothing"


def test_fixes_by_name_and_glob():
    fixes = read_fixes(" layers.*.down_proj = bf16, layers.3.mlp.up_proj=fp4/fp8/fp4, ", NAMES)
    assert len(fixes) == 13 and fixes["layers.3.mlp.up_proj"] == LinearPrecision.parse("fp4/fp8/fp4")
    assert {precision for name, precision in fixes.items() if name.endswith("down_proj")} == {BF16}
    assert read_fixes("", NAMES) == {}
    one = read_fixes("layers.1.mlp.*=fp8", NAMES)
    assert one == dict.fromkeys(NAMES[11:14], FP8), "not layers.10 and layers.11"
    assert len(read_fixes("layers.1*.mlp.up_proj=fp8", NAMES)) == 3
    assert read_fixes("layers.0.mlp.up_proj=fp8,layers.0.*=fp8", NAMES).keys() == set(NAMES[:7])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers.0", "--snip-fix part 'layers.0' cannot be read; write PATTERN=PRECISION"),
        ("layers.0.*=", "--snip-fix part 'layers.0.*=' cannot be read"),
        ("=fp8", "--snip-fix part '=fp8' cannot be read"),
        ("layers.0.*=fp9", "--snip-fix part 'layers.0.*=fp9': fprop: unknown format 'fp9'"),
        (
            "layers.0.mlp.upproj=fp8",
            "pattern 'layers.0.mlp.upproj' matches no linear; names are such as layers.0.mlp.up",
        ),
        ("layers.99.*=fp8", "--snip-fix pattern 'layers.99.*' matches no linear; names are such as layers."),
        (
            "layers.0.*=fp8,*.down_proj=bf16",
            "parts 'layers.0.*=fp8' and '*.down_proj=bf16' disagree on layers.0.mlp.down_proj; narrow one",
        ),
    ],
)
def test_fixes_that_cannot_be_kept(text, said):
    with pytest.raises(ValueError) as caught:
        read_choices(by_linear(snip_fix=text), SHAPES)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_format_for_fixed_linears_alone():
    """bf16 costs nothing: were it open to the others, all would take it, and the target would count time."""
    snip = by_linear(snip_fix="layers.0.*=bf16,layers.11.*=fp8", snip_target=0.5)
    choices = read_choices(snip, SHAPES)
    assert choices.options == (FP8, FP4, BF16) and choices.reserved.tolist() == [False, False, True]
    assert choices.free == [FP8, FP4] and choices.measure == "fp4"
    plan = solved(snip)
    assert {name for name, precision in plan.items() if precision == BF16} == set(NAMES[:7])
    assert {plan[name] for name in NAMES[-7:]} == {FP8}
    assert sum(precision == FP4 for precision in plan.values()) == 42


def test_a_fix_holds_for_all_that_is_tied():
    fused = by_linear(snip_granularity="fused", snip_fix="layers.2.self_attn.k_proj=bf16", snip_target=0.5)
    plan = solved(fused)
    assert [name for name, precision in plan.items() if precision == BF16] == NAMES[14:17]
    with pytest.raises(ValueError, match=r"fused ties .*q_proj=fp8, layers.2.self_attn.k_proj=fp4; fix them alike"):
        fix = "layers.2.*.q_proj=fp8,layers.2.*.k_proj=fp4"
        read_choices(by_linear(snip_granularity="fused", snip_fix=fix), SHAPES)


def test_held_linears_yield_to_fixes_and_hold_their_ties():
    held = np.full(len(NAMES), -1)
    held[[0, 1, 8]] = 0
    fix = by_linear(snip_fix="layers.0.self_attn.q_proj=bf16", snip_target=0.5)
    choices = read_choices(fix, SHAPES)
    quality = np.zeros((len(NAMES), 3))
    assert solve_request(fix, SHAPES, choices, quality, held=held).fixed[[0, 1, 8, 9]].tolist() == [2, 0, 0, -1]
    fused = by_linear(snip_granularity="fused", snip_target=0.5)
    choices = read_choices(fused, SHAPES)
    request = solve_request(fused, SHAPES, choices, quality[:, :2], held=held)
    assert request.fixed[:10].tolist() == [0, 0, 0, -1, -1, -1, -1, 0, 0, 0]
    request.solve()
    both = by_linear(snip_granularity="fused", snip_options="fp4,fp8", snip_fix="layers.0.*.k_proj=fp4", snip_target=0)
    request = solve_request(both, SHAPES, read_choices(both, SHAPES), quality[:, :2], held=np.where(held == 0, 1, -1))
    assert request.fixed[:10].tolist() == [0, 0, 0, -1, -1, -1, -1, 1, 1, 1], (
        "the fix of k goes before what q is held at"
    )


def test_a_target_that_fixes_put_out_of_reach():
    with pytest.raises(
        ValueError, match=r"--snip-target with --snip-fix '\*=fp8': target 0.75 is out of reach: at most 0"
    ):
        check_choices(by_linear(snip_fix="*=fp8", snip_stage_constraint="none"), SHAPES)
    fix = ",".join(f"layers.{i}.*=fp8" for i in range(3))
    half = by_linear(snip_fix=fix, snip_target=0.6, snip_stage_constraint="none")
    assert check_choices(half, SHAPES)
    for constraint in ("each", "auto"):
        with pytest.raises(ValueError, match=r"target 0.6 per stage is out of reach: at most stage 0: 0.5") as caught:
            check_choices(by_linear(**{**vars(half), "snip_stage_constraint": constraint}), SHAPES)
        assert str(caught.value).endswith("; or let the whole reach it, by --snip-stage-constraint none")
    with pytest.raises(ValueError, match=r"--snip-target 0.75 is more than the options fp8 can save \(0.000\)"):
        check_choices(by_linear(snip_options="fp8"), SHAPES)
    check_choices(by_linear(snip_target=1.0, snip_granularity="gemm"), SHAPES)
    check_choices(by_linear(snip_options="fp8", snip_max_loss=0.1), SHAPES)


def test_stage_constraints_reach_the_solver():
    none, each, makespan, auto = (
        solve_request(snip, SHAPES, read_choices(snip, SHAPES), np.zeros((len(NAMES), 2)))
        for snip in (
            by_linear(snip_stage_constraint="none"),
            by_linear(snip_stage_constraint="each"),
            by_linear(snip_stage_constraint="makespan"),
            by_linear(),
        )
    )
    assert none.stage is None and none.time is None and none.churn == 0.0
    assert each.stage.tolist() == makespan.stage.tolist() == [s.stage for s in SHAPES]
    assert each.time is None
    assert auto.stage.tolist() == each.stage.tolist() and auto.time is None, "each by default: there are two stages"
    one = [dataclasses.replace(shape, stage=0) for shape in SHAPES]
    choices, quality = read_choices(by_linear(), one), np.zeros((len(NAMES), 2))
    assert solve_request(by_linear(), one, choices, quality).stage is None, "and none with one"
    each = by_linear(snip_stage_constraint="each")
    assert solve_request(each, one, choices, quality).stage is not None
    assert makespan.time.sum(axis=0) == pytest.approx([0.5, 0.25]), "shares of BF16's time"


def test_a_limit_is_one_function(monkeypatch):
    """CONTRIBUTING.md's recipe: it holds in plans, lowers the highest target, and is refused at the start."""

    def first_stage_in_fp4(snip, shapes, choices):
        values = np.array([[(shape.stage == 0) * (o.fprop == "fp4") for o in choices.options] for shape in shapes])
        return [Limit("FP4 on the first stage", values.astype(float), most)]

    monkeypatch.setattr(options, "LIMITS", (first_stage_in_fp4,))
    most, snip = 10.0, by_linear(snip_stage_constraint="none", snip_target=0.5)
    plan = solved(snip, quality=np.tile([0.0, 1.0], (84, 1)) * (1 + np.arange(84))[:, None])
    fp4 = [index for index, name in enumerate(NAMES) if plan[name] == FP4]
    assert fp4 == [*range(10), *range(42, 74)], "without the limit, the first 42"
    lossless = dataclasses.replace(snip, snip_max_loss=0.1)
    choices = check_choices(lossless, SHAPES)
    assert solve_request(lossless, SHAPES, choices, np.zeros((84, 2))).target == pytest.approx(52 / 84)
    with pytest.raises(UserError, match=r"at most 0\.619048 with FP4 on the first stage; lower the target"):
        check_choices(dataclasses.replace(snip, snip_target=0.75), SHAPES)
    most = -1.0
    with pytest.raises(UserError, match="FP4 on the first stage: at most -1 is out of reach, at least 0"):
        check_choices(lossless, SHAPES)


def test_a_makespan_counts_the_output_layer():
    """It stays in BF16, so its stage gets more FP4 than the other until both take one time."""
    sizes = {"num_layers": 12, "hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 1, "vocab_size": 1024}
    model = Config().replace(**sizes, seq_length=128).model
    shapes = [dataclasses.replace(shape, stage=shape.block // 6) for shape in LLAMA.linear_shapes(model)]
    found = {}
    for constraint in ("each", "makespan"):
        snip = by_linear(snip_stage_constraint=constraint, snip_target=0.5)
        choices = check_choices(snip, shapes)
        plan = solve_request(snip, shapes, choices, np.tile([0.0, 1.0], (len(shapes), 1))).solve()
        linears = {shape.name: choices.options[o] for shape, o in zip(shapes, plan.choice)}
        found[constraint] = by_stage(shapes, linears)
    (first, quick), (last, slow) = found["each"].values()
    assert first == pytest.approx(last, abs=0.02) and slow - quick > 0.04, "as much FP4 on each, the last waited for"
    (first, quick), (last, slow) = found["makespan"].values()
    assert first < 0.4 < 0.6 < last and slow == pytest.approx(quick, abs=0.01)
    assert first + last == pytest.approx(1.0, abs=0.04), "and no more of it on the whole"


def test_churn_counts_gemms():
    options = [FP8, LinearPrecision.parse("fp8/fp8/fp4"), FP4]
    assert changed_gemms(options) == pytest.approx(np.array([[0, 1, 3], [1, 0, 2], [3, 2, 0]]) / 3)
    snip = by_linear(snip_churn=0.5, snip_target=0.5)
    now = {name: BF16 if i == 0 else FP4 if i % 2 else FP8 for i, name in enumerate(NAMES)}
    request = solve_request(snip, SHAPES, read_choices(snip, SHAPES), np.zeros((len(NAMES), 2)), current=now)
    assert request.current[:4].tolist() == [-1, 1, 0, 1] and request.churn.tolist() == [[0, 0.5], [0.5, 0]]
    plan = solved(snip, quality=np.zeros((len(NAMES), 2)), current=now)
    assert all(plan[name] == now[name] for name in NAMES[1:])
    assert (
        solve_request(by_linear(), SHAPES, read_choices(by_linear(), SHAPES), request.quality_loss, current=now).current
        is None
    )


def table(path, **times):
    entries = {fmt: dict.fromkeys(("fprop", "dgrad", "wgrad"), value) for fmt, value in times.items()}
    path.write_text(json.dumps({"version": 1, "hardware": "a card", "times": entries}))
    return str(path)


def test_a_table_of_times_is_counted_with(tmp_path):
    path = table(tmp_path / "t.json", fp8=0.5, fp4=0.6)
    snip = by_linear(gemm_times=path, snip_options="bf16,fp8,fp4", snip_target=1.0)
    times = read_times(snip)
    assert times == GemmTimes.load(path) and read_times(by_linear()).hardware == "nominal"
    assert set(solved(snip, np.tile([0.0, 1.0, 2.0], (len(NAMES), 1)), times=times).values()) == {FP8}, "the fastest"
    with pytest.raises(ValueError, match="no format fp4; known: fp8"):
        check_choices(by_linear(gemm_times=table(tmp_path / "u.json", fp8=0.5)), SHAPES)
    slow = by_linear(gemm_times=table(tmp_path / "v.json", fp8=1.5), snip_options="bf16,fp8")
    with pytest.raises(ValueError, match="by the GEMM times of a card no format is faster than bf16"):
        check_choices(slow, SHAPES)
    check_choices(by_linear(gemm_times=table(tmp_path / "w.json", fp8=1.5, fp4=1.6)), SHAPES)


def test_a_fix_that_costs_time_where_nothing_saves_it(tmp_path):
    """The first stage is to save a share of nothing, and takes longer than in BF16."""
    shapes = [dataclasses.replace(shape, stage=int(i > 0)) for i, shape in enumerate(SHAPES)]
    path = table(tmp_path / "t.json", fp8=1.5, fp4=0.5)
    fixed = by_linear(gemm_times=path, snip_options="bf16", snip_fix=f"{NAMES[0]}=fp8", snip_target=0.0)
    with pytest.raises(ValueError, match=r"--snip-target with --snip-fix .* stage 0: nothing, as no option saves any"):
        check_choices(fixed, shapes)


def test_what_snip_can_save_is_checked():
    assert [str(option) for option in check_snip(by_linear(), SHAPES).options] == ["fp8", "fp4"]
    check_snip(by_linear(snip_target=1.0), SHAPES)
    check_snip(by_linear(snip_options="bf16,fp8", snip_target=0.6), SHAPES)
    with pytest.raises(ValueError, match=r"--snip-target 0.7 is more than the options bf16,fp8 can save \(0.667\)"):
        check_snip(by_linear(snip_options="bf16,fp8", snip_target=0.7), SHAPES)


def test_a_target_may_be_a_share_of_time_with_any_options(tmp_path):
    """Of FP8 and FP4 alone, FP8 saves two thirds of the time by nominal times, and what a table says by a table."""
    time = by_linear(snip_target_unit="time", snip_target=2 / 3)
    choices = read_choices(time, SHAPES)
    assert choices.measure == "time" and read_choices(by_linear(), SHAPES).measure == "fp4"
    mixed = by_linear(snip_options="bf16,fp8,fp4", snip_target_unit="fp4")
    assert read_choices(mixed, SHAPES).measure == "fp4"
    quality = np.tile([0.0, 1.0], (len(NAMES), 1))
    assert set(solved(time, quality).values()) == {FP8}
    half = by_linear(snip_target_unit="time", snip_target=5 / 6)
    assert 0 < sum(option == FP4 for option in solved(half, quality).values()) < len(NAMES)
    slow = by_linear(gemm_times=table(tmp_path / "t.json", fp8=0.5, fp4=0.5), snip_target=1.0)
    assert set(solved(slow, quality, times=read_times(slow)).values()) == {FP4}
    by_time = dataclasses.replace(slow, snip_target_unit="time")
    assert set(solved(by_time, quality, times=read_times(by_time)).values()) == {FP8}, "FP4 saves no more time"


def test_a_published_table_is_an_option_like_a_file():
    snip = by_linear(gemm_times="published:b300", snip_options="bf16,mxfp8,nvfp4", snip_target=0.8)
    assert read_times(snip) == GemmTimes.published("b300")
    check_choices(snip, SHAPES)
    with pytest.raises(ValueError, match="--gemm-times published:h100: no such table; known: published:b200"):
        check_choices(dataclasses.replace(snip, gemm_times="published:h100"), SHAPES)


def test_recipes_are_options_by_gemm():
    blackwell = read_choices(by_linear(snip_options="recipes:blackwell"), SHAPES)
    table = RECIPES["blackwell"]
    assert len(blackwell.options) == len(table["fprop"]) * len(table["dgrad"]) * len(table["wgrad"])
    assert blackwell.measure == "time" and str(blackwell.options[0]) == "bf16"
    weighed = read_choices(by_linear(snip_options="recipes:blackwell", snip_weight=1.0), SHAPES)
    assert {o.wgrad for o in weighed.options} - {o.wgrad for o in blackwell.options} == {*table["wgrad, measured"]}
    assert read_choices(by_linear(snip_options="recipes"), SHAPES).formats == {*RECIPES["hopper"]["fprop"]}
    fused = read_choices(by_linear(snip_options="recipes:hopper", snip_granularity="fused"), SHAPES)
    assert fused.ties is not None and len(fused.options) == 45
    with pytest.raises(ValueError, match=r"--snip-options recipes:tpu: no such table of recipes; known: recipes for"):
        read_choices(by_linear(snip_options="recipes:tpu"), SHAPES)
    for device, name in (("blackwell", "published:b300"), ("blackwell", "published:gb200")):
        check_choices(by_linear(snip_options=f"recipes:{device}", gemm_times=name), SHAPES)


def test_recipes_follow_the_statistics():
    assert measured_options("recipes", ["mxfp8", "nvfp4"]) == "recipes:blackwell"
    assert measured_options("recipes", ["fp8"]) == "recipes:hopper" and measured_options("fp4", ["fp8"]) == "fp4"


@pytest.mark.parametrize("how", [{"snip_weight": 1.0}, {"snip_objective": "rel_err"}])
def test_what_no_probe_measures_is_refused(how):
    """A probe measures each format alone, and wgrad's errors depend on fprop's format if its input is cast again."""
    mixed = by_linear(snip_options="mxfp8_dequantized,nvfp4_plain/mxfp8_dequantized/mxfp8_dequantized", snip_target=0.2)
    check_choices(mixed, SHAPES)
    check_choices(dataclasses.replace(mixed, snip_options="mxfp8_dequantized,nvfp4_plain", **how), SHAPES)
    with pytest.raises(
        ValueError,
        match="in nvfp4_plain/mxfp8_dequantized/mxfp8_dequantized, mxfp8_dequantized makes dgrad's weight of what "
        "fprop multiplies in another format, whose errors no probe measures; give fprop the same, or --snip-weight 0",
    ):
        check_choices(dataclasses.replace(mixed, **how), SHAPES)
