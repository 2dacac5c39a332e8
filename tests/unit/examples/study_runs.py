"""What the tests of the study run in a process of its own."""

from __future__ import annotations

from pathlib import Path

from megatron_snip.snip.divergence import near_change, prop_divergence
from megatron_snip.snip.objectives import ObjectiveInputs, quality_loss

from examples.study import quality, run, tabulate
from examples.study.plans import FP4, FP8, probe
from examples.study.planted import linears_of, make_parts

TOY = """
name = "toy"
planted = [[0, 0], [1, 2]]
checkpoints = {middle = 4}
targets = [0.75, 0.5]
truth_batches = 1
token_batches = 2
evaluated_batches = 2
further_steps = 2
further_batch = 2
further_seeds = [1, 2]

[model]
num_layers = 2
hidden_size = 128
ffn_hidden_size = 128
num_attention_heads = 2
num_query_groups = 1
kv_channels = 128
micro_batch_size = 2
global_batch_size = 2
lr_warmup_iters = 1
"""


def runs(folder: Path) -> dict:
    """Runs all, runs again, loses a plan's loss and a seed's, runs again, and tabulates."""
    path, output = folder / "toy.toml", folder / "out"
    path.write_text(TOY)
    words = [str(path), "--output", str(output)]
    made = [run.main(words), run.main(words)]
    lost = [min((output / "toy/middle" / name).iterdir()) for name in ("switch", "further")]
    before = [one.read_text() for one in lost]
    for one in lost:
        one.unlink()
    made.append(run.main(words))
    tabulate.main(
        [str(output), "--output", str(folder / "a.md"), "--figures", str(folder), "--json", f"{folder}/a.json"]
    )
    return {"made": made, "same": [a == one.read_text() for a, one in zip(before, lost, strict=True)]}


def quality_of_arms(folder: Path) -> dict:
    """Statistics of an untrained model, and Q of some arms beside the package's."""
    shape = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 1}
    _, parts = make_parts(folder, precision="snip", snip_start=10**6, micro_batch_size=2, global_batch_size=2, **shape)
    stats, names = probe(parts, 1), list(linears_of(parts))
    inputs = ObjectiveInputs(parts.coordinator.shapes, [FP8, FP4], stats)
    known = quality.terms(stats, names, [FP8, FP4])
    whole = prop_divergence(stats, names, [FP8, FP4])
    near = {name: [near_change(stats, name, fmt) for fmt in ("fp8", "fp4")] for name in names}
    plain = {name: [quality.near_plain(stats, name, fmt) for fmt in ("fp8", "fp4")] for name in names}
    updates = sum(one.update_norm_sq for one in stats.linears.values())
    far = known["prop-far"][:, 1] * 2 * updates
    parts.train_loader.close()
    return {
        "snip": [quality.quality_of("snip", stats, inputs.shapes, inputs.options), quality_loss("snip", inputs)],
        "prop": [far + [b - a for a, b in near.values()], (whole[:, 1] - whole[:, 0]) * updates],
        "between": {name for name, values in plain.items() if any(values)},
        "near": near,
    }
