"""The models in pipeline stages, and their FLOPs.  Imports every file that registers a model."""

from __future__ import annotations

from megatron_snip.model import llama, qwen3

__all__ = ["llama", "qwen3"]
