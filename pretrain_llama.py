"""Pretrain a Llama: `torchrun --nproc_per_node N pretrain_llama.py --config FILE.toml [options]`."""

from __future__ import annotations

import sys

from megatron_snip.cli.train import main

if __name__ == "__main__":
    main(sys.argv[1:])
