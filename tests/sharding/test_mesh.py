"""Sizes of the mesh, axis rules and bytes per device; all without a second device."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sharding.errors import ShardingError
from sharding.footprint import describe
from sharding.mesh import AXES, MeshSizes, build_mesh, mesh_sizes
from sharding.rules import padded, partition, shard_shape


def test_a_missing_axis_has_size_one():
    sizes = mesh_sizes({"dp": 2, "cp": 4})
    assert sizes.shape == (1, 2, 4, 1)
    assert (sizes.devices, sizes.data_parallel, sizes.expert_parallel) == (8, 2, 8)


def test_groups_are_products_of_axes():
    sizes = MeshSizes(er=2, dp=4, cp=8)
    assert (sizes.data_parallel, sizes.expert_parallel, sizes.devices) == (8, 32, 64)


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"dp": 0}, {"dp": True}, {"dp": 1.0}])
def test_other_axes_and_sizes_are_refused(sizes):
    with pytest.raises(ShardingError):
        mesh_sizes(sizes)


def test_a_mesh_of_the_caller_keeps_its_devices_in_our_order():
    devices = np.asarray(jax.devices()[:1]).reshape(1, 1, 1, 1)
    built = build_mesh(Mesh(devices, ("tp", "cp", "dp", "er")))
    assert built.axis_names == AXES
    assert built.devices.flat[0] == devices.flat[0]


def test_a_mesh_that_lacks_an_axis_is_refused():
    devices = np.asarray(jax.devices()[:1]).reshape(1, 1)
    with pytest.raises(ShardingError, match="exactly the axes"):
        mesh_sizes(Mesh(devices, ("dp", "cp")))


def test_too_few_devices_say_how_many_are_needed():
    with pytest.raises(ShardingError, match="needs 128 devices"):
        build_mesh({"dp": 128})


def test_experts_lie_over_dp_cp_tp_and_other_axes_are_whole():
    spec = partition(("layers", "experts", "expert_width", "embed"))
    assert spec == PartitionSpec(None, ("dp", "cp", "tp"))
    assert partition(("layers", "latent", "embed")) == PartitionSpec()
    sizes = MeshSizes(er=2, dp=2, cp=2)
    assert shard_shape((40, 384, 8, 4), spec, sizes) == (40, 96, 8, 4)


def test_an_axis_that_does_not_divide_says_how_to_pad_it():
    with pytest.raises(ShardingError, match="pad it to 8"):
        shard_shape((40, 7), partition(("layers", "experts")), MeshSizes(dp=4))


def test_padding_is_the_least_multiple():
    assert [padded(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_bytes_are_counted_by_name_and_nothing_is_allocated():
    tree = {
        "experts": {"w1": jax.ShapeDtypeStruct((2, 8, 2**20), np.uint8)},
        "norm": jax.ShapeDtypeStruct((2**40,), np.float32),  # no machine holds this
    }
    specs = {"experts": partition(("layers", "experts")), "norm": PartitionSpec()}
    found = describe(tree, specs, MeshSizes(dp=4), "params.")
    assert found.matching("experts") == (2 * 2 * 2**20, 2 * 8 * 2**20)
    assert found.device == 2 * 2 * 2**20 + 2**42
    assert [leaf.name for leaf in found.leaves] == ["params.experts.w1", "params.norm"]
    assert "dp=4" in found.table()


def test_an_error_survives_a_process_border():
    import pickle

    error = ShardingError("a rule", "this", "do that")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "a rule, got this: do that"
    assert again.remedy == "do that"
