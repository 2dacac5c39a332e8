"""A short run with checkpoints and statistics, for the tools that work offline."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1,
    "seq_length": 128, "vocab_size": 128, "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 4, "lr": 1e-2,
    "lr_decay_style": "constant", "mock_data": True, "exit_signal_handler": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def finished_run(lone_mesh, tmp_path_factory) -> Path:
    """Run folder of four iterations with checkpoints at 2 and 4 and a probe of one batch before 3."""
    from megatron_snip import runtime
    from megatron_snip.config import Config
    from megatron_snip.train import loop

    folder = tmp_path_factory.mktemp("finished") / "run"
    snip = {"precision": "snip", "snip_start": 3, "snip_interval": 9, "snip_probe_tokens": 256, "snip_weight": 1.0,
            "snip_trial_tokens": 256}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "stop", lambda: None)
        patch.setattr(loop, "write_report", lambda run_dir: run_dir)
        patch.setattr(loop, "format_summary", lambda run_dir: "")
        loop.train(Config().replace(**TINY, **snip, save_interval=2, run_dir=str(folder)))
    return folder
