"""Transformations, failures and lifetimes of staged calls (ascend.md 11.1 and 11.2)."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import native_ascend
from native_ascend import ffi, ops, runtime

pytestmark = pytest.mark.accept(13)

X = jnp.arange(12.0).reshape(3, 4)
W = jnp.arange(8.0).reshape(4, 2)


def test_transformations(double):
    expected = np.asarray(X @ W)
    assert np.array_equal(ops.matmul(X, W), expected)
    assert np.array_equal(jax.jit(ops.matmul)(X, W), expected)
    square = jnp.eye(4) * 2

    def body(carry, _):
        return ops.matmul(carry, square), carry.sum()

    last, _ = jax.jit(lambda x: lax.scan(body, x, None, length=3))(X)
    assert np.array_equal(last, X * 8)
    branch = jax.jit(lambda go: lax.cond(go, lambda: ops.matmul(X, W), lambda: jnp.zeros((3, 2))))
    assert np.array_equal(branch(True), expected)
    assert np.array_equal(branch(False), np.zeros((3, 2)))
    stacked = jnp.stack([X, X + 1, X - 1])
    assert np.array_equal(jax.vmap(ops.matmul, in_axes=(0, None))(stacked, W), stacked @ W)


def test_eight_threads(double):
    run = jax.jit(ops.matmul)
    wrong = []

    def work(number):
        x = X + number
        wrong.extend(number for _ in range(200) if not np.array_equal(run(x, W), x @ W))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


SHARDED = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from pathlib import Path
from double import Double
double = Double(Path({double!r}))
double.set('devices', 4)
import jax, jax.numpy as jnp, numpy as np
import native_ascend as na
from native_ascend import ops
from jax.sharding import PartitionSpec as P
na.load(str(double.path), allow_double=True, bridge={bridge!r})
mesh = jax.sharding.Mesh(np.array(jax.devices()), ('d',))
x, w = jnp.arange(32.).reshape(8, 4), jnp.arange(8.).reshape(4, 2)
def body(x, w):
    return jax.lax.psum(ops.matmul(x, w).sum(), 'd'), ops.matmul(x, w)
total, out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P('d'), P()), out_specs=(P(), P('d')),
                                   check_vma=False))(x, w)
assert np.array_equal(out, x @ w) and float(total) == float((x @ w).sum())
assert double.violations() == [], double.violations()
print('devices', na.current().device_count)
"""


def test_shard_map_gives_every_device_its_own(libraries, root):
    bridge, double = libraries
    code = SHARDED.format(
        root=str(root),
        here=str(root / "tests" / "native_ascend"),
        double=str(double.path),
        bridge=str(bridge),
    )
    env = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PATH": "/usr/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "devices 4"


def test_a_failure_has_one_type_wherever_it_surfaces(double):
    run = jax.jit(ops.matmul)
    compiled = run.lower(X, W).compile()
    for call in (ops.matmul, ffi.checked(run), ffi.checked(run), ffi.checked(compiled)):
        double.fault("aclnnMatmul", 1, 561003)
        with pytest.raises(native_ascend.AscendUnsupported) as failure:
            call(X, W)
        error = failure.value
        assert (error.code, error.call, error.op) == (561003, "aclnnMatmul", "aclnnMatmul")
        assert "injected into aclnnMatmul" in str(error)
        assert np.array_equal(call(X, W), X @ W)


NAMES = (
    "aclrtMalloc",
    "aclrtFree",
    "aclrtMemcpyAsync",
    "aclrtSynchronizeStream",
    "aclrtSynchronizeStreamWithTimeout",
    "aclrtCreateEventExWithFlag",
    "aclrtDestroyEvent",
    "aclrtRecordEvent",
    "aclrtStreamWaitEvent",
    "aclCreateTensor",
    "aclDestroyTensor",
    "aclCreateTensorList",
    "aclDestroyTensorList",
    "aclnnNpuFormatCastGetWorkspaceSize",
    "aclnnNpuFormatCast",
    "aclnnGroupedMatmulWeightNzGetWorkspaceSize",
    "aclnnGroupedMatmulWeightNz",
)
RELEASES = {"aclrtFree", "aclrtDestroyEvent", "aclDestroyTensor", "aclDestroyTensorList"}


def grouped():
    scale = jax.lax.bitcast_convert_type(jnp.full((4, 1, 2), 127, jnp.uint8), jnp.float8_e8m0fnu)
    weight_scale = jnp.broadcast_to(scale[:1], (2, 16, 1, 2))
    codes = jnp.ones((4, 64), jnp.float8_e4m3fn)
    weight = jnp.full((2, 16, 32), 0x22, jnp.uint8)
    with jax.enable_x64(True):
        counts = jnp.asarray([1, 3], jnp.int64)
        return ops.grouped_matmul(codes, scale, weight, weight_scale, counts)


@pytest.mark.parametrize("name", NAMES)
def test_every_injected_failure_at_call_time(double, name):
    assert float(grouped()[0, 0]) == 64.0
    before = double.calls(name)
    grouped()
    count = double.calls(name) - before
    assert count >= 1, "the test reaches this function"
    level = double.live()
    for nth in range(1, count + 1):
        double.fault(name, nth, 207001)
        if name in RELEASES:
            grouped()
        else:
            with pytest.raises(native_ascend.AscendError) as failure:
                grouped()
            expected = 500000 if name.startswith("aclCreate") else 207001
            assert failure.value.code == expected
            assert failure.value.call == name
        runtime.native.call(native_ascend.current().library, "dij_unpoison", 0)
        assert double.live() == level, (name, nth)
    assert float(grouped()[0, 0]) == 64.0


@pytest.mark.parametrize(
    ("name", "count"),
    [("aclrtMemcpyAsync", 6), ("aclnnNpuFormatCast", 1), ("aclnnGroupedMatmulWeightNz", 1)],
)
def test_every_injected_failure_on_the_device_poisons_it(double, name, count):
    grouped()
    level = double.live()
    for nth in range(1, count + 1):
        double.fault(name, nth, 507015, on_device=True)
        with pytest.raises(native_ascend.AscendError) as failure:
            grouped()
        assert failure.value.code == 507015
        assert failure.value.status == "INTERNAL"
        with pytest.raises(native_ascend.AscendError, match="unusable since") as poisoned:
            grouped()
        assert poisoned.value.status == "FAILED_PRECONDITION"
        assert double.live() == level
        double.reset()
        runtime.native.call(native_ascend.current().library, "dij_unpoison", 0)
    assert float(grouped()[0, 0]) == 64.0


def test_a_timeout_ends_the_call_drains_and_poisons(double):
    double.set("task_delay_us", 20_000)
    b = ops.PlanBuilder()
    x, w = b.operand((3, 4), "float32"), b.operand((4, 2), "float32")
    out = b.result((3, 2), "float32")
    b.call("aclnnMatmul", self=x, mat2=w, out=out, cubeMathType=0)
    with pytest.raises(native_ascend.AscendError) as failure:
        ffi.staged(b, X, W, timeout_ms=1)
    double.set("task_delay_us", 0)
    assert failure.value.status == "DEADLINE_EXCEEDED"
    with pytest.raises(native_ascend.AscendError, match="unusable since"):
        ops.matmul(X, W)


def test_memory_that_runs_out_is_named_in_bytes_and_comes_back(double):
    double.set("memory_limit", double.live_bytes() + 256)
    with pytest.raises(native_ascend.AscendError, match=r"requested \d+ of \d+ free") as failure:
        ops.matmul(jnp.ones((64, 64)), jnp.ones((64, 64)))
    double.set("memory_limit", 0)
    assert failure.value.status == "RESOURCE_EXHAUSTED"
    assert np.array_equal(ops.matmul(X, W), X @ W)


def test_random_delays_do_not_change_results_and_ignored_waits_are_noticed(double):
    double.set("task_delay_us", 300)
    for number in range(20):
        assert np.array_equal(ops.matmul(X + number, W), (X + number) @ W)
    # the mutation: streams that do not wait for each other read what was not written yet
    double.set("ignore_waits", 1)
    same = all(np.array_equal(ops.matmul(X + n, W), (X + n) @ W) for n in range(20))
    double.set("ignore_waits", 0)
    double.set("task_delay_us", 0)
    assert not same


def random_program(rng):
    """(builder, operands, expected) of up to six sums, copies and products of exact values."""
    b = ops.PlanBuilder()
    arrays = [rng.integers(-2, 3, (4, 4)).astype(np.float32) for _ in range(2)]
    held = [(b.operand((4, 4), "float32"), array) for array in arrays]
    for last in range(rng.integers(1, 7), 0, -1):
        (x, left), (y, right) = (held[rng.integers(len(held))] for _ in range(2))
        out = b.scratch((4, 4), "float32") if last > 1 else b.result((4, 4), "float32")
        kind = rng.integers(3) if np.abs(left).max() * np.abs(right).max() < 2**20 else 1
        if kind == 0:
            b.call("aclnnMatmul", self=x, mat2=y, out=out, cubeMathType=0)
            value = left @ right
        elif kind == 1:
            b.call("aclnnInplaceCopy", selfRef=out, src=x)
            value = left
        else:
            b.call("aclnnAdd", self=x, other=y, alpha=1.0, out=out)
            value = left + right
        held.append((out, value))
    return b, arrays, held[-1][1]


def test_a_thousand_random_programs_equal_their_sequential_results(double):
    rng = np.random.default_rng(13)
    for _ in range(1000):
        double.set("task_delay_us", int(rng.integers(200)))
        builder, operands, expected = random_program(rng)
        (found,) = ffi.staged(builder, *map(jnp.asarray, operands))
        assert np.array_equal(found, expected)
    double.set("task_delay_us", 0)


def test_an_operator_that_is_missing_is_not_computed_elsewhere(double, runtime, monkeypatch):
    monkeypatch.setitem(runtime.operators, "aclnnMatmul", "missing")
    with pytest.raises(native_ascend.AscendUnsupported, match="lacks aclnnMatmul"):
        ops.matmul(X, W)


def test_on_hardware_an_unverified_operator_raises_or_warns_once(double, runtime, monkeypatch):
    monkeypatch.setattr(runtime, "is_double", False)
    monkeypatch.setattr(runtime, "_warned", set())
    with pytest.raises(native_ascend.AscendUnverified, match="never ran on Ascend hardware"):
        ops.matmul(X, W)
    monkeypatch.setenv("DEEPINFER_ASCEND_ALLOW_UNVERIFIED", "1")
    with pytest.warns(UserWarning, match="aclnnMatmul is unverified"):
        ops.matmul(X, W)
    ops.matmul(X, W)  # a second warning would be an error here


def test_registering_again_is_harmless(double, runtime):
    ffi.register(runtime.library)
    assert np.array_equal(ops.matmul(X, W), X @ W)
