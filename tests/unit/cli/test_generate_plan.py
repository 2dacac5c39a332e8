"""tools/generate_plan.py: plans that reach the target, the best of them and the frontier, and that they train."""

from __future__ import annotations

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest

from megatron_snip import runtime
from megatron_snip.cli import generate_plan
from megatron_snip.cli.generate_plan import main
from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.model.llama import LLAMA
from megatron_snip.quant import LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.train import loop
from megatron_snip.train.memory_plan.plan_file import MemoryPlan, precision_of
from megatron_snip.train.run.metrics import read_metrics
from tests.unit.cli.conftest import TINY
from tests.unit.snip.made_up import changed, statistics, without_updates
from tests.unit.train.recorded import named, shown

NAMES = ["best", "random_0", "random_1", "abs_err", "rel_err", "layer_id", "layer_type"]


@pytest.fixture
def generate(finished_run, tmp_path, capsys):
    """Call it with words of the command line: what it printed; ValueError with what it complained of."""

    def call(*words: str, stats=finished_run / "stats/iter_0000003.json") -> str:
        try:
            main(["--stats", str(stats), "--output-dir", str(tmp_path / "plans"), "--num-random", "2", *words])
        except UserError as error:
            assert "\n" not in str(error) and capsys.readouterr().out == "" and not (tmp_path / "plans").exists()
            raise
        return capsys.readouterr().out

    return call


def shapes() -> list[LinearShape]:
    model = Config().replace(**TINY).model
    return LLAMA.linear_shapes(model)


def test_plans_and_their_table(generate, tmp_path, finished_run):
    said = generate("--snip-target", "0.8")
    plans = {name: Plan.load(tmp_path / f"plans/{name}.json") for name in NAMES}
    assert {p.name for p in (tmp_path / "plans").iterdir()} == {
        *(f"{name}.json" for name in NAMES), "pareto.json", "pareto.html",
    }  # fmt: skip
    heads, *rows, last = [re.split(r"  +", line) for line in said.splitlines()]
    assert heads == ["plan", "FP4 share", "loss div. (nats)", "weight div.", "quality loss (snip)", "gap"]
    assert [row[0] for row in rows] == NAMES and last == [f"wrote plans and pareto.html to {tmp_path}/plans"]
    predictions = Predictions.of(Statistics.load(finished_run / "stats/iter_0000003.json"))
    for (name, plan), row in zip(plans.items(), rows, strict=True):
        assert 0.8 <= plan.fp4_share(shapes()) == plan.achieved and plan.target == 0.8 and plan.iteration == 3
        assert row[1] == f"{plan.achieved:.2%}" and float(row[5]) == pytest.approx(plan.solver.gap, rel=0.1, abs=1e-12)
        assert float(row[2]) == pytest.approx(predictions.total_loss_divergence(plan.linears), rel=1e-3)
        assert float(row[3]) == pytest.approx(predictions.total_weight_divergence(plan.linears), rel=1e-3)
        assert plan.objective == ("snip" if name == "best" else name.rstrip("_01"))
    losses = [float(row[4]) for row in rows]
    assert losses[0] == min(losses) and losses[0] < losses[1], "best is no worse by its own objective"
    assert plans["random_0"].linears != plans["random_1"].linears
    assert float(rows[0][4]) == pytest.approx(plans["best"].solver.objective, rel=1e-3)


def test_precision_and_memory_together(generate, tmp_path, monkeypatch):
    asked = []

    def together(planner, world_size, gib):
        t = planner.config.training
        asked.append((world_size, gib, t.micro_batch_size, t.train_iters))
        plan = Plan.uniform([shape.name for shape in planner.shapes], "fp8", iteration=3)
        memory = MemoryPlan.by_hand(("keep", "full"), planner.config, 1)
        return SimpleNamespace(precision=plan, memory=memory, told="of 2 blocks, 1 full, 1 keep")

    monkeypatch.setattr(generate_plan, "plan_together", together)
    words = ["--memory-gib", "24", "--world-size", "4", "--micro-batch-size", "2", "--snip-target", "0.6"]
    said = generate(*words)
    assert asked == [(4, 24.0, 2, 4)] and "planned together for 24 GiB: of 2 blocks, 1 full, 1 keep" in said
    best, alone = (Plan.load(tmp_path / f"plans/{name}.json") for name in ("best", "precision_alone"))
    assert best.achieved == 0 and alone.achieved >= 0.6 and "precision_alone" in said
    memory, path = MemoryPlan.load(tmp_path / "plans/memory_plan.json"), tmp_path / "plans/best.json"
    trained = Config().replace(precision="plan", precision_plan=str(path), global_batch_size=1, train_iters=1)
    assert memory.blocks == ("keep", "full") and memory.precision == precision_of(trained)
    rows = json.loads((tmp_path / "plans/pareto.json").read_text())["plans"]
    assert rows["best"]["bound"] is None and rows["precision_alone"]["bound"] <= rows["precision_alone"]["quality_loss"]


def test_options_are_those_that_were_measured(generate, tmp_path, finished_run):
    stats = json.loads((finished_run / "stats/iter_0000003.json").read_text())
    stats["columns"] = [name.replace("fp8", "mxfp8").replace("fp4", "nvfp4") for name in stats["columns"]]
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    generate("--snip-granularity", "linear", stats=tmp_path / "stats.json")
    plan = Plan.load(tmp_path / "plans/best.json")
    assert {str(precision) for precision in plan.linears.values()} == {"mxfp8", "nvfp4"}


def test_the_frontier(generate, tmp_path):
    generate("--snip-target", "0.62", "--snip-granularity", "gemm")
    found = json.loads((tmp_path / "plans/pareto.json").read_text())
    assert (found["objective"], found["measure"], found["iteration"]) == ("snip", "fp4", 3)
    frontier, best = found["frontier"], found["plans"]["best"]
    targets, losses = [p["target"] for p in frontier], [p["quality_loss"] for p in frontier]
    assert targets == sorted(targets) and targets[0] == 0.0 and targets[-1] == 1.0 and 0.62 in targets
    assert losses == sorted(losses) and losses[-1] > losses[0]
    assert all(p["saved"] >= p["target"] - 1e-9 and p["bound"] <= p["quality_loss"] for p in frontier)
    at_target = next(p for p in frontier if p["target"] == 0.62)
    assert at_target["quality_loss"] == pytest.approx(best["quality_loss"], rel=1e-4)
    assert found["plans"].keys() == set(NAMES)
    for name, row in found["plans"].items():  # in one unit: that of the best's objective
        assert row["bound"] == best["bound"] <= row["quality_loss"], name
        assert row["objective"] == Plan.load(tmp_path / f"plans/{name}.json").objective
    traces = named(shown(tmp_path / "plans/pareto.html")["Trade-off"][0])
    assert len(traces["solved for each share"]["x"]) == len(found["frontier"]) and traces["best"]["text"] == ["best"]


def test_the_trainers_options_hold(generate, tmp_path):
    """Fixed linears bound what can be reached; stages each reach the target; BF16 counts time."""
    generate("--snip-target", "0.4", "--snip-fix", "layers.0.*=fp8", "--snip-objective", "abs_err")
    best = Plan.load(tmp_path / "plans/best.json")
    assert {str(p) for name, p in best.linears.items() if name.startswith("layers.0.")} == {"fp8"}
    found = json.loads((tmp_path / "plans/pareto.json").read_text())
    assert best.objective == found["objective"] == "abs_err"
    assert found["frontier"][-1]["fp4_share"] == pytest.approx(0.5)
    generate("--pipeline-model-parallel-size", "2", "--snip-stage-constraint", "each", "--snip-target", "0.5")
    for name in NAMES:
        plan = Plan.load(tmp_path / f"plans/{name}.json")
        for block in range(2):
            part = [shape for shape in shapes() if shape.name.startswith(f"layers.{block}.")]
            kept = {shape.name: plan.linears[shape.name] for shape in part}
            assert Plan(0, kept).fp4_share(part) >= 0.5
    said = generate("--snip-options", "bf16,fp8", "--snip-granularity", "linear", "--snip-target", "0.3")
    heads, *rows = [re.split(r"  +", line) for line in said.splitlines()[:-1]]
    assert heads[:3] == ["plan", "time saved", "FP4 share"]
    assert all(float(row[1].rstrip("%")) >= 30 and row[2] == "0.00%" for row in rows)
    assert json.loads((tmp_path / "plans/pareto.json").read_text())["measure"] == "time"
    assert {str(p) for p in Plan.load(tmp_path / "plans/best.json").linears.values()} == {"bf16", "fp8"}


def test_a_linear_that_is_not_finite_is_held(generate, finished_run, tmp_path):
    """In every plan, though the rules would not look."""
    stats, name = Statistics.load(finished_run / "stats/iter_0000003.json"), "layers.0.mlp.up_proj"
    changed(stats, name, "update", math.nan).save(tmp_path / "nan.json")
    said = generate("--load", str(finished_run / "checkpoints"), "--snip-target", "0.7", stats=tmp_path / "nan.json")
    assert f"held at the base option, as statistics are not finite: {name}\n" in said
    for plan in NAMES:
        assert str(Plan.load(tmp_path / f"plans/{plan}.json").linears[name]) == "fp8", plan


def test_a_target_out_of_reach_of_what_is_finite(generate, finished_run, tmp_path):
    """The linears that are held are named; nobody fixed them."""
    stats = Statistics.load(finished_run / "stats/iter_0000003.json")
    changed(stats, "layers.0.mlp.up_proj", "update", math.nan).save(tmp_path / "nan.json")
    held = "held at the base option, as statistics are not finite: "
    with pytest.raises(ValueError, match=rf"target 1 is out of reach: .*; {held}layers\.0\.mlp\.up_proj$"):
        generate("--snip-target", "1", stats=tmp_path / "nan.json")
    for name in stats.names:
        stats = changed(stats, name, "token/fp4", math.nan)
    stats.save(tmp_path / "nan.json")
    with pytest.raises(ValueError, match=rf"at most 0 .*; {held}layers\.0\..*_proj and 10 more$"):
        generate("--snip-target", "0.5", stats=tmp_path / "nan.json")


def test_without_updates_there_are_plans_by_the_loss(generate, finished_run, tmp_path):
    loss = tmp_path / "loss.json"
    without_updates(Statistics.load(finished_run / "stats/iter_0000003.json")).save(loss)
    with pytest.raises(ValueError, match="statistics of iteration 3 have no (update|own/fp8)"):
        generate("--snip-weight", "1", stats=loss)
    with pytest.raises(ValueError, match="have no error/fp8/dgrad/grad_output"):
        generate("--snip-objective", "abs_err", stats=loss)
    said = generate(stats=loss)
    rows = said.splitlines()[1:6]
    assert [row.split()[0] for row in rows] == ["best", "random_0", "random_1", "layer_id", "layer_type"]
    assert [re.split(r"  +", row)[3] for row in rows] == ["-"] * 5, "no weight divergence"
    assert (
        "no abs_err and rel_err: these statistics cover only fprop's operands; probe with `megatron-snip probe`" in said
    )


def test_a_rule_plans_formats_that_were_not_measured(generate, finished_run, tmp_path):
    """Nothing predicts what its plans cost."""
    without_updates(Statistics.load(finished_run / "stats/iter_0000003.json")).save(tmp_path / "loss.json")
    words = "--snip-objective", "layer_id", "--snip-options", "mxfp8,mxfp4"
    said = generate(*words, stats=tmp_path / "loss.json")
    assert [re.split(r"  +", row)[2] for row in said.splitlines()[1:6]] == ["-"] * 5
    assert (tmp_path / "plans/pareto.html").is_file()


def test_words_of_the_authors_workflow(finished_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--snip-target", "0.75", "--num-random", "5", "--random-seed", "0"]
    main(["--stats", str(finished_run / "stats/iter_0000003.json"), *words])
    plans = {*NAMES, "random_2", "random_3", "random_4"}
    assert {p.name for p in (tmp_path / "plans").iterdir()} == {
        *(f"{n}.json" for n in plans),
        "pareto.json",
        "pareto.html",
    }
    assert "best" in capsys.readouterr().out


def test_seeds_are_consecutive(generate, tmp_path):
    generate("--random-seed", "3")
    third = Plan.load(tmp_path / "plans/random_1.json")
    generate("--random-seed", "4", "--num-random", "1")
    assert Plan.load(tmp_path / "plans/random_0.json").linears == third.linears


def test_where_the_model_comes_from(generate, finished_run, tmp_path):
    """The statistics themselves; the run folder around them, a checkpoint and options say the same."""
    shutil.copy(finished_run / "stats/iter_0000003.json", tmp_path / "alone.json")
    with pytest.raises(ValueError, match="2 is not a multiple of 3"):
        generate("--pipeline-model-parallel-size", "3", stats=tmp_path / "alone.json")
    from_run = generate()
    assert generate(stats=tmp_path / "alone.json") == from_run
    staged = ["--pipeline-model-parallel-size", "2", "--snip-stage-constraint", "each"]
    assert generate(*staged, stats=tmp_path / "alone.json") == generate(*staged)
    assert generate("--load", str(finished_run / "checkpoints"), stats=tmp_path / "alone.json") == from_run
    model = [word for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
             "num_query_groups") for word in (f"--{name.replace('_', '-')}", str(TINY[name]))]  # fmt: skip
    assert generate(*model, stats=tmp_path / "alone.json") == from_run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--snip-target", "1.5"], "--snip-target is 1.5; give a share, 0 to 1"),
        (["--snip-weight", "-1"], "--snip-weight is -1.0; give 0 or more"),
        (["--snip-weight", "nan"], "--snip-weight is nan; give 0 or more"),
        (["--snip-target", "0.5", "--snip-options", "fp8"],
         r"--snip-target 0.5 is more than the options fp8 can save \(0.000\); lower it or add an option"),
        (["--snip-target", "0.9", "--snip-fix", "layers.1.*=fp8"], "target 0.9 is out of reach: at most 0.5"),
        (["--snip-options", "fp8,fp3"], "--snip-options fp8,fp3: fprop: unknown format 'fp3'; known: bf16"),
        (["--snip-options", "fp8,mxfp4"],
         "statistics of iteration 3 have no token/mxfp4; measured formats: fp4, fp8, with updates; probe"),
        (["--snip-granularity", "layer"], "invalid choice 'layer' for argument '--snip-granularity'"),
        (["--snip-objective", "ggn"], "unknown objective 'ggn'; known: snip, abs_err, rel_err, random"),
        (["--num-layers", "3"], "has 14 linears, the model has 21; layers.2.self_attn.q_proj is not"),
        (["--ffn-hidden-size", "384"], "layers.0.mlp.gate_proj is 256 x 128 in the statistics and 384 x 128 in the"),
        (["--num-random", "-1"], "--num-random is -1, --random-seed 0; give 0 or more"),
        (["--gemm-times", "none.json"], "none.json: cannot read"),
        (["--optoins", "fp8"], "unknown option --optoins; did you mean"),
    ],
)  # fmt: skip
def test_bad_options(words, said, generate):
    with pytest.raises(ValueError, match=said):
        generate(*words)


UP = "layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda linears: linears.update(foo=linears[UP]),
         "has 15 linears, the model has 14; foo is 256 x 128 in the statistics and not there in the model"),
        (lambda linears: linears.update({"lm_head.x": linears[UP]}), "lm_head.x is 256 x 128 in the statistics and"),
        (lambda linears: linears.pop("layers.1.mlp.up_proj"), "layers.1.mlp.up_proj is not there in the statistics"),
        (lambda linears: linears.clear(), "field linears is empty; collect the statistics again"),
        (lambda linears: linears[UP].update(in_features=0), rf"linears\['{UP}'\].in_features is 0"),
    ],
)  # fmt: skip
def test_statistics_of_something_else(edit, said, generate, finished_run, tmp_path):
    values = json.loads((finished_run / "stats/iter_0000003.json").read_text())
    edit(values["linears"])
    (tmp_path / "other.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"other.json.*{said}"):
        generate("--load", str(finished_run / "checkpoints"), stats=tmp_path / "other.json")


def test_statistics_alone_tell_the_model(generate, finished_run, tmp_path):
    """Whatever its linears are called."""
    values = json.loads((finished_run / "stats/iter_0000003.json").read_text())
    linears = {name.replace("layers", "h"): linear for name, linear in values["linears"].items()}
    linears["h.1.extra"] = linears["h.1.mlp.up_proj"]
    (tmp_path / "alone.json").write_text(json.dumps({**values, "linears": linears}))
    generate("--snip-target", "0.5", stats=tmp_path / "alone.json")
    assert all(Plan.load(tmp_path / f"plans/{name}.json").linears.keys() == linears.keys() for name in NAMES)


def test_files_that_are_none(generate, finished_run, tmp_path):
    with pytest.raises(ValueError, match="none.json: cannot read the statistics"):
        generate("--load", str(finished_run / "checkpoints"), stats=tmp_path / "none.json")
    damaged = tmp_path / "stats/iter_1.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json: .*; give the model's shape by --load or"):
        generate(stats=damaged)
    with pytest.raises(ValueError, match="iter_1.json: this statistics is not JSON"):
        generate("--load", str(finished_run / "checkpoints"), stats=damaged)
    Plan.uniform(["layers.0.mlp.up_proj"], "fp4").save(tmp_path / "plan.json")
    with pytest.raises(
        ValueError, match="plan.json: this is a plan, not statistics; give the file that it was made from"
    ):
        generate(stats=tmp_path / "plan.json")


def test_every_plan_trains(generate, finished_run, tmp_path, monkeypatch):
    """From the checkpoint that they were made for, two iterations, with what each costs the loss."""
    generate("--snip-target", "0.5")
    monkeypatch.setattr(runtime, "stop", lambda: None)
    monkeypatch.setattr(loop, "write_report", lambda run_dir: run_dir)
    monkeypatch.setattr(loop, "format_summary", lambda run_dir: "")
    common = {"train_iters": 6, "load": str(finished_run / "checkpoints"), "snip_bf16_eval_interval": 1}
    for name in NAMES:
        options = {
            "precision": "plan",
            "precision_plan": str(tmp_path / f"plans/{name}.json"),
            "run_dir": str(tmp_path / name),
            "save": str(tmp_path / name / "saves"),
        }
        loop.train(Config().replace(**{**TINY, **common, **options}))
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [row["iteration"] for row in rows] == [5, 6], name
        assert all(row["snip/measured_loss_divergence"] != 0 for row in rows), name


def test_linears_of_another_kind_of_model(tmp_path):
    """As `attach` measures them; the rule by kinds of linear knows nothing of them."""
    linears = [LinearShape(f"blocks.{i}", 64, 64, block=i) for i in range(4)]
    ones = [1.0] * 4
    token = {"fp8": [0.0] * 4, "fp4": ones}
    without_updates(statistics(linears, token, ones, dict.fromkeys(token, ones))).save(tmp_path / "stats.json")
    config = Config().replace(snip_options="fp8,fp4")
    said = generate_plan.generate(config, tmp_path / "stats.json", tmp_path / "plans", 1, 0)
    assert [row.split()[0] for row in said.splitlines()[1:4]] == ["best", "random_0", "layer_id"]
    assert "no abs_err and rel_err: these statistics" in said
