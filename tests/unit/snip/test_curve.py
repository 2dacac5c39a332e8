"""The measured curve: where it breaks, and its picture."""

from __future__ import annotations

import math

import pytest

from megatron_snip.snip.curve import Point, where_it_breaks
from megatron_snip.train.pictures.curve_picture import measured_curve


def curve(increases, predicted=None, error=0.001) -> list[Point]:
    steps = len(increases) - 1
    predicted = increases if predicted is None else predicted
    return [Point(i / steps, p, x, error) for i, (x, p) in enumerate(zip(increases, predicted))]


def test_it_breaks_at_the_step_that_costs_most_beyond_all_before():
    """The second step is more than the first, too, but by less."""
    said = where_it_breaks(curve([0.0, 0.1, 0.25, 0.4, 4.0, 1.8]))
    assert said == "The curve breaks at 80.0%: the step from 60.0% costs 3.6 nats, and all before 0.4."


def test_a_tenth_is_a_step_however_finely_it_is_measured():
    points = [Point(share, x, x, 0.001) for share, x in ((0.0, 0.0), (0.5, 0.4), (0.9, 1.0), (0.95, 1.7), (1.0, 2.5))]
    said = where_it_breaks(points)
    assert said == "The curve breaks at 100.0%: the step from 90.0% costs 1.5 nats, and all before 1."
    assert where_it_breaks([points[0], *points[2:]]) == said


def test_it_breaks_where_sums_fail():
    said = where_it_breaks(curve([0.0, 0.1, 0.2, 0.3], predicted=[0.0, 0.1, 0.15, 0.2]))
    assert said == "The curve breaks at 66.7%, where 0.2 +- 0.001 nats measured are more than the 0.15 predicted."
    both = where_it_breaks(curve([0.0, 0.1, 0.2, 3.0], predicted=[0.0, 0.05, 0.2, 0.2]))
    assert both == (
        "The curve breaks at 100.0%: the step from 66.7% costs 2.8 nats, and all before 0.2; at 33.3% "
        "0.1 +- 0.001 nats measured are more than the 0.05 predicted."
    )


@pytest.mark.parametrize(
    "points",
    [
        curve([0.0, 0.1, 0.2, 0.3]),
        curve([0.0, 0.1, 0.2, 0.3], predicted=[0.0, 0.2, 0.3, 0.6]),
        curve([0.0, 0.1, 0.2, 0.3], predicted=[None] * 4),
        curve([0.0, 0.1, 0.21, 3.0], error=2.0),
        curve([0.0, 0.1, 0.2, 0.3], predicted=[0.0, 0.0999, 0.1985, 0.2985]),
        curve([0.0, 3.0]),
        curve([0.0, 0.01, 0.04, 0.09, 0.16, 0.25, 0.36, 0.49, 0.64], error=0.0),
        curve([0.2, -0.3, -0.2, 0.1, 0.0], predicted=[0.3] * 5, error=0.2),
    ],
    ids=[
        "as predicted",
        "less than predicted",
        "nothing predicted",
        "within errors",
        "near",
        "one step",
        "squares",
        "luck",
    ],
)
def test_it_does_not_break(points):
    assert where_it_breaks(points).startswith("The curve does not break: ")


def test_what_cannot_be_judged():
    assert where_it_breaks([]) == "Nothing was measured."
    said = where_it_breaks(curve([0.0, math.nan, 0.2, 5.0]))
    assert said == "The curve breaks at 33.3%: the loss is not finite."


def test_the_picture():
    figure = measured_curve(curve([0.0, 0.1, math.nan], predicted=[0.0, None, 0.3]), "share")
    measured, predicted = figure["data"]
    assert measured["x"] == [0.0, 0.5, 1.0] and measured["y"] == [0.0, 0.1, None]
    assert measured["error_y"]["array"] == [0.002] * 3, "two standard errors"
    assert (predicted["name"], predicted["x"], predicted["y"]) == ("predicted", [0.0, 1.0], [0.0, 0.3])
    assert figure["layout"]["xaxis"]["title"]["text"] == "share"
    (alone,) = measured_curve(curve([0.0, 0.1], predicted=[None, None]), "share")["data"]
    assert alone["name"] == "measured"
