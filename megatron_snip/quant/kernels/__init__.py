"""Compiled casts, one file per device, each bit for bit the specification in cast.py."""
