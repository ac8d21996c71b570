#!/usr/bin/env bash
# Makes or refreshes a virtual environment with this package in editable mode.
#   tools/setup_venv.sh VENV EXTRAS [PIN ...]        e.g. tools/setup_venv.sh .venv dev jax==0.11.2
# A stamp inside VENV is keyed on its arguments, pyproject.toml and this script: a second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
extras=$2
shift 2
pins=("$@")

# Every candidate is run, since a pyenv shim may be on the PATH for a version that is not installed.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 python3.13 \
        "$HOME"/.pyenv/versions/3.12*/bin/python "$HOME"/.pyenv/versions/3.13*/bin/python python3 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

key=$({ echo "$PWD $extras ${pins[*]-}"; cat pyproject.toml tools/setup_venv.sh; } | cksum | tr ' ' '-')
stamp=$venv/.stamp-$key
if [ -f "$stamp" ] && "$venv/bin/python" -c '' >/dev/null 2>&1; then
    exit 0
fi

started=$SECONDS
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    if ! python=$(find_python); then
        echo "setup: Python 3.12 or 3.13 with venv is needed and none was found (tried \$PYTHON, python3.12," \
            "python3.13, ~/.pyenv/versions/3.1[23]*, python3). Install one, for example" \
            "'apt-get install python3.12 python3.12-venv' or 'pyenv install 3.12', and call make again." >&2
        exit 1
    fi
    echo "setup: $venv from $("$python" --version) at $python"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
rm -f "$venv"/.stamp-*
# Bytecode is left to the first import: compiling all of it costs more than the programs here use.
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile \
    --editable ".${extras:+[$extras]}" ${pins[@]+"${pins[@]}"}
touch "$stamp"
echo "setup: $venv ready in $((SECONDS - started)) s"
