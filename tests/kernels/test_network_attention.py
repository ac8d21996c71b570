"""Attention, index scores and selection where the network calls kernels, against its XLA form.

Caches of the real row widths hold random bytes; the kernels' bodies run under the CPU interpreter.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.config.model import ExecutionConfig
from deepinfer_jax.model import draft, rows
from deepinfer_jax.model.attention import by_kernel, core, indexer, sublayer
from deepinfer_jax.model.attention.window import read_window
from deepinfer_jax.model.state import CacheLayout, init_cache
from deepinfer_jax.model.tile import Rows, static_roles
from deepinfer_jax.numerics.ops import ops_for

OPS = ("indexer_logits", "select_topk", "sparse_mla_decode")
INTERPRETED = tuple((op, "pallas_interpret") for op in OPS)
HEADS, DIM = 64, 512
LAYERS = ("window only", "ratio 2", "ratio 1")


def config_with(kernels):
    whole = di.preset("deepseek-v4.1-flash")
    return replace(
        whole,
        num_hidden_layers=3,
        attention=replace(
            whole.attention,
            compress_ratios=(0, 2, 1),
            kv_source_layer_ids=(1, 2),
            index_source_layer_ids=(1, 2),
        ),
        indexer=replace(
            whole.indexer, index_topk=64, candidate_source_layer_id=2, candidate_topk_blocks=9
        ),
        engram=None,
        execution=ExecutionConfig(numerics="checkpoint", kernels=kernels),
    )


CONFIG, KERNEL = config_with(()), config_with(INTERPRETED)
XLA_OPS, KERNEL_OPS = ops_for(CONFIG.execution), ops_for(KERNEL.execution)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.fixture(scope="module")
def state():
    """Two sequences of up to 256 tokens, every row of the cache written."""
    layout = CacheLayout(num_slots=3, num_blocks=5, max_blocks=2)
    empty = init_cache(CONFIG, layout)
    window = normal(0, *empty.window.shape[:3], DIM)
    main = [normal(1 + g, *leaf.shape[:3], DIM) for g, leaf in enumerate(empty.main)]
    keys = [normal(4 + g, *leaf.shape[:3], 128) for g, leaf in enumerate(empty.index_data)]
    data, scale = zip(*(rows.encode_index(CONFIG, key) for key in keys), strict=True)
    return empty.replace(
        window=rows.encode_window(CONFIG, window),
        main=tuple(rows.encode_main(CONFIG, row) for row in main),
        index_data=data,
        index_scale=scale,
        block_table=jnp.asarray([[0, 0], [3, 1], [2, 4]], jnp.int32),
    )


@pytest.fixture(scope="module")
def tile():
    return Rows(
        ids=jnp.zeros(4, jnp.int32),
        position=jnp.asarray([200, 201, 5, 0], jnp.int32),
        slot=jnp.asarray([1, 1, 2, 0], jnp.int32),
        valid=jnp.asarray([True, True, True, False]),
    )


def assert_near(found, expected):
    scale = np.sqrt(np.mean(np.square(expected)))
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-6 * scale)


@pytest.mark.parametrize("layer", range(3), ids=LAYERS)
def test_attention_over_the_bytes_of_the_cache(state, tile, layer):
    role, ratio = static_roles(CONFIG)[layer], max(layer and 3 - layer, 1)
    length = (tile.position + 1) // ratio
    topk = jnp.arange(64) + jnp.maximum(length[:, None] - 64, 0)
    topk = jnp.where(topk < length[:, None], topk, -1)
    query = XLA_OPS.bf16(normal(9, 4, HEADS, DIM))
    sink = normal(10, HEADS)
    lists = sublayer._key_lists(CONFIG, role, state, tile, topk)
    keys, valid = (jnp.concatenate(parts, axis=1) for parts in zip(*lists, strict=True))
    expected = core.attend(XLA_OPS, query, keys, valid, sink)
    found = jax.jit(
        lambda q: by_kernel.attend(KERNEL_OPS, KERNEL, role, state, tile, topk, q, sink)
    )(query)
    assert_near(np.asarray(found)[:3], np.asarray(expected)[:3])


def test_a_role_that_is_data_picks_the_same_rows(state, tile):
    known = static_roles(CONFIG)[1]
    data = jax.tree.map(jnp.int32, known)
    topk = jnp.where(jnp.arange(64) < 3, jnp.arange(64), -1) * jnp.ones((4, 1), jnp.int32)
    query, sink = XLA_OPS.bf16(normal(9, 4, HEADS, DIM)), normal(10, HEADS)

    @jax.jit
    def run(role):
        return by_kernel.attend(KERNEL_OPS, KERNEL, role, state, tile, topk, query, sink)

    expected = by_kernel.attend(KERNEL_OPS, KERNEL, known, state, tile, topk, query, sink)
    np.testing.assert_array_equal(np.asarray(run(data)), np.asarray(expected))


@pytest.mark.parametrize("group", range(2), ids=LAYERS[1:])
def test_index_scores_and_what_is_chosen(state, tile, group):
    role, ratio = static_roles(CONFIG)[1 + group], 2 - group
    query, weight = XLA_OPS.q4m(normal(11, 4, 32, 128)), XLA_OPS.bf16(normal(12, 4, 32))
    length = jnp.where(tile.valid, (tile.position + 1) // ratio, 0)
    capacity = state.block_table.shape[1] * state.main[group].shape[2]
    read = sublayer._index_keys(CONFIG, role, state, tile, group)
    expected = indexer.score_all(XLA_OPS, CONFIG, query, weight, read, length, capacity)
    found = by_kernel.index_scores(
        KERNEL_OPS, KERNEL, role, state, tile, group, query, weight, length
    )
    visible = np.arange(capacity) < np.asarray(length)[:, None]
    np.testing.assert_array_equal(
        np.asarray(found, np.float32)[visible], np.asarray(expected)[visible]
    )
    assert np.isneginf(np.asarray(found, np.float32)[~visible]).all()
    inside = jnp.arange(capacity) % 3 > 0
    inside = jnp.broadcast_to(inside, found.shape)
    for allowed in (None, inside):
        chosen = sublayer._choose(KERNEL_OPS, KERNEL, found, length, allowed)
        wanted = sublayer._choose(XLA_OPS, CONFIG, expected, length, allowed)
        np.testing.assert_array_equal(np.asarray(chosen), np.asarray(wanted))
    blocks = sublayer._candidates(KERNEL_OPS, KERNEL, found, length)
    wanted = sublayer._candidates(XLA_OPS, CONFIG, expected, length)
    np.testing.assert_array_equal(np.asarray(blocks), np.asarray(wanted))


def test_draft_rows_attend_to_their_window_and_their_block(state):
    slot, last = jnp.asarray([1, 2]), jnp.asarray([200, 17])
    size = CONFIG.draft.dspark_block_size
    place = CONFIG.num_hidden_layers + 1
    own = XLA_OPS.q8(normal(13, 2 * size, DIM))
    owner = draft._owner(jnp.arange(2 * size), size, 2)
    query, sink = XLA_OPS.bf16(normal(14, 2 * size, HEADS, DIM)), normal(15, HEADS)
    context, seen = read_window(CONFIG, state, place, slot, last)
    keys = jnp.concatenate([context, own.reshape(2, size, DIM)], axis=1)
    valid = jnp.concatenate([seen, jnp.ones((2, size), bool)], axis=1)
    expected = core.attend(XLA_OPS, query, keys[owner], valid[owner], sink)
    found = by_kernel.attend_block(
        KERNEL_OPS, KERNEL, state, place, slot, last, own, owner, query, sink
    )
    assert_near(np.asarray(found), np.asarray(expected))
