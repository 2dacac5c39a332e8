"""Verified checkpoints: their content, reading and writing, and the lock on their folder."""
