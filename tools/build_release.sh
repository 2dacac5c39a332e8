#!/usr/bin/env bash
# Builds what a package index takes: a source distribution, and from it a wheel with a manylinux tag.
#
#   bash tools/build_release.sh [FOLDER]     (dist)
#
# FOLDER must not exist, or be empty.  The C++ runtime goes into the kernel, so that the tag depends on glibc alone:
# that of the machine that builds.  Run it in a manylinux image for a wheel that older systems take as well.
# Environment: PYTHON, SKIP_SET_UP   see tools/set_up.sh
#              KERNEL                a compiled kernel to take, in place of compiling one
set -euo pipefail
here="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=tools/set_up.sh
. tools/set_up.sh dev

folder="$(cd "$here" && realpath -m "${1:-$here/dist}")"
if [ -n "$(ls -A "$folder" 2>/dev/null || true)" ]; then
    give_up "$folder is not empty; give a new folder"
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python -c "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])" "$work" >"$work/log" ||
    give_up "the source distribution failed: $(tail -n 3 "$work/log")"
mkdir "$work/source"
tar -xzf "$work"/megatron_snip-*.tar.gz -C "$work/source" --strip-components=1
if [ -n "${KERNEL:-}" ]; then
    cp "$KERNEL" "$work/source/megatron_snip/quant/kernels/_cpu.so" # setup.py takes it, as it is newer than the sources
fi
# what the kernel does not use of the C++ runtime would need a newer glibc
export LDFLAGS="-static-libstdc++ -Wl,--gc-sections -Wl,--exclude-libs,ALL ${LDFLAGS:-}"
python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/plain" "$work/source"
python -m zipfile -l "$(ls "$work"/plain/*.whl)" | grep '/_cpu\.so ' >/dev/null || give_up "the kernel was not compiled; install a C++ compiler"
auditwheel repair --wheel-dir "$work/wheels" "$work"/plain/*.whl >"$work/log" 2>&1 ||
    give_up "auditwheel failed: $(tail -n 3 "$work/log")"
mkdir -p "$folder"
mv "$work"/megatron_snip-*.tar.gz "$work"/wheels/*.whl "$folder/"
ls "$folder"
