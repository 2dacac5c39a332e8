"""Checkpoints that prove themselves: what is in one, how it is written and read, and who may write."""
