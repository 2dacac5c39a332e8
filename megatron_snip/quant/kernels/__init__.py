"""Compiled casts, one file per device, bit for bit the same as the specification in cast.py."""
