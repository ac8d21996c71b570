"""How far are a network's layers on kernels from those on XLA, each from the same inputs?

Whole networks that round to BF16 are chaotic: a router or a selection that decides otherwise by one
unit in the last place changes a row (determinism.md 9, the fixtures' README). So every layer starts
from what XLA's layer before it gave, and is held to the fixtures' bound for one layer.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.layer import apply_layer
from deepinfer_jax.model.network import first_flow
from deepinfer_jax.model.tile import Flow, Rows, role_table
from deepinfer_jax.numerics.ops import ops_for

FROBENIUS = 0.03  # norm of the difference over that of XLA's streams, at most
TOKEN, TOKENS = 0.05, 0.95  # share of a token's largest value, for this share of tokens


def layer_program(config: ModelConfig, rows: int) -> Any:
    """Returns the jitted (params, role, state, flow, tile) -> (state, flow) of any one layer."""
    execution = replace(config.execution, branches="data", row_tile=rows)
    config = replace(config, execution=execution)
    ops = ops_for(execution)

    def run(params: Any, role: Any, state: Any, flow: Flow, tile: Rows) -> tuple[Any, Flow]:
        state, flow, _ = apply_layer(ops, config, params, role, state, flow, tile)
        return state, flow

    return jax.jit(run)


def frobenius(found: Any, expected: Any) -> float:
    """Returns the norm of the difference over that of `expected`."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def layer_distances(
    ours: tuple[ModelConfig, Any], theirs: tuple[ModelConfig, Any], state: Any, tile: Rows
) -> Iterator[dict[str, Any]]:
    """Yields a record a layer: distances of the streams of valid rows, and whether they are near.

    Args:
        ours: config and parameters on kernels.
        theirs: on XLA.
        state: a cache after a step of these rows, which the layers write again.
        tile: the rows.
    """
    config, rows = theirs[0], len(tile.ids)
    programs = [layer_program(one, rows) for one, _ in (ours, theirs)]
    table, kept = role_table(config), np.asarray(tile.valid)
    flow = first_flow(config, theirs[1], state, tile)
    for layer in range(config.num_hidden_layers):
        role = jax.tree.map(lambda leaf, layer=layer: jnp.asarray(leaf[layer]), table)
        (_, found), (state, flow) = (
            program(params, role, state, flow, tile)
            for program, (_, params) in zip(programs, (ours, theirs), strict=True)
        )
        got, want = (np.asarray(one.streams, np.float64)[kept] for one in (found, flow))
        error = np.abs(got - want)
        within = (error.max((1, 2)) <= TOKEN * np.abs(want).max((1, 2))).mean()
        norm = frobenius(got, want)
        yield {
            "layer": layer,
            "frobenius": norm,
            "tokens_within": float(within),
            "is_near": bool(norm <= FROBENIUS and within >= TOKENS),
        }
