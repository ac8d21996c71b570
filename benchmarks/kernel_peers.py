"""Times DeepGEMM on the shapes of `benchmarks.kernels`, in a torch process of its own.

    python -m benchmarks.kernel_peers FOLDER 4096x4096x4096 128x7168x2048 ...

FOLDER holds a built DeepGEMM (kernels.md 9.2), which lies beside the checkout and is never part of
it. Shapes are M x N x K. Inputs are random normal, quantised 1x128 and 128x128, rotated over
buffers larger than the L2 cache. One CUDA graph holds all launches of a shape; kernel time is read
by the profiler, and once more as the graph's time over its launches. One JSON line per shape; a
shape that fails prints its error.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

LAUNCHES = 30  # of one graph
L2_BYTES = 60e6


def time_shape(torch: Any, gemm: Any, m: int, n: int, k: int) -> dict[str, Any]:
    """Returns the kernel time of one product in microseconds, and its error against float32."""
    from deep_gemm import get_mn_major_tma_aligned_tensor
    from deep_gemm.utils.math import per_block_cast_to_fp8, per_token_cast_to_fp8

    sets, error = [], 0.0
    for seed in range(max(3, int(L2_BYTES // (m * k + n * k)) + 1)):
        torch.manual_seed(seed)
        x, w = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (m, n))
        x8, sx = per_token_cast_to_fp8(x, use_ue8m0=False)
        w8, sw = per_block_cast_to_fp8(w, use_ue8m0=False)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        sets.append(((x8, get_mn_major_tma_aligned_tensor(sx)), (w8, sw), out))
        if seed == 0:
            gemm(*sets[0], disable_ue8m0_cast=True)
            exact = x.float() @ w.float().T
            error = float((out.float() - exact).abs().max() / exact.square().mean().sqrt())

    def launch() -> None:
        for index in range(LAUNCHES):
            gemm(*sets[index % len(sets)], disable_ue8m0_cast=True)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(3):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spans = []
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    times = sorted(
        event.time_range.elapsed_us() for event in profile.events() if "gemm" in event.name
    )
    kernel = times[len(times) // 2] if times else None
    return {"kernel_us": kernel, "graph_us": min(spans), "max_error": error, "launches": len(times)}


def main(arguments: list[str]) -> None:
    """Prints one JSON line per shape."""
    folder = Path(arguments[0]).resolve()
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(folder / ".dgcache"))
    sys.path.insert(0, str(folder))
    import deep_gemm  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    for shape in arguments[1:]:
        m, n, k = map(int, shape.split("x"))
        record = {"peer": "DeepGEMM", "version": deep_gemm.__version__, "shape": shape}
        try:
            record |= time_shape(torch, deep_gemm.fp8_gemm_nt, m, n, k)
        except Exception as error:  # the other shapes still count
            record["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
