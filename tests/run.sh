#!/usr/bin/env bash
# The second command: set up, then ruff, mypy and pytest.  Arguments go to pytest:
#   bash tests/run.sh --fast              ruff, and the tests of what most changes break first; a minute on two cores
#   bash tests/run.sh                     all but slow tests, files of tests dealt out to two to four workers
#   bash tests/run.sh --all               slow tests too
#   bash tests/run.sh tests/unit/quant    a part
# All checks run even if one fails; the exit status is non-zero if any failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=tools/set_up.sh
. tools/set_up.sh dev

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tests start up to eight processes on two cores
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-2000}" # what uses two threads must not spin where cores are shared
failed=()
check() {
    echo "== $*"
    "$@" || failed+=("$*")
}

check ruff check .
check ruff format --check .
if [ "$*" = --fast ]; then
    # structure, formats, options, divergences, plans and one layout; not mypy, kernels, training, checkpoints, commands
    # and the other layouts
    set -- tests/test_structure.py tests/unit/formats tests/unit/test_config.py tests/unit/test_megatron_options.py \
        tests/unit/snip/predict tests/unit/snip/plan \
        'tests/dist/test_layouts.py::test_pipeline_is_bit_for_bit_at_first[plan-pp2-llama]' \
        -n 2 --dist loadfile --no-loadscope-reorder
    echo "== --fast leaves out mypy and most tests; run bash tests/run.sh before you push"
else
    check mypy
fi
if [ "${#failed[@]}" -gt 0 ]; then
    printf '== failed: %s\n' "${failed[@]}"
fi
echo "== pytest"
if [ "$*" = "" ] || [ "$*" = --all ]; then # a part starts sooner in one process
    set -- "$@" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder # else files of few tests, which take longest, come last
fi
status=0
python -m pytest "$@" || status=$?
if [ "${#failed[@]}" -gt 0 ]; then
    exit 1
fi
exit "$status"
