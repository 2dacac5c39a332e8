"""A training run inside the test's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY = {
    "num_layers": 1, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 2, "seq_length": 128,
    "vocab_size": 128, "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 4, "lr": 1e-2,
    "lr_decay_style": "constant", "mock_data": True, "exit_signal_handler": False,
}  # fmt: skip


@pytest.fixture
def tiny():
    """Options of a model that trains an iteration in a hundredth of a second."""
    return dict(TINY)


@pytest.fixture
def train_here(lone_mesh, tmp_path, monkeypatch):
    """Call it with options to run the program to its end; returns the rows of its metrics.

    The run folder is <tmp_path>/run; the report is left out, which would take most of the time.
    """
    from megatron_snip import runtime
    from megatron_snip.config import Config
    from megatron_snip.train import loop
    from megatron_snip.train.run.metrics import read_metrics

    monkeypatch.setattr(runtime, "stop", lambda: None)
    monkeypatch.setattr(loop, "write_report", lambda run_dir: run_dir)
    monkeypatch.setattr(loop, "format_summary", lambda run_dir: "")

    def train(**options):
        config = Config().replace(**{**TINY, "run_dir": str(tmp_path / "run"), **options})
        loop.train(config)
        return read_metrics(Path(config.logging.run_dir) / "metrics.jsonl")

    return train
