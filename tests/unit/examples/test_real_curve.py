"""examples/study/real_curve.py: what the judge measured, by share, as figures and a picture."""

from __future__ import annotations

import json

from examples.study.real_curve import main


def test_each_share_and_both_ends(tmp_path):
    folder, lines = tmp_path / "fp8,fp4", [{"plan": "bf16", "loss": {"prose": [3.0, 0.1]}}]
    for share, predicted in ((0.9, 0.8), (0.25, 0.1)):
        made = folder / str(share)
        made.mkdir(parents=True)
        plans = {arm: {"loss_divergence": predicted * (1 + i)} for i, arm in enumerate(("best", "layer_id"))}
        (made / "pareto.json").write_text(json.dumps({"plans": plans}))
        lines += [{"plan": str(made / f"{arm}.json"), "increase": {"all": [share, 0.01]}} for arm in plans]
    lines += [{"plan": fmt, "increase": {"all": [i, 0.02]}} for i, fmt in enumerate(("fp8", "fp4"))]
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, lines)))
    main([str(folder), "--output", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")])
    (curve,) = json.loads((tmp_path / "a.json").read_text())["curves"]
    found = {(row["arm"], row["share"]): (row["increase"], row["predicted"]) for row in curve["rows"]}
    assert curve["options"] == ["fp8", "fp4"] and found == {
        ("everywhere", 0.0): (0, None), ("everywhere", 1.0): (1, None),
        ("snip", 0.25): (0.25, 0.1), ("snip", 0.9): (0.9, 0.8),
        ("layer_id", 0.25): (0.25, 0.2), ("layer_id", 0.9): (0.9, 1.6),
    }  # fmt: skip
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
