"""Runs `megatron-snip dashboard` from a checkout."""

from megatron_snip.cli.__main__ import script

if __name__ == "__main__":
    script("dashboard")
