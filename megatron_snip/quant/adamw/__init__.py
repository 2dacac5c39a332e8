"""AdamW on BF16 weights without a float32 master: expansions, the specification of a step, and its kernels."""
