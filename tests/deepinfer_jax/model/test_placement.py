"""Every leaf of both model types has a partition, and bytes per device follow from it."""

from math import ceil

import jax
import pytest
from jax.sharding import PartitionSpec

from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.config.presets import preset
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.placement import (
    cache_partitions,
    check_mesh,
    padded_abstract,
    param_partitions,
    partitions_like,
)
from deepinfer_jax.model.registry import network_of
from deepinfer_jax.model.state import CacheLayout
from sharding.footprint import describe, zip_specs
from sharding.mesh import MeshSizes

MODELS = ("deepseek-v4.1-flash", "deepseek-v4-flash")


def bytes_of(name, sizes):
    config = preset(name)
    params = padded_abstract(abstract_params(config), sizes)
    return describe(params, partitions_like(params, config), sizes)


def is_partition(node):
    return isinstance(node, PartitionSpec)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_partition(name):
    config = preset(name)
    params = abstract_params(config)
    pairs = zip_specs(params, partitions_like(params, config))
    assert len(pairs) == len(jax.tree.leaves(params))
    split = {path for path, _, spec in pairs if spec and "dp" in str(spec)}
    tables = {path for path in split if ".tables." in path}
    assert all(".experts." in path for path in split - tables)
    assert len(tables) == (4 if config.engram else 0)  # payload and scales of two tables
    assert len(jax.tree.leaves(param_partitions(config), is_leaf=is_partition)) > 30


@pytest.mark.parametrize("name", MODELS)
def test_every_state_leaf_is_split_over_the_replicas(name):
    config, sizes = preset(name), MeshSizes(er=2, dp=2, cp=2)
    layout = CacheLayout(num_slots=8, num_blocks=16, max_blocks=4)
    state = jax.eval_shape(lambda: network_of(config).init_cache(config, layout))
    execution_free = describe(state, cache_partitions(state), sizes)
    assert execution_free.device * 4 == execution_free.total  # 4 replicas, the same on both of cp


def test_experts_divide_by_the_expert_group_and_attention_does_not():
    one = bytes_of("deepseek-v4.1-flash", MeshSizes())
    eight = bytes_of("deepseek-v4.1-flash", MeshSizes(er=2, dp=4))
    assert one.device == one.total
    experts, total = eight.matching("experts")
    assert experts * 4 == total == one.matching("experts")[1]
    assert eight.matching("wq_b") == one.matching("wq_b")


def test_engram_rows_are_padded_to_the_world():
    sizes = MeshSizes(dp=64)
    found = [
        leaf for leaf in bytes_of("deepseek-v4.1-flash", sizes).leaves if "tables" in leaf.name
    ]
    for leaf, rows in zip(found[::2], (384006168, 384016682), strict=True):
        assert leaf.shape == (64 * ceil(rows / 64), 256)
        assert leaf.device * 64 == leaf.total


def test_too_few_experts_are_padded_with_replicas():
    sizes = MeshSizes(dp=48)
    found = bytes_of("deepseek-v4.1-flash", sizes)
    draft = next(leaf for leaf in found.leaves if leaf.name == "draft.stages.experts.w1.payload")
    assert draft.shape[1] == 144  # 128 draft experts on 48 devices
    backbone = next(leaf for leaf in found.leaves if leaf.name == "layers.experts.w1.payload")
    assert backbone.shape[1] == 384


@pytest.mark.parametrize(
    ("sizes", "word"), [(MeshSizes(tp=2), "tensor parallelism"), (MeshSizes(dp=1024), "use er")]
)
def test_a_mesh_that_cannot_run_is_refused_before_loading(sizes, word):
    with pytest.raises(ConfigError, match=word):
        check_mesh(preset("deepseek-v4.1-flash"), sizes)
