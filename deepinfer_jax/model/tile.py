"""What the layer functions work on: one tile of rows, the flow between layers, roles of layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import (
    LayerRole,
    index_layers,
    layer_roles,
    source_layers,
    source_ratios,
)
from deepinfer_jax.model.params import Leaf


@struct.dataclass
class Rows:
    """One tile: token ids, positions and slots of its rows; invalid rows are padding.

    image: what image rows carry in place of their id's embedding; None in a plan without images.
    whole: where devices share a tile, the rows of all of them, one device's after the other's.
    axes: of the mesh, over which they do.
    """

    ids: Leaf  # int32 [t]
    position: Leaf  # int32 [t]
    slot: Leaf  # int32 [t]
    valid: Leaf  # bool [t]
    image: Any = None  # float32 [t, d]
    whole: Any = None  # Rows [c * t]
    axes: tuple[str, ...] = struct.field(pytree_node=False, default=())

    def shared(self, values: Any) -> tuple["Rows", Any]:
        """Returns (rows, values) of all that share the tile: what each writes to its cache.

        values: leaves [t, ...] of the rows of this device.
        """
        if self.whole is None:
            return self, values
        gather = partial(lax.all_gather, axis_name=self.axes, axis=0, tiled=True)
        return self.whole, jax.tree.map(gather, values)


@struct.dataclass
class Selection:
    """Compressed indices chosen by the last index source, and the candidate blocks in force."""

    topk: Leaf  # int32 [t, k], ascending, -1 padded
    candidates: Leaf  # bool [t, blocks]


@struct.dataclass
class Flow:
    """What goes from layer to layer: streams, the next sub-layer's input mix, the selection."""

    streams: Leaf  # float32 [t, m, d]
    mix: Leaf  # float32 [t, m]
    selection: Selection


@struct.dataclass
class Role:
    """Layer roles as int32 scalars, or arrays [layers] before the scan. -1 means none.

    Or Python ints (`static_roles`): then `branch` and `may_be` decide while tracing.

    group, source: whose compressed rows are read, as index into `source_ratios` and into the stack
    of that ratio. owner: the group this layer writes to. index: its place among the indexers.
    search: the group whose index keys it searches. engram: its place among the Engram tables.
    """

    layer: Leaf
    group: Leaf
    source: Leaf
    owner: Leaf
    index: Leaf
    search: Leaf
    engram: Leaf
    yarn: Leaf
    is_candidate_source: Leaf
    uses_candidates: Leaf


def role_table(config: ModelConfig) -> Role:
    """Returns the roles of all layers as arrays [layers]."""
    entries = [_entry(config, role) for role in layer_roles(config)]
    return Role(**{name: jnp.asarray([e[name] for e in entries], jnp.int32) for name in entries[0]})


def static_roles(config: ModelConfig) -> list[Role]:
    """Returns the role of every layer as Python ints, for layers that are traced one by one."""
    return [Role(**_entry(config, role)) for role in layer_roles(config)]


def _entry(config: ModelConfig, role: LayerRole) -> dict[str, int]:
    sources = source_layers(config, role.ratio)
    group = _place(source_ratios(config), role.ratio)
    index = _place(index_layers(config), role.layer)
    return {
        "layer": role.layer,
        "group": group,
        "source": max(_place(sources, role.kv_source), 0),
        "owner": group if role.kv_source == role.layer else -1,
        "index": index,
        "search": group if index >= 0 else -1,
        "engram": _place(config.engram.engram_layer_ids if config.engram else (), role.layer),
        "yarn": int(role.uses_yarn),
        "is_candidate_source": int(role.is_candidate_source),
        "uses_candidates": int(role.uses_candidates),
    }


def _place(values: tuple[int, ...], value: int | None) -> int:
    return values.index(value) if value in values else -1


def branch(
    place: Int[Array, ""] | int, none: Callable[[], Any], some: list[Callable[[], Any]]
) -> Any:
    """Returns `some[place]()`, or `none()` where place is -1; a known place traces its own only.

    Branches return rows, never caches: a cache that passes through a branch is copied
    (determinism.md 12, trap 5).
    """
    if isinstance(place, int):
        return none() if place < 0 else some[place]()
    return lax.switch(place + 1, [none, *some])


def may_be(place: Int[Array, ""] | int, value: int) -> bool:
    """Says whether a place can have this value: one that is data can, a known one has one value."""
    return not isinstance(place, int) or place == value


def scan_first(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, trips: Int[Array, ""]
) -> tuple[Any, Any]:
    """Returns `lax.scan(body, carry, xs)`, of which only the first `trips` trips are run.

    Outputs of the others are zeros. One loop with a bound that is data, rather than a second scan
    under a condition: its body is the same arithmetic as the scan's, and caches in the carry are
    updated in place.
    """
    count = jax.tree.leaves(xs)[0].shape[0]

    def at(place: Int[Array, ""] | int) -> Any:
        return jax.tree.map(lambda x: x[place], xs)

    def visit(place: Int[Array, ""] | int, both: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, new = body(both[0], at(place))
        return carry, jax.tree.map(lambda rows, row: rows.at[place].set(row), both[1], new)

    shapes = jax.eval_shape(lambda: body(carry, at(0))[1])
    outputs = jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)
    return lax.fori_loop(0, trips, visit, (carry, outputs))
