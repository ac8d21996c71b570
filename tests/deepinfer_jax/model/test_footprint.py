"""Cache bytes at the released size, from the real state's shapes (A12)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import deepinfer_jax as di
from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.model.cached import cache_layout
from deepinfer_jax.model.footprint import DEEPINFER, cache_footprint
from deepinfer_jax.model.state import init_cache
from deepinfer_jax.model.step import Plan

pytestmark = pytest.mark.accept(3)


@pytest.fixture(scope="module")
def released():
    config = di.preset("deepseek-v4.1-flash")
    return replace(config, execution=di.ExecutionConfig(numerics="checkpoint"))


def test_published_bytes(released):
    found = cache_footprint(released, **DEEPINFER)
    assert found.token_bytes == 890
    assert (found.window_bytes, found.tail_bytes) == (3_042_336, 86_016)
    assert found.sequence_bytes == 3_128_352


def test_fp8_rows_cost_more(released):
    attention = replace(released.attention, use_fp4_sparse_kv=False)
    assert cache_footprint(replace(released, attention=attention), **DEEPINFER).token_bytes == 1490


def test_row_bytes(released):
    layout = cache_layout(released, di.RuntimeConfig(max_seqs=1), 2, 128)
    state = jax.eval_shape(lambda: init_cache(released, layout))
    assert [leaf.shape[2:] for leaf in state.main] == [(64, 288), (128, 288)]
    assert [leaf.shape[2:] for leaf in state.index_data] == [(64, 64), (128, 64)]
    assert [leaf.shape[2:] for leaf in state.index_scale] == [(64, 4), (128, 4)]
    assert state.window.shape == (2, 43, 136, 528)


def test_our_row_tiles_cost_little_more(released):
    ours = cache_footprint(released, row_tile=8)
    assert ours.token_bytes == 890
    theirs = cache_footprint(released, **DEEPINFER).sequence_bytes
    print(f"\nbytes per sequence: {ours.sequence_bytes} with row tiles of 8, {theirs} without")
    assert (ours.sequence_bytes, theirs) == (3_198_336, 3_128_352)


def test_shapes_of_cached_decode_at_a_million_tokens(released):
    runtime = di.RuntimeConfig(max_seqs=4, max_len=2**20)
    layout = cache_layout(released, runtime, 5, runtime.longest(released))
    state = jax.eval_shape(lambda: init_cache(released, layout))
    rows = jax.ShapeDtypeStruct((16,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    plan = Plan(ids=rows, position=rows, slot=rows, count=count, rows=count)
    plan = replace(plan, rows=jax.ShapeDtypeStruct((4,), jnp.int32))
    after, out = jax.eval_shape(
        lambda p, s, q: di.decode(p, released, s, q), abstract_params(released), state, plan
    )
    assert out.logits.shape == (4, 129280)
    assert jax.tree.map(lambda a, b: a.shape == b.shape, after, state)
    assert state.block_table.shape == (5, 8192)
