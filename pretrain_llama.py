"""Pretrain a Llama: `torchrun --rdzv-backend one_node --nproc_per_node N pretrain_llama.py [options]`."""

from __future__ import annotations

import sys

from megatron_snip.cli.train import main

if __name__ == "__main__":
    main(sys.argv[1:])
