#!/usr/bin/env bash
# Compiles every GPU kernel to machine code for sm_90a and sm_100a without a GPU (tools/gpu_compile.py), in an
# environment of its own: the CUDA plugin changes a trace, so it is never installed beside the dev extra.
#   tools/test_gpu_compile.sh [ARGUMENT ...]        arguments go to tools/gpu_compile.py
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! tools/setup_venv.sh .venv-gpu gpu-compile jax==0.11.2 jaxlib==0.11.2 2> >(tee "$log" >&2); then
    # pip names the wheel that its index does not have for this machine
    if missing=$(grep -m1 -E "No matching distribution found|Could not find a version" "$log"); then
        echo "SKIPPED: test-gpu-compile: the wheels of the extra gpu-compile cannot be had here ($missing)."
        exit 0
    fi
    exit 1
fi
.venv-gpu/bin/python tools/gpu_compile.py "$@"
JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 .venv-gpu/bin/python tools/gpu_network.py
