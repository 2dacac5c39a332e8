"""What the tests of the study run in a process of its own."""

from __future__ import annotations

from pathlib import Path

from examples.study import quality, run, tabulate
from examples.study.plans import FP4, FP8, probe
from examples.study.planted import linears_of, make_parts
from examples.study.truth import batches, loss_of, shifted
from megatron_snip.snip.predict.objectives import ObjectiveInputs, quality_loss

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
    stats, shapes = probe(parts, 1), parts.coordinator.shapes
    parts.train_loader.close()
    return {
        arm: [
            quality.quality_of(arm, stats, shapes, [FP8, FP4]),
            quality_loss("snip", ObjectiveInputs(shapes, [FP8, FP4], stats, weight))[0],
        ]
        for arm, weight in (("dL", 0.0), ("dL+own", 1.0))
    }


def shifted_losses(folder: Path) -> dict[str, tuple[float, float, float]]:
    """By linear, the loss without a shift, with one, and after it."""
    shape = {"num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 1}
    _, parts = make_parts(folder, micro_batch_size=2, global_batch_size=2, **shape)
    over, found = batches(parts, 0, 1, 2), {}
    for name, linear in linears_of(parts).items():
        before = loss_of(parts, over)
        with shifted(linear, "fp4", 1.0):
            inside = loss_of(parts, over)
        found[name] = before, inside, loss_of(parts, over)
    parts.train_loader.close()
    return found
