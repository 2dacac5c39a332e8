"""The picture of a measured curve, as a plotly figure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_snip.snip.curve import Point
from megatron_snip.train.pictures.figures import PALETTE, Figure, axes, line

#: What a target counts.
WHAT = {"fp4": "FP4's share of the linears' FLOPs", "time": "share of modelled GEMM time saved"}


def measured_curve(points: Sequence[Point], what: str) -> Figure:
    """Measured increase of the loss, with two standard errors, and the prediction, over the share.  what: x axis."""
    shares = [point.share for point in points]
    bars = {"type": "data", "array": [2 * point.error for point in points], "thickness": 1.2}
    measured = [point.increase for point in points]
    known = [(point.share, point.predicted) for point in points if point.predicted is not None]
    data = [line("measured", (shares, measured), PALETTE[0], mode="lines+markers", error_y=bars)]
    if known:
        data.append(line("predicted", tuple(zip(*known)), PALETTE[1], mode="lines+markers", dash="dot"))
    layout = axes(what, "loss above BF16's (nats)")
    layout["xaxis"] |= {"tickformat": ".0%", "range": [-0.03, 1.03]}
    return {"data": data, "layout": layout}
