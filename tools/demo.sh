#!/usr/bin/env bash
# Installs, then prints tokens of the embedded model; `generate` itself prints its compilation and generation seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
started=$SECONDS
tools/setup_venv.sh "$venv" dev ${JAX_PIN:+"$JAX_PIN"}
installed=$SECONDS
echo "demo: install $((installed - started)) s"
"$venv/bin/deepinfer-jax" generate "$1"
echo "demo: compile and generate $((SECONDS - installed)) s, all $((SECONDS - started)) s"
