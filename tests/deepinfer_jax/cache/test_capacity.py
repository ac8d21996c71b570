"""Capacity arithmetic against the bytes of real states, and admission."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

import deepinfer_jax as di
from deepinfer_jax.cache.capacity import (
    admissible,
    blocks_for,
    checkpoint_bytes,
    plan_capacity,
    reserved_blocks,
)
from deepinfer_jax.errors import CapacityError, ConfigError
from deepinfer_jax.model.registry import network_of

pytestmark = pytest.mark.accept(5)
FLASH = replace(
    di.preset("deepseek-v4.1-flash"), execution=di.ExecutionConfig(numerics="checkpoint")
)
TINY_V4 = Path(__file__).resolve().parents[2] / "fixtures" / "tiny_v4"
SIZES = {"max_seqs": 3, "max_len": 300, "block_tokens": 128, "row_tile": 8, "rollback": 6}


def tiny(name):
    if name == "tiny_v4":
        return di.read_config(TINY_V4)
    execution = di.ExecutionConfig(numerics=name)
    return replace(di.preset("tiny-v41"), execution=execution)


@pytest.mark.parametrize("name", ["float32", "checkpoint", "tiny_v4"])
def test_total_is_the_bytes_of_the_allocated_state(name):
    config = tiny(name)
    capacity = plan_capacity(config, 2 * 2**20, **SIZES)
    layout = capacity.layout
    state = network_of(config).init_cache(config, layout)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == capacity.total_bytes
    assert (layout.num_slots, layout.max_blocks) == (4, 3)
    assert state.block_table.shape == (4, 3)
    left = capacity.available_bytes - capacity.total_bytes
    assert 0 <= left < capacity.block_bytes
    assert layout.num_blocks > 4


def test_released_model_has_the_published_bytes():
    capacity = plan_capacity(FLASH, 2**33, **SIZES | {"max_len": 2**20, "row_tile": 1})
    assert capacity.block_bytes == 128 * 890
    # Published rings and tails, then our look-back, length, three limits, row of the block table.
    assert capacity.slot_bytes == 3_128_352 + 4 * (6 + 3) + 4 * (1 + 3) + 4 * 8192
    assert capacity.layout.num_blocks == (2**33 - 4 * capacity.slot_bytes) // (128 * 890)


def test_too_small_a_budget_names_both_sizes():
    fits = plan_capacity(tiny("float32"), 2**30, **SIZES)
    required = 4 * fits.slot_bytes + 4 * fits.block_bytes
    exact = plan_capacity(tiny("float32"), required, **SIZES)
    assert exact.layout.num_blocks == 4
    with pytest.raises(CapacityError, match=rf"least {required} bytes.*are {required - 1} bytes"):
        plan_capacity(tiny("float32"), required - 1, **SIZES)


@pytest.mark.parametrize("name", ["max_seqs", "max_len", "block_tokens"])
def test_sizes_are_positive(name):
    with pytest.raises(ConfigError, match=f"{name} must be >= 1"):
        plan_capacity(tiny("float32"), 2**30, **SIZES | {name: 0})


def test_checkpoint_bytes_of_the_released_model():
    assert checkpoint_bytes(FLASH, replay="off", rollback=6) == 43 * 134 * 528
    for replay in ("mask", "compact"):
        assert checkpoint_bytes(FLASH, replay=replay, rollback=6) == 20 * 134 * 528


def test_v4_checkpoints_hold_the_tails_too():
    config = tiny("tiny_v4")
    attention = config.attention
    window = config.num_hidden_layers * (attention.sliding_window + 6) * attention.head_dim * 4
    assert checkpoint_bytes(config, replay="off", rollback=6) > window
    with pytest.raises(ConfigError, match="no encoder and decoder"):
        checkpoint_bytes(config, replay="mask", rollback=6)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2)])
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens, 128) == blocks


def test_reserve_is_per_running_request_and_one_percent():
    sizes = {"block_tokens": 16, "num_blocks": 250}
    assert reserved_blocks(running=3, lookahead=12, **sizes) == 3 + 2
    assert reserved_blocks(running=3, lookahead=16, **sizes) == 3 + 2
    assert reserved_blocks(running=3, lookahead=17, **sizes) == 6 + 2
    assert reserved_blocks(running=0, lookahead=17, **sizes) == 0


def test_admission_is_exact_at_its_border():
    sizes = {"need": 4, "running": 3, "lookahead": 12, "block_tokens": 16, "num_blocks": 250}
    assert admissible(available=9, **sizes)
    assert not admissible(available=8, **sizes)
    alone = sizes | {"running": 0}
    assert admissible(available=4, **alone)
    assert not admissible(available=3, **alone)
