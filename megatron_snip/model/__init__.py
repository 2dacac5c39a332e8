"""The models in pipeline stages, and their FLOPs; each file here that registers a model is imported."""

from __future__ import annotations

from megatron_snip.model import llama, qwen3

__all__ = ["llama", "qwen3"]
