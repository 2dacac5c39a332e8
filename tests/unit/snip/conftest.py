"""A small run whose probe can be called by hand."""

from __future__ import annotations

import pytest

TINY = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1,
    "seq_length": 128, "vocab_size": 128, "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 9, "lr": 1e-2,
    "lr_decay_style": "constant", "mock_data": True, "clip_grad": 0.05, "precision": "snip", "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="session")
def snip_parts(lone_mesh):
    """Call it with options: the parts of a run in float32 after two updates, so that Adam's moments are not zero."""
    from megatron_snip import runtime
    from megatron_snip.config import Config
    from megatron_snip.train.setup import build, check

    def make(**options):
        config, plan = check(Config().replace(**{**TINY, **options}), 1)
        parts = build(config, runtime.start("gloo", 1.0), plan)
        size = config.training.global_batch_size
        results = [parts.stepper.step(parts.train_loader.batch((i - 1) * size), i) for i in (1, 2)]
        assert not any(result.skipped for result in results)
        return parts

    return make
