"""Compiled casts for CPUs and GPUs, bit for bit the same as the specification in cast.py."""
