#!/usr/bin/env bash
# Repeats the invariance and sharding tests on the newest jax that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "$0")/.."
folders=()
for folder in tests/invariance tests/sharding; do
    if compgen -G "$folder/test_*.py" >/dev/null; then folders+=("$folder"); fi
done
if [ "${#folders[@]}" -eq 0 ]; then
    echo "SKIPPED: test-newest: there is no test in tests/invariance or tests/sharding yet."
    exit 0
fi
tools/setup_venv.sh .venv-newest "" pytest pytest-xdist hypothesis beartype
.venv-newest/bin/python -c 'import jax; print(f"test-newest: jax {jax.__version__}")'
code=0
.venv-newest/bin/python -m pytest -n "${WORKERS:-2}" --dist loadfile "${folders[@]}" || code=$?
if [ "$code" -eq 5 ]; then
    echo "SKIPPED: test-newest: every test in ${folders[*]} is marked slow or for another machine."
    exit 0
fi
exit "$code"
