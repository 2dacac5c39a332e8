#!/usr/bin/env bash
# Pretrain a model of Llama-3.2-3B's shape under SNIP: one node of 8 GPUs.
# Arguments, environment and the option arrays are explained in examples/train_llama.sh.
set -euo pipefail

# shellcheck disable=SC2034  # both are read by the sourced script
name=llama_3b NUM_NODES="${NUM_NODES:-1}"

# shellcheck source=examples/train_llama.sh
. "$(dirname "${BASH_SOURCE[0]}")/../train_llama.sh"
