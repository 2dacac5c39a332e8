"""The commands of `megatron-snip`."""
