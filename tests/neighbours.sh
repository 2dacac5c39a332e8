#!/usr/bin/env bash
# What `pytest --neighbours DIR` reads: programs that take plans, two versions of Transformer Engine's Python files, and
# the reference quantiser of four over six.
#   bash tests/neighbours.sh DIR
set -euo pipefail
dir="${1:?give a folder}"
python -m pip install --quiet --no-deps --upgrade --target "$dir" torchtitan==0.3.0 spmd_types==0.2.3 \
    nvidia-modelopt==0.47.0 omegaconf antlr4-python3-runtime==4.9.3 "pulp<4" nvidia-ml-py
python -m pip download --quiet --no-deps --dest "$dir" transformer-engine==2.20.2
python -m pip download --quiet --no-deps --dest "$dir" transformer-engine==2.8.0
if [[ ! -e "$dir/fouroversix" ]]; then
    git clone --quiet https://github.com/mit-han-lab/fouroversix "$dir/fouroversix"
fi
git -C "$dir/fouroversix" checkout --quiet dadfad6901d473a734fe71e0b082e70ee993e23a
