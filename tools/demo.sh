#!/usr/bin/env bash
# Installs, then runs examples/02_demo.py, which prints its own seconds of compilation and generation.
#   PROMPT: a text to continue. SCHEMA: a file with a JSON schema for its answer. SEED: of the built-in prompts.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
started=$SECONDS
tools/setup_venv.sh "$venv" dev ${JAX_PIN:+"$JAX_PIN"}
installed=$SECONDS
echo "demo: install $((installed - started)) s"
"$venv/bin/python" examples/02_demo.py ${SEED:+--seed="$SEED"} ${PROMPT:+--prompt="$PROMPT"} ${SCHEMA:+--schema="$SCHEMA"}
echo "demo: all $((SECONDS - started)) s"
