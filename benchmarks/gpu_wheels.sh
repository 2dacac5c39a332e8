#!/usr/bin/env bash
# Wheels for a GPU machine without a network that has torch for CUDA, numpy and sentencepiece already:
#   bash benchmarks/gpu_wheels.sh [FOLDER] [PYTHON]          here; by default build/gpu_wheels, for Python 3.12
#   pip install --no-index --no-deps FOLDER/*.whl            there, and then benchmarks/gpu.py
# The versions are those of requirements/; torchao is a peer that benchmarks/gpu.py measures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-build/gpu_wheels}
python=${2:-3.12}
packages=(tyro docstring-parser typeguard highspy zlib-ng plotly narwhals torchao)
most_mib=64

pins=()
for package in "${packages[@]}"; do
    pin=$(grep -hE "^$package==" requirements/base.txt requirements/dev.txt | head -1 || true)
    if [ -z "$pin" ]; then
        echo "error: $package has no version in requirements/; add one" >&2
        exit 2
    fi
    pins+=("$pin")
done
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
