"""A small run whose probe can be called by hand."""

from __future__ import annotations

import pytest

TINY = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1,
    "seq_length": 128, "vocab_size": 128, "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 9, "lr": 1e-2,
    "lr_decay_style": "constant", "mock_data": True, "clip_grad": 0.05, "precision": "snip", "seed": 3,
}  # fmt: skip
AGE = 1000  # updates made


def age(optimizer) -> None:
    """Give Adam's moments the sizes that a thousand updates leave: one gradient moves them little.

    At the third update u is nearly the gradient's sign, and the last bit of one gradient shows in its first digit.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    for name in optimizer.parameters:
        m, v = optimizer.moments(name)
        size = v.mean().sqrt() / (1 - 0.999**2) ** 0.5  # rms of the gradients so far
        v.copy_((size * torch.empty_like(v).uniform_(0.5, 2.0, generator=generator)).square())
        m.copy_(0.1 * size * torch.randn(m.shape, generator=generator))
    optimizer.set_steps(AGE)


@pytest.fixture(scope="session")
def snip_parts(lone_mesh):
    """Call it with options: the parts of a run in float32, two updates old, with moments as of a long run."""
    from megatron_snip import runtime
    from megatron_snip.config import Config
    from megatron_snip.train.setup import build, check

    def make(**options):
        config, plan = check(Config().replace(**{**TINY, **options}), 1)
        parts = build(config, runtime.start("gloo", 1.0), plan)
        size = config.training.global_batch_size
        results = [parts.stepper.step(parts.train_loader.batch((i - 1) * size), i) for i in (1, 2)]
        assert not any(result.skipped for result in results)
        age(parts.optimizer)
        return parts

    return make
