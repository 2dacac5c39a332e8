"""The statistics matrix and its file: round trip bit for bit, errors that name file and field, means."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from megatron_snip.quant import LinearPrecision, LinearShape
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.predict.divergence import loss_divergence
from tests.unit.snip.made_up import assert_same, changed, statistics

NAME = "layers.3.mlp.up_proj"
UP = LinearShape(NAME, 8, 4, block=3, kind="up", reads="layers.3.mlp", other_flops=5)
DOWN = LinearShape("layers.3.mlp.down_proj", 4, 8, block=3, kind="down", reads="layers.3.mlp.down_proj")


def stats(value: float = 0.1 + 0.2, **fields) -> Statistics:
    made = statistics([UP], {"fp4": [value], "fp8": [1e-300]}, [3.5], {"fp4": [math.pi], "fp8": [0.0]})
    return dataclasses.replace(made, **{"iteration": 100, "loss": 2.5, "tokens": 4096, **fields})


def test_round_trip(tmp_path):
    stats().save(tmp_path / "stats" / "iter_0000100.json")
    assert_same(Statistics.load(tmp_path / "stats" / "iter_0000100.json"), stats())
    two = statistics([DOWN, UP], {"fp4": [1.0, 2.0]}, [3.0, 4.0], {"fp4": [5.0, 6.0]})
    two.save(tmp_path / "two.json")
    assert_same(Statistics.load(tmp_path / "two.json"), two)
    assert Statistics.load(tmp_path / "two.json").names == [DOWN.name, UP.name]


def test_non_finite_numbers_survive(tmp_path):
    found = statistics(
        [LinearShape("a", 8, 4, 0, "up")], {"fp4": [math.nan]}, [1.0], {"fp4": [-math.inf]}, loss=math.inf
    )
    found.save(tmp_path / "s.json")
    again = Statistics.load(tmp_path / "s.json")
    assert math.isinf(again.loss) and math.isnan(again.column("token/fp4")[0])
    assert again.column("own/fp4")[0] == -math.inf
    assert_same(again, found)


def linear(values: dict) -> dict:
    return values["linears"][NAME]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda v: v.pop("tokens"), "field tokens is missing"),
        (lambda v: v.update(extra=1), "field extra is unknown"),
        (lambda v: v.update(version=9), "field version is 9"),
        (lambda v: v.update(loss="2"), "field loss is '2'"),
        (lambda v: v.update(tokens=1.5), "field tokens is 1.5"),
        (lambda v: v["columns"].append("update"), "field columns names a column twice"),
        (lambda v: v.update(columns="update"), "field columns is 'update': expected array, got str"),
        (lambda v: v["columns"].pop(), r"up_proj'\]\.values has \d+ numbers, but the file has \d+"),
        (lambda v: v["linears"].clear(), "field linears is empty"),
        (lambda v: linear(v).update(in_features=-4), r"up_proj'\]\.in_features is -4"),
        (lambda v: linear(v).update(in_features=0), r"up_proj'\]\.in_features is 0: expected int >= 1"),
        (lambda v: linear(v).pop("other_flops"), r"up_proj'\]\.other_flops is missing"),
        (lambda v: linear(v).update(block=10**9), r"up_proj'\]\.block is 1000000000: expected int <"),
        (lambda v: linear(v).update(in_features=10**9), r"up_proj'\]\.in_features is 1000000000: expected int <"),
        (lambda v: linear(v).update(other_flops=1 << 60), r"up_proj'\]\.other_flops is 1152921504606846976: expected"),
        (lambda v: linear(v).update(block=-1), r"up_proj'\]\.block is -1: expected int >= 0"),
        (
            lambda v: linear(v).update(kind="norm"),
            r"up_proj'\]\.kind is 'norm', but must be one of q, k, v, o, gate, up, down",
        ),
        (lambda v: v["linears"].update(a=3), r"linears\['a'\] is 3"),
        (lambda v: linear(v).pop("values"), r"up_proj'\]\.values is missing"),
        (lambda v: linear(v)["values"].pop(), r"up_proj'\]\.values has \d+ numbers, but the file has \d+"),
        (lambda v: linear(v)["values"].append(1.0), r"up_proj'\]\.values has \d+ numbers, but the file has \d+"),
        (lambda v: linear(v)["values"].__setitem__(1, "x"), r"up_proj'\]\.values\[1\] is 'x'"),
        (lambda v: linear(v)["values"].__setitem__(1, True), r"up_proj'\]\.values\[1\] is True"),
    ],
)
def test_errors(tmp_path, change, field):
    path = tmp_path / "s.json"
    stats().save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=field) as caught:
        Statistics.load(path)
    assert str(path) in str(caught.value) and "again" in str(caught.value)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        Statistics.load(path)


def test_files_of_the_version_before_are_refused(tmp_path):
    """By their version, before any field of theirs is judged."""
    old = {"version": 3, "iteration": 1, "loss": 2.0, "tokens": 8, "noise_sq": {}, "linears": {"a": {"own_sq": {}}}}
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="old.json: field version is 3, but this code reads version 4; collect the"):
        Statistics.load(tmp_path / "old.json")


def test_a_column_that_was_not_measured():
    assert stats().column("update").tolist() == [3.5] and stats().formats == ["fp4", "fp8"]
    with pytest.raises(
        ValueError, match="iteration 100 have no own/e3m2; measured formats: fp4, fp8, with updates; probe with the"
    ):
        stats().column("own/e3m2")
    with pytest.raises(ValueError, match="have no token/fp4; measured formats: none, with updates;"):
        statistics([UP], {}, [1.0], {}).column("token/fp4")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("column", ["token/fp4", "update", "norm/G", "saturated/fp4/wgrad/input"])
def test_linears_with_a_number_that_is_not_finite(column, bad):
    two = statistics([DOWN, UP], {"fp4": [1.0, 2.0]}, [3.0, 4.0], {"fp4": [5.0, 6.0]})
    assert two.not_finite == () and two.finite.tolist() == [True, True]
    broken = changed(two, UP.name, column, bad)
    assert broken.not_finite == (UP.name,) and broken.finite.tolist() == [True, False]


def test_the_mean_over_batches():
    mean = Statistics.mean([stats(1.0, loss=1.0), stats(4.0, loss=4.0, iteration=101)])
    assert (mean.iteration, mean.loss, mean.tokens, mean.shapes) == (100, 2.5, 4096, (UP,))
    assert mean.columns == stats().columns and mean.column("token/fp4").tolist() == [2.5]
    assert mean.column("error/fp4/fprop/input")[0] == pytest.approx(2.5 + 1e-3)
    assert mean.column("update").tolist() == [3.5] and mean.column("token/fp8").tolist() == [1e-300]
    assert_same(Statistics.mean([stats()]), stats())
    of_two, one = Statistics.mean([stats(), stats()]), stats()
    several_tokens = np.array([name.startswith(("spread/", "top_token/")) for name in one.columns])
    assert np.array_equal(of_two.values, one.values / np.where(several_tokens, 2, 1))


def test_batches_of_unequal_size_have_the_mean_of_their_divergences():
    several = [stats(1.0, tokens=4096), stats(4.0, tokens=1024)]
    options = [LinearPrecision.uniform("fp4"), LinearPrecision.uniform("fp8")]
    expected = np.mean([loss_divergence(one, options) for one in several], axis=0)
    for order in (several, several[::-1]):
        mean = Statistics.mean(order)
        assert mean.tokens == order[0].tokens and loss_divergence(mean, options) == pytest.approx(expected, rel=1e-15)
        assert mean.column("error/fp4/fprop/input")[0] == pytest.approx(2.5 + 1e-3)


def test_the_mean_with_a_nan_is_nan():
    """A finding of one batch is not averaged away."""
    mean = Statistics.mean([stats(), changed(stats(), NAME, "own/fp4", math.nan)])
    assert np.isnan(mean.column("own/fp4")).all() and mean.not_finite == (NAME,)
