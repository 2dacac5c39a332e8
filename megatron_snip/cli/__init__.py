"""The commands of `megatron-snip`; the scripts in tools/ run the same ones from a checkout."""
