#!/usr/bin/env bash
# Pretrain a model of Llama-3.1-70B's shape under SNIP: eight nodes of 8 GPUs, the same command on each with its NODE_RANK.
# Arguments, environment and the option arrays are explained in examples/train_llama.sh.
set -euo pipefail

# shellcheck disable=SC2034  # both are read by the sourced script
name=llama_70b NUM_NODES="${NUM_NODES:-8}"

# shellcheck source=examples/train_llama.sh
. "$(dirname "${BASH_SOURCE[0]}")/../train_llama.sh"
