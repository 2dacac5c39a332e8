"""Casts to low-precision formats in plain torch, which are the specification, and how they round."""
