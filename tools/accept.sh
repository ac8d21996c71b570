#!/usr/bin/env bash
# Runs the acceptance set of one issue, slow tests included, and keeps its output as benchmarks/results/accept_issue_N.txt.
#   tools/accept.sh N
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
issue=${1:-}
if ! [[ $issue =~ ^[0-9]+$ ]]; then
    echo "accept: ISSUE must be a number, got '$issue'. Call: make accept ISSUE=2" >&2
    exit 1
fi
result=benchmarks/results/accept_issue_$issue.txt
if [ "$issue" -eq 13 ]; then
    # Its tests run on the bridge and on the software double of CANN; without a compiler they skip, and say so.
    code=0
    tools/build_ascend.sh "$venv" double || code=$?
    if [ "$code" -ne 0 ] && [ "$code" -ne 3 ]; then exit "$code"; fi
    if [ "$code" -eq 0 ]; then export DIJ_ASCEND_LANE=1; fi # a stale build is a failure then
fi
output=$(mktemp)
trap 'rm -f "$output"' EXIT
{
    echo "issue $issue, $(date -u +%Y-%m-%dT%H:%MZ), revision $(git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)"
    "$venv/bin/python" -c 'import os, platform, jax, jaxlib
print(f"python {platform.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__},",
      f"{platform.machine()}, {os.cpu_count()} cores")'
} | tee "$output"
code=0
"$venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile \
    -m "not gpu and not multi and not weights" --accept "$issue" -rA tests 2>&1 | tee -a "$output" ||
    code=$?
if [ "$code" -eq 5 ]; then
    echo "accept: no test is marked accept($issue); $result is left as it was." >&2
    exit 1
fi
cp "$output" "$result"
echo "accept: $result written"
exit "$code"
