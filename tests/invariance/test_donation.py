"""The cached step updates its state in place: no copy of a cache leaf is made."""

import jax
import jax.numpy as jnp

import deepinfer_jax as di
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.loading import load
from deepinfer_jax.model import cached
from tests.golden.network import TINY


def test_every_cache_leaf_is_donated_and_aliased():
    model = load(TINY)
    state = di.init_state(model.config, RuntimeConfig(max_seqs=64, max_len=1024))
    plan = di.make_plan(model.config, [5, 6], [0, 1], [1, 1])
    compiled = cached._program.lower(model.params, model.config, state, plan).compile()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == held
    assert memory.temp_size_in_bytes < held / 2
    after, _ = di.prefill(model.params, model.config, state, plan)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert jnp.array_equal(after.length, jnp.zeros((65,), jnp.int32).at[1].set(2))
