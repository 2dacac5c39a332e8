"""What a float32 run's probe holds at most, by the allocator's count.

A block's activations once more, and of every weight's gradient ENOUGH_ROWS rows or more a format.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from megatron_snip.snip.measure.linear_probe import row_step

#: Weights larger than activations, the other way round, and logits larger than either.
SHAPES = {
    "weights": {"hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 8, "num_query_groups": 8},
    "activations": {"micro_batch_size": 2},
    "vocabulary": {"vocab_size": 8192, "hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 4},
}


def live_peak(case: Callable[[], object]) -> int:
    """Bytes of tensors alive at once at most, beyond those that were there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        case()
    events = profiler.profiler.kineto_results.events()
    return max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_of_a_probe(shape, snip_parts):
    parts = snip_parts(num_layers=4, **SHAPES[shape])
    size = len(parts.train_loader.make(0).tokens.flatten(0, 1))
    batch = parts.train_loader.batch(2 * size)
    probe = parts.coordinator.probe
    run_pass = parts.stepper.pass_runner(batch, 3)

    def iteration() -> None:
        run_pass()
        parts.optimizer.zero_grad()

    def probing() -> None:
        probe.run(run_pass, parts.optimizer.zero_grad, 3)

    iteration()
    probing()  # what is made once is there now
    added = live_peak(probing) - live_peak(iteration)
    weights = [linear.weight for linear in parts.linears.values()]
    rows = [len(range(0, len(weight), row_step(len(weight)))) for weight in weights]
    copies = len(probe.formats) * sum(4 * n * weight.shape[1] for n, weight in zip(rows, weights, strict=True))
    block = [linear for name, linear in parts.linears.items() if name.startswith("layers.0.")]
    activations = 4 * batch.tokens[0].numel() * sum(linear.in_features + linear.out_features for linear in block)
    print(f"\n{shape}: {added} bytes; copies {copies}, activations {activations}")
    assert len(probe.formats) == 2
    assert added <= copies + activations
    assert added > 0.5 * copies, "the count sees the copies"
