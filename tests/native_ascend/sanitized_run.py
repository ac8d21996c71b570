"""The bridge under sanitizers, without pytest: 10,000 calls leak nothing, failures stay clean (I3).

`python sanitized_run.py FOLDER`, with the libraries of FOLDER, and the sanitizers' runtimes
preloaded where they were built with them. Prints one line; exits 1 otherwise.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import ctypes  # noqa: E402

import double as double_module  # noqa: E402
import numpy as np  # noqa: E402

import native_ascend  # noqa: E402
from native_ascend import library as native  # noqa: E402
from native_ascend.handles import DeviceWeights  # noqa: E402
from native_ascend.plan import PlanBuilder  # noqa: E402

CALLS = 10_000


def plan_of(builder: PlanBuilder, runtime) -> ctypes.c_int64:
    words, number = builder.words(), ctypes.c_int64()
    pointer = words.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    text = builder.text().encode()
    native.call(runtime.library, "dij_plan_keep", pointer, len(words), text, ctypes.byref(number))
    return number


def main(folder: Path) -> None:
    double = double_module.double_of(folder)
    runtime = native_ascend.load(
        str(double.path), allow_double=True, bridge=str(double_module.bridge_of(folder))
    )
    weights = DeviceWeights({"x": np.ones((3, 4), np.float32), "w": np.ones((4, 2), np.float32)})
    builder = PlanBuilder()
    x, w = (weights.tensor(builder, name) for name in ("x", "w"))
    out = builder.scratch((3, 2), "float32")
    builder.call("aclnnMatmul", self=x, mat2=w, out=out, cubeMathType=0)
    number = plan_of(builder, runtime)
    handles = weights.handles()
    pointer = handles.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))

    def run() -> None:
        native.call(runtime.library, "dij_plan_run", number, 0, pointer, len(handles), 60_000)

    run()
    level = double.live()
    for _ in range(CALLS):
        run()
    failed = 0
    for name in ("aclrtMalloc", "aclCreateTensor", "aclnnMatmul", "aclnnMatmulGetWorkspaceSize"):
        for _ in range(50):
            double.fault(name, 1, 207001)
            try:
                run()
            except native_ascend.AscendError:
                failed += 1
    assert failed == 200, failed
    assert double.live() == level, (double.live(), level)
    assert double.violations() == []
    weights.close()
    print(f"{CALLS} calls and {failed} failures on {runtime!r}: nothing leaked, no violation")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
