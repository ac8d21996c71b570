#!/usr/bin/env bash
# Builds the Ascend bridge and the software double of CANN, runs the bridge's tests on the double, then the
# leak and fault tests once more under AddressSanitizer and UBSan. Needs g++ and cmake, no CANN.
#   tools/test_ascend.sh VENV [PYTEST ARGUMENT ...]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift
build() {
    local code=0
    tools/build_ascend.sh "$venv" "$1" || code=$?
    if [ "$code" -eq 3 ]; then
        echo "SKIPPED: test-ascend: the bridge cannot be built here."
        exit 0
    fi
    return "$code"
}
build double
DIJ_ASCEND_LANE=1 "$venv/bin/python" -m pytest -q tests/native_ascend "$@"
build address
runtime="$(${CXX:-g++} -print-file-name=libasan.so):$(${CXX:-g++} -print-file-name=libubsan.so)"
runtime="$runtime:$(${CXX:-g++} -print-file-name=libstdc++.so)"
LD_PRELOAD=$runtime ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 JAX_PLATFORMS=cpu \
    "$venv/bin/python" tests/native_ascend/sanitized_run.py .cache/ascend/address
