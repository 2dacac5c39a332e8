"""Statistics files: round trip bit for bit, and errors that name file and field."""

from __future__ import annotations

import json
import math

import pytest

from megatron_snip.snip.stats import ProbeStats
from tests.unit.snip.made_up import linear_stats, probe_stats


def stats() -> ProbeStats:
    linear = linear_stats({"fp4": 0.1 + 0.2, "fp8": 1e-300}, 3.5, {"fp4": math.pi, "fp8": 0.0})
    return probe_stats(100, 2.5, 4096, {"layers.0.mlp.up_proj": linear})


def test_round_trip(tmp_path):
    stats().save(tmp_path / "stats" / "iter_0000100.json")
    assert ProbeStats.load(tmp_path / "stats" / "iter_0000100.json") == stats()


def test_non_finite_numbers_survive(tmp_path):
    found = probe_stats(1, math.inf, 2, {"a": linear_stats({"fp4": math.nan}, 1.0, {"fp4": -math.inf})})
    found.save(tmp_path / "s.json")
    again = ProbeStats.load(tmp_path / "s.json")
    assert math.isinf(again.loss) and math.isnan(again.linears["a"].token_square_sum["fp4"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda v: v.pop("tokens"), "field tokens is missing"),
        (lambda v: v.update(extra=1), "field extra is unknown"),
        (lambda v: v.update(version=9), "field version is 9"),
        (lambda v: v.update(loss="2"), "field loss is '2'"),
        (lambda v: v.update(tokens=1.5), "field tokens is 1.5"),
        (lambda v: v["linears"]["layers.0.mlp.up_proj"].update(in_features=-4), r"up_proj'\]\.in_features is -4"),
        (lambda v: v["linears"]["layers.0.mlp.up_proj"].update(fprop_update_sq=2), r"\.fprop_update_sq is 2"),
        (lambda v: v["linears"].update(a=3), r"linears\['a'\] is 3"),
        (lambda v: v["linears"]["layers.0.mlp.up_proj"].pop("own_sq"), r"up_proj'\]\.own_sq is missing"),
        (
            lambda v: v["linears"]["layers.0.mlp.up_proj"].update(own_sq={"fp4": "x"}),
            r"own_sq is \{'fp4': 'x'\}",
        ),
    ],
)
def test_errors(tmp_path, change, field):
    path = tmp_path / "s.json"
    stats().save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=field) as caught:
        ProbeStats.load(path)
    assert str(path) in str(caught.value) and "anew" in str(caught.value)
    path.write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        ProbeStats.load(path)
