# shellcheck shell=bash
# Sourced, not run, always with its argument:  . tools/set_up.sh base|dev
# Puts a Python with this project and its pinned dependencies first on PATH: the active virtual environment
# (VIRTUAL_ENV) if there is one, else .venv in the repository, made when missing.  A stamp in the environment
# holds a hash of what was installed from, so a second run starts at once.
# Environment: PYTHON       the Python (3.11 or newer) that makes .venv
#              SKIP_SET_UP  1 = take the Python on PATH as it is and install nothing
set -euo pipefail

unset PYTHONDONTWRITEBYTECODE # images of containers set it, and every process would compile anew what it imports

repo_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '[set-up] %s\n' "$*" >&2; }

give_up() {
    printf '[set-up] error: %s\n' "$*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python python3.14 python3.13 python3.12 python3.11; do
        if is_new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    give_up "no Python 3.11 or newer on PATH; install one, or name it: PYTHON=/path/to/python3 bash ..."
}

find_environment() {
    local python
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        environment="$VIRTUAL_ENV"
        is_new_enough "$environment/bin/python" ||
            give_up "the active environment $environment has no Python 3.11 or newer; deactivate it or make a newer one"
        return
    fi
    environment="$repo_root/.venv"
    if ! "$environment/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)"
        say "making a virtual environment in .venv with $("$python" --version)"
        "$python" -m venv "$environment" ||
            give_up "$python -m venv failed; on Debian or Ubuntu install the package python3-venv"
    fi
}

# A hash of everything that decides what is installed; the repository's place counts, because the
# installation points at it.
installed_from() {
    "$environment/bin/python" - "$repo_root" <<'EOF'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
files = [root / "pyproject.toml", root / "setup.py", *sorted(root.glob("requirements/*.txt"))]
files += sorted(p for p in root.glob("megatron_snip/**/*") if p.suffix in {".c", ".cc", ".cpp", ".h"})
digest = hashlib.sha256(f"{root} {sys.version}".encode())
for path in files:
    if path.is_file():
        digest.update(f"\n{path.relative_to(root)} ".encode() + path.read_bytes())
print(digest.hexdigest())
EOF
}

install() {
    local level="$1" wanted found stamp="$environment/megatron_snip.stamp"
    if command -v flock >/dev/null; then # both commands may be started at once
        exec 9>"$environment/megatron_snip.lock"
        flock 9
    fi
    wanted="$(installed_from)"
    found="$(cat "$stamp" 2>/dev/null || true)"
    if [ "$found" != "dev $wanted" ] && [ "$found" != "$level $wanted" ]; then
        install_anew "$level"
        echo "$level $wanted" >"$stamp"
        say "done"
    fi
    exec 9>&- # or the run itself would keep the lock
}

install_anew() {
    local level="$1" alone=(-e "$repo_root") # what is installed without its dependencies
    say "installing requirements/$level.txt into $environment (once; torch is the large one)"
    rm -f "$environment/megatron_snip.stamp"
    # pip 23 takes 20 s longer than 26 to choose among an index's files
    "$environment/bin/python" -m pip install --disable-pip-version-check --no-compile --quiet 'pip>=26' ||
        say "pip stays as it is"
    # Python compiles modules when it first imports them, which is half of pip's time
    "$environment/bin/python" -m pip install --disable-pip-version-check --no-compile \
        -r "$repo_root/requirements/$level.txt"
    if [ "$level" = dev ]; then
        alone+=(-r "$repo_root/requirements/evaluate.txt")
    fi
    say "installing megatron_snip"
    "$environment/bin/python" -m pip install --disable-pip-version-check --no-compile --no-build-isolation --no-deps \
        "${alone[@]}"
    if [ "$level" = dev ] && ! command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null; then
        PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT=5000 "$environment/bin/python" -m playwright install --only-shell chromium \
            >/dev/null 2>&1 || say "no browser could be downloaded; tests that open the report are skipped"
    fi
}

set_up() {
    case "$1" in base | dev) ;; *) give_up "level is $1; give base or dev" ;; esac
    if [ "${SKIP_SET_UP:-0}" = 1 ]; then
        return
    fi
    find_environment
    install "$1"
    if [ "$(command -v python || true)" != "$environment/bin/python" ]; then
        export PATH="$environment/bin:$PATH"
    fi
    export VIRTUAL_ENV="$environment"
}

set_up "$1"
