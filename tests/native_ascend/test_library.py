"""The built library, and the double's own strictness when its protocol is broken on purpose."""

import ctypes
import os
import re
import subprocess

import jax.numpy as jnp
import pytest

import native_ascend
from native_ascend import ops

pytestmark = pytest.mark.accept(13)

I64 = ctypes.c_int64


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_only_our_names_are_exported_and_nothing_of_cann_or_jaxlib_is_linked(libraries):
    bridge, _ = libraries
    lines = output("nm", "-D", "--defined-only", str(bridge)).splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines}
    assert {"dij_call", "dij_step", "dij_load"} <= names
    assert [name for name in names if not name.startswith("dij_")] == []
    linked = output("ldd", str(bridge))
    assert not re.search(r"ascend(cl)|opapi|hccl|jaxlib", linked.replace("dij_ascend", ""))


# JAX and Python warn of what this test does on purpose; the child runs no JAX
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused(double):
    x = jnp.ones((2, 2))
    ops.matmul(x, x)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = b"nothing"
        try:
            library = native_ascend.current().library
            handle = (ctypes.c_uint32 * 2)()
            dims = (I64 * 1)(4)
            if library.dij_buffer_create(0, 0, dims, 1, handle):
                text = library.dij_message()
        finally:
            os.write(writer, text)
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert b"loaded before a fork" in pipe.read()


@pytest.fixture
def acl(libraries, runtime):
    """The double called directly. Violations are what these tests are after."""
    _, double = libraries
    double.reset()
    library = ctypes.CDLL(str(double.path))
    library.aclCreateTensor.restype = ctypes.c_void_p
    library.aclrtSetDevice(0)
    yield library, double
    double.reset()


def block(library, size: int = 64) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    assert library.aclrtMalloc(ctypes.byref(made), ctypes.c_size_t(size), 0) == 0
    return made


def tensor(library, address) -> ctypes.c_void_p:
    dims, strides = (I64 * 2)(2, 2), (I64 * 2)(2, 1)
    two = I64(2)  # int64 on the stack, where an int would leave half of it undefined
    made = library.aclCreateTensor(dims, two, 0, strides, I64(0), 2, dims, two, address)
    return ctypes.c_void_p(made)


def planned(library, address):
    """(executor of a product, size of its workspace, its tensor)."""
    x, size, executor = tensor(library, address), ctypes.c_uint64(), ctypes.c_void_p()
    code = library.aclnnMatmulGetWorkspaceSize(
        x, x, x, ctypes.c_int8(0), ctypes.byref(size), ctypes.byref(executor)
    )
    assert code == 0
    assert size.value > 0
    return executor, size, x


@pytest.mark.parametrize("fault", ["null", "small", "other operator"])
def test_a_wrong_second_phase_is_a_violation(acl, fault):
    library, double = acl
    memory, stream = block(library), ctypes.c_void_p()
    assert library.aclrtCreateStream(ctypes.byref(stream)) == 0
    executor, size, x = planned(library, memory)
    workspace = block(library, size.value)
    if fault == "null":
        code = library.aclnnMatmul(None, size, executor, stream)
    elif fault == "small":
        code = library.aclnnMatmul(workspace, ctypes.c_uint64(size.value - 1), executor, stream)
    else:
        code = library.aclnnAbs(workspace, size, executor, stream)
    assert code == 161002
    expected = "is run by aclnnAbs" if fault == "other operator" else "got no workspace"
    assert expected in double.violations()[0]
    library.aclDestroyTensor(x)
    for one in (memory, workspace):
        assert library.aclrtFree(one) == 0
    assert library.aclrtDestroyStream(stream) == 0


def test_a_workspace_that_is_freed_early_is_a_violation(acl):
    library, double = acl
    memory, stream = block(library), ctypes.c_void_p()
    assert library.aclrtCreateStream(ctypes.byref(stream)) == 0
    executor, size, x = planned(library, memory)
    workspace = block(library, size.value)
    double.set("task_delay_us", 50_000)
    assert library.aclnnMatmul(workspace, size, executor, stream) == 0
    assert library.aclrtFree(workspace) == 0
    assert library.aclrtSynchronizeStream(stream) == 507015
    double.set("task_delay_us", 0)
    assert "runs with a workspace that was freed" in double.violations()[0]
    library.aclDestroyTensor(x)
    assert library.aclrtFree(memory) == 0
    assert library.aclrtDestroyStream(stream) == 0


def test_releasing_twice_is_a_violation(acl):
    library, double = acl
    memory = block(library)
    x = tensor(library, memory)
    assert library.aclDestroyTensor(x) == 0
    assert library.aclDestroyTensor(x) == 161002
    assert library.aclrtFree(memory) == 0
    assert library.aclrtFree(memory) == 100000
    assert len(double.violations()) == 2


def test_an_unaligned_address_is_refused(acl):
    library, _ = acl
    memory = block(library)
    assert tensor(library, ctypes.c_void_p(memory.value + 4)).value is None
    assert library.aclrtFree(memory) == 0


CONSTANTS = (
    "ACL_FLOAT=0 ACL_FLOAT16=1 ACL_INT8=2 ACL_INT32=3 ACL_UINT8=4 ACL_INT64=9 ACL_BOOL=12 "
    "ACL_BF16=27 ACL_FLOAT8_E5M2=35 ACL_FLOAT8_E4M3FN=36 ACL_FLOAT8_E8M0=37 ACL_FLOAT4_E2M1=40 "
    "ACL_MEMCPY_HOST_TO_DEVICE=1 ACL_MEMCPY_DEVICE_TO_HOST=2 ACL_FORMAT_ND=2 "
    "ACL_FORMAT_FRACTAL_NZ=29"
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("", ""), ""),
        (("int kind, aclrtStream", "Kind kind, aclrtStream"), ""),
        (("(void** block, size_t size", "(void** block, int size"), "aclrtMalloc differs"),
        (("ACL_INT64=9", "ACL_INT64=10"), "static assertion failed"),
    ],
)
def test_declarations_are_compared_with_a_toolkits_headers(root, tmp_path, change, said, libraries):
    """Headers made from our own list stand in for a toolkit's; two of them are wrong on purpose."""
    ours = (root / "native_ascend" / "include" / "acl_min.h").read_text()
    listed = ours[ours.index("#define DIJ_RUNTIME") :].replace("\\\n", " ")
    found = re.findall(r"X\(([^,]+), (\w+),\s*\(([^)]*)\)\)", listed)
    assert len(found) > 25
    constants = ", ".join(CONSTANTS.split())
    header = "#include <cstddef>\n#include <cstdint>\n"
    for name in ("Tensor", "TensorList", "IntArray", "Scalar", "OpExecutor"):
        header += f"typedef struct acl{name} acl{name};\n"
    header += "typedef int aclError;\ntypedef int aclnnStatus;\n"
    header += "typedef void* aclrtStream;\ntypedef void* aclrtEvent;\n"
    header += f"enum Kind {{ {constants} }};\n"
    header += "".join(f'extern "C" {r.strip()} {n}({p});\n' for r, n, p in found)
    (tmp_path / "acl").mkdir()
    (tmp_path / "aclnn").mkdir()
    (tmp_path / "acl" / "acl.h").write_text("#pragma once\n" + header.replace(*change))
    (tmp_path / "aclnn" / "acl_meta.h").write_text("#pragma once\n")
    native = root / "native_ascend"
    command = ["c++", "-std=c++17", "-fsyntax-only", "-I", tmp_path, "-I", native / "include"]
    done = subprocess.run(
        [*command, native / "src" / "check_abi.cc"], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (said == ""), done.stderr
    assert said in done.stderr
