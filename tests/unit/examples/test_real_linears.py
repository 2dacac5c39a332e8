"""examples/study/real_linears.py: rank correlation, a picture, and the plans by what was measured and predicted."""

from __future__ import annotations

import json

import pytest
from scipy.stats import spearmanr

from examples.study import real_linears
from megatron_snip.errors import UserError
from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.plan.plan_file import Plan
from tests.unit.snip.made_up import statistics

NAMES = [f"layers.{i}.mlp.{kind}_proj" for i in range(2) for kind in ("gate", "up", "down")]
SHAPES = [LinearShape(name, 64, 64, int(name[7]), name.split(".")[-1][:-5]) for name in NAMES]
FP4 = LinearPrecision.uniform("fp4")
PREDICTED = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]  # nats: cheap first
PROSE, CODE = [0.07, 0.02, 0.03, 0.04, 0.05, 0.01], [0.05, 0.04, 0.03, 0.02, 0.05, 0.03]


def judged(path, increases):
    rows = [{"plan": "bf16", "loss": {"all": [3.0, 0.1]}}, {"plan": "fp4", "increase": {"all": [9.0, 0.1]}}]
    rows += [{"plan": f"{name}=fp4", "increase": {"all": [each, 0.03]}} for name, each in zip(NAMES, increases)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def stats(tmp_path):
    token = {"fp8": [0.0] * 6, "fp4": [each / 50 for each in PREDICTED]}  # of 100 tokens
    path = tmp_path / "stats.json"
    statistics(SHAPES, token, [1.0] * 6, {"fp8": [0.0] * 6, "fp4": [0.0] * 6}).save(path)
    return str(path)


def test_prediction_and_measurement_are_compared_and_make_a_plan_each(stats, tmp_path, capsys):
    words = [stats, judged(tmp_path / "prose.jsonl", PROSE), judged(tmp_path / "code.jsonl", CODE)]
    real_linears.main([*words, "--output", str(tmp_path / "out"), "--snip-options", "fp8,fp4", "--snip-target", "0.5"])
    found = json.loads((tmp_path / "out/linears.json").read_text())
    measured = [0.06, 0.03, 0.03, 0.03, 0.05, 0.02]
    assert found["sums"] == pytest.approx([0.21, 0.22]) and found["format"] == "fp4"
    for name, prediction, truth in zip(NAMES, PREDICTED, measured, strict=True):
        expected = {"predicted": prediction, "measured": truth, "error": 0.03 * 2**0.5 / 2}
        assert found["linears"][name] == pytest.approx(expected)
    assert found["rank correlation"] == pytest.approx(spearmanr(PREDICTED, measured).statistic)
    assert "6 linears in fp4: rank correlation" in capsys.readouterr().out
    assert (tmp_path / "out/linears.png").read_bytes().startswith(b"\x89PNG")
    low = {
        plan: [name for name, each in Plan.load(tmp_path / f"out/{plan}.json").linears.items() if each == FP4]
        for plan in ("snip", "oracle")
    }
    assert low["snip"] == NAMES[:3]
    assert len(low["oracle"]) == 3 and not {NAMES[0], NAMES[4]} & set(low["oracle"])


@pytest.mark.parametrize("prose", [PROSE, PROSE[:4]], ids=["one", "both"])
def test_a_file_that_has_not_come_to_its_end(stats, tmp_path, prose):
    words = [stats, judged(tmp_path / "prose.jsonl", prose), judged(tmp_path / "code.jsonl", CODE[:4])]
    with pytest.raises(
        UserError, match=r"code.jsonl: not each has all 6 linears; let judge.py --alone come to its end"
    ):
        real_linears.main([*words, "--output", str(tmp_path / "out")])
