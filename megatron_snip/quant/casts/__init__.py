"""Specifies casts to low-precision formats in plain torch, including how they round."""
