"""Megatron's parallel layers over a mesh: tensor, pipeline and data parallelism."""
