#!/usr/bin/env bash
# Wheels for a GPU machine without a network that has torch for CUDA and numpy already:
#   bash benchmarks/gpu_wheels.sh [FOLDER] [PYTHON]          here; by default build/gpu_wheels, for Python 3.12
#   pip install --no-index --no-deps FOLDER/*.whl            there, and then benchmarks/gpu.py
# They are requirements/base.txt without numpy and what comes with torch, and torchao, a peer that
# benchmarks/gpu.py measures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-build/gpu_wheels}
python=${2:-3.12}
already=(torch numpy filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy)
most_mib=64

left_out=$(printf '%s==|' "${already[@]}")
mapfile -t pins < <(grep -hE '^[a-z]' requirements/base.txt | grep -vE "^(${left_out%|})")
torchao=$(grep -E '^torchao==' requirements/dev.txt)
pins+=("$torchao")
mkdir -p "$folder"
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder" --python-version "$python" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_24_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform any "${pins[@]}"
size=$(du -sm "$folder" | cut -f1)
ls -l "$folder"
if [ "$size" -gt "$most_mib" ]; then
    echo "error: $folder has $size MiB, more than $most_mib; leave a package out" >&2
    exit 1
fi
echo "$folder: $size MiB"
