"""Device arrays: stale, double, wrong, in use, many (ascend.md 11.2, 15)."""

import ctypes
import threading

import numpy as np
import pytest

from native_ascend import AscendError, library, runtime
from native_ascend.handles import DeviceCache, DeviceWeights
from native_ascend.plan import PlanBuilder
from native_ascend.session import DeviceStep

pytestmark = pytest.mark.accept(13)

ONES = {"x": np.ones((3, 4), np.float32)}


def free(handle):
    pointer = handle.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
    library.call(runtime.current().library, "dij_buffer_free", pointer)


def doubling(weights):
    """A step that returns x + x."""
    b = PlanBuilder()
    x = weights.tensor(b, "x")
    b.call("aclnnAdd", self=x, other=x, alpha=1.0, out=b.result((3, 4), "float32"))
    return DeviceStep(b, 0)


def test_round_trip_and_close_twice(double):
    weights = DeviceWeights(ONES)
    back = np.empty((3, 4), np.float32)
    weights.read("x", back)
    assert np.array_equal(back, ONES["x"])
    weights.close()
    weights.close()
    with pytest.raises(AscendError, match="is closed"):
        weights.read("x", back)


def test_a_freed_handle_is_stale_also_when_its_slot_is_used_again(double):
    weights = DeviceWeights(ONES)
    handles = weights.handles()
    weights.close()
    with pytest.raises(AscendError, match="is stale"):
        free(handles[0])
    with DeviceWeights(ONES) as again:
        assert again.handles()[0, 0] == handles[0, 0]
        assert again.handles()[0, 1] != handles[0, 1]
        step = doubling(again)
        with pytest.raises(AscendError, match="is stale") as failure:
            step(handles, np.zeros(1, np.int32))
        assert failure.value.status == "FAILED_PRECONDITION"
        step.close()


def test_steps_are_ordered_and_copies_of_handles_name_the_same_buffer(double):
    with DeviceWeights(ONES) as weights:
        step = doubling(weights)
        order = np.zeros(1, np.int32)
        for number in range(3):
            order, out = step(weights.handles().copy(), order)
            assert int(order[0]) == number + 1
            assert np.array_equal(out, 2 * ONES["x"])
        step.close()
        with pytest.raises(AscendError, match="was dropped"):
            step(weights.handles(), order)
        step.close()


def test_sizes_types_and_places_are_checked(double):
    with pytest.raises(AscendError, match="holds 48 bytes"), DeviceWeights(ONES) as weights:
        weights.write("x", np.ones(3, np.float32))
    wrong = {"x": np.ones((3, 4), np.int32)}
    with DeviceWeights(ONES) as weights, DeviceWeights(wrong) as others:
        step = doubling(weights)
        with pytest.raises(AscendError, match="holds data type 3, the plan reads 0"):
            step(others.handles(), np.zeros(1, np.int32))
        with pytest.raises(AscendError, match="does not fit its buffer"):
            step(np.zeros((0, 2), np.uint32), np.zeros(1, np.int32))
        step.close()
    with pytest.raises(AscendError, match="there is no device 7"):
        DeviceWeights(ONES, device=7)


def test_memory_that_runs_out_leaves_nothing(double):
    double.set("memory_limit", double.live_bytes() + 4096)
    many = {str(n): np.ones(256, np.float32) for n in range(8)}
    with pytest.raises(AscendError, match="requested") as failure:
        DeviceWeights(many)
    double.set("memory_limit", 0)
    assert failure.value.status == "RESOURCE_EXHAUSTED"


def test_a_buffer_that_a_step_uses_is_not_freed(double):
    with DeviceWeights(ONES) as weights:
        step = doubling(weights)
        operands = weights.handles(), np.zeros(1, np.int32)
        step(*operands)
        before = double.calls("aclnnAdd")
        double.set("task_delay_us", 200_000)
        runner = threading.Thread(target=step, args=operands)
        runner.start()
        while runner.is_alive() and double.calls("aclnnAdd") == before:
            pass  # until its operator waits on the stream
        with pytest.raises(AscendError, match="in use by 1 running calls"):
            weights.close()
        runner.join()
        double.set("task_delay_us", 0)
        step.close()


def test_many_buffers_come_and_go(double):
    level = double.live_bytes()
    for _ in range(100_000):
        DeviceCache({"x": ((4,), "float32")}).close()
    assert double.live_bytes() == level


def test_the_collector_warns_and_does_not_free(double):
    weights = DeviceWeights(ONES)
    handles = weights.handles()
    with pytest.warns(ResourceWarning, match="was not closed: 1 device buffers"):
        weights.__del__()
    free(handles[0])
    weights._handles.clear()
