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
run() { "$venv/bin/python" -m pytest "$@" --accept "$issue" -rA tests 2>&1 | tee -a "$output"; }
code=0
dist=loadfile
if [ "$issue" -eq 10 ]; then dist=load; fi # meshes: long tests of one file, each in a process of its own
run -n "${WORKERS:-2}" --dist "$dist" -m "not gpu and not multi and not weights" || code=$?
if [ "$issue" -eq 10 ] && [ "$code" -le 1 ]; then
    # Processes of a job wait for each other: they have the machine to themselves.
    multi=0
    run -n 0 -m "multi and not gpu and not weights" || multi=$?
    if [ "$multi" -ne 0 ]; then code=$multi; fi
fi
if [ "$code" -eq 5 ]; then
    echo "accept: no test is marked accept($issue); $result is left as it was." >&2
    exit 1
fi
cp "$output" "$result"
echo "accept: $result written"
exit "$code"
