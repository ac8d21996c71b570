#!/usr/bin/env bash
# Builds the Ascend bridge against the headers of the environment's jaxlib; no CANN is needed.
#   tools/build_ascend.sh VENV [double|address]
# Without a second argument: native_ascend/lib/libdij_ascend.so. "double": bridge and software double in
# .cache/ascend/double, for tests. "address": the same with AddressSanitizer and UBSan, in .cache/ascend/address.
# Exits 3, with the reason, where there is no C++ compiler or cmake.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
kind=${2:-bridge}
for tool in "${CXX:-g++}" cmake; do
    if ! command -v "$tool" >/dev/null; then
        echo "$tool is not installed: for example 'apt-get install g++ cmake ninja-build'."
        exit 3
    fi
done
include=$("$venv/bin/python" -c 'import jax; print(jax.ffi.include_dir())')
build=.cache/ascend/$kind
options=(-DJAX_INCLUDE="$include")
if [ "$kind" != bridge ]; then options+=(-DDIJ_DOUBLE=ON); fi
if [ "$kind" = address ]; then options+=(-DDIJ_SANITIZE=address,undefined); fi
if command -v ninja >/dev/null; then options+=(-G Ninja); fi
mkdir -p "$build"
if ! cmake -S native_ascend -B "$build" "${options[@]}" >"$build/log" 2>&1 ||
    ! cmake --build "$build" --parallel 2 >>"$build/log" 2>&1; then
    cat "$build/log" >&2
    exit 1
fi
if [ "$kind" = bridge ]; then
    mkdir -p native_ascend/lib
    cp "$build/libdij_ascend.so" native_ascend/lib/
    echo "native_ascend/lib/libdij_ascend.so is built; it has never run on Ascend hardware."
fi
