"""Pure functions on the cache of one sequence: opening its slot, checkpoints of its windows, forks.

What they leave alone, compressed rows in shared blocks, is addressed by the block table, which the
engine writes (engine.md 4.5, 6.5).
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Shaped

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import encoder_layers, source_ratios
from deepinfer_jax.model.engram.hashing import compressed_ids
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.registry import AnyParams, AnyState
from deepinfer_jax.model.v4.state import V4CacheState

Index = Int[Array, ""] | int  # a slot or a block


def look_back(config: ModelConfig) -> int:
    """Returns how many token ids before its first row a sequence must be opened with."""
    return config.engram.engram_max_ngram_size - 1 if config.engram else 0


def open_slots(
    params: AnyParams,
    config: ModelConfig,
    state: AnyState,
    slot: Int[Array, " n"],
    *,
    length: Int[Array, " n"],
    first: Int[Array, " n"],
    floor: Int[Array, " n"],
    ids_before: Int[Array, "n b"],
) -> AnyState:
    """Returns the state with n slots ready for the first row of a new or recovered sequence.

    Rows must run from `first` on. Those below `length`, which rebuild windows, see no window row
    before `first` and write no pages. Window rows before `first` are those of a checkpoint, if
    `first` is `length` and not 0 (`put_checkpoint`).

    Args:
        params: of the model, for its token map.
        config: of the model.
        state: of the cache.
        slot: distinct slots; entries outside the cache are dropped.
        length: tokens whose pages are in the block table and written: the prefix hit, or 0.
        first: first position that will run: `length`, less the rows that rebuild windows.
        floor: first window row of decoder layers, from `cache.hit.first_decoder_row`; 0 for V4.
        ids_before: ids at the `look_back(config)` positions before `first`, ascending; any value
            where the position is negative.
    """
    start = jnp.where(first < length, first, 0)
    if isinstance(state, V4CacheState):
        return replace(
            state,
            length=state.length.at[slot].set(length, mode="drop"),
            window_start=state.window_start.at[slot].set(start, mode="drop"),
            write_from=state.write_from.at[slot].set(length, mode="drop"),
        )
    state = replace(
        state,
        length=state.length.at[slot].set(length, mode="drop"),
        floor=state.floor.at[slot].set(floor, mode="drop"),
        window_start=state.window_start.at[slot].set(start, mode="drop"),
        write_from=state.write_from.at[slot].set(length, mode="drop"),
    )
    engram = cast(Params, params).engram
    if engram is None:
        return state
    count = look_back(config)
    position = first[:, None] - count + jnp.arange(count, dtype=jnp.int32)
    owner = jnp.where(position >= 0, slot[:, None], state.engram_ids.shape[0])
    compressed = compressed_ids(config, engram, ids_before)
    ring = position % state.engram_ids.shape[1]
    return replace(state, engram_ids=state.engram_ids.at[owner, ring].set(compressed, mode="drop"))


@partial(jax.jit, static_argnames="config")
def take_checkpoint(
    config: ModelConfig, state: AnyState, slot: Index, length: Index
) -> dict[str, Array]:
    """Returns what a prefix hit at `length` needs beside its blocks (engine.md 4.5).

    window [layers, W, row]: the last W rows of the rings that `config.execution.replay` does not
    rebuild; with replay off that includes draft stages. V4: also the last 4 rows of the compressor
    tails whose groups pool the group before, tail and index_tail [layers of ratio 4, 4, 2, width].

    slot: has run exactly `length` tokens, a block border, where all other groups are closed.
    """
    rings, place = _window_place(config, state, length)
    kept = {"window": state.window[slot, :rings][:, place]}
    if isinstance(state, V4CacheState) and state.index_tail is not None:
        group, place = _tail_place(config, state, length)
        kept["tail"] = state.tail[group][:, slot][:, place]
        kept["index_tail"] = state.index_tail[:, slot][:, place]
    return kept


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def put_checkpoint(
    config: ModelConfig,
    state: AnyState,
    slot: Index,
    length: Index,
    leaves: dict[str, Shaped[Array, "..."]],
) -> AnyState:
    """Returns the state with what `take_checkpoint` gave in a slot; `state` is donated.

    Any slot, block table and ring capacity, but the same `replay`. `open_slots` does the rest.
    """
    rings, place = _window_place(config, state, length)
    layers = jnp.arange(rings)[:, None]
    state = replace(state, window=state.window.at[slot, layers, place].set(leaves["window"]))
    if isinstance(state, V4CacheState) and state.index_tail is not None:
        group, place = _tail_place(config, state, length)
        tails, index_tail = list(state.tail), state.index_tail
        tails[group] = tails[group].at[:, slot, place].set(leaves["tail"])
        index_tail = index_tail.at[:, slot, place].set(leaves["index_tail"])
        state = replace(state, tail=tuple(tails), index_tail=index_tail)
    return state


def _window_place(config: ModelConfig, state: AnyState, length: Index) -> tuple[int, Array]:
    """Returns how many rings a checkpoint holds, and the ring slots of the W rows before it."""
    everything = config.execution.replay == "off"
    rings = state.window.shape[1] if everything else encoder_layers(config)
    window = config.attention.sliding_window
    return rings, (length - window + jnp.arange(window)) % state.window.shape[2]


def _tail_place(config: ModelConfig, state: V4CacheState, length: Index) -> tuple[int, Array]:
    """Returns which tails overlap groups, and the ring slots of the group before `length`."""
    group = source_ratios(config).index(4)
    return group, (length - 4 + jnp.arange(4)) % state.tail[group].shape[2]


@partial(jax.jit, donate_argnames="state")
def copy_slot(state: AnyState, source: Index, target: Index) -> AnyState:
    """Returns the state with a sequence's rings, tails and limits in another slot as well.

    Not its row of the block table: a fork shares the full blocks of its parent and has a copy of
    the last (`copy_block`). `state` is donated.
    """

    def rows(leaf: Any) -> Any:  # slots first
        return leaf.at[target].set(leaf[source])

    def stacked(leaf: Any) -> Any:  # slots second; None where a ratio has no tail
        return jax.tree.map(lambda one: one.at[:, target].set(one[:, source]), leaf)

    common = {
        name: rows(getattr(state, name))
        for name in ("window", "length", "window_start", "write_from")
    }
    if isinstance(state, V4CacheState):
        return replace(
            state, **common, tail=stacked(state.tail), index_tail=stacked(state.index_tail)
        )
    return replace(
        state,
        **common,
        comp_tail=stacked(state.comp_tail),
        engram_ids=rows(state.engram_ids),
        floor=rows(state.floor),
    )


@partial(jax.jit, donate_argnames="state")
def copy_block(state: AnyState, source: Index, target: Index) -> AnyState:
    """Returns the state with all compressed rows and index keys of a block in another block too.

    `state` is donated.
    """

    def pages(leaf: Any) -> Any:
        return jax.tree.map(lambda one: one.at[:, target].set(one[:, source]), leaf)

    names = ("main", "index_data", "index_scale")
    if isinstance(state, V4CacheState):
        names = ("main", "index_keys")
    return replace(state, **{name: pages(getattr(state, name)) for name in names})
