"""The step in two programs, for steps with grammars: the network, then the tokens under masks.

The masks of a step depend on the tokens of the one before it. Between the two dispatches the host
reads those, and works masks out while the network runs (io.md 2.7, engine.md 2.6). Steps without
grammars never come here: their one program knows no masks.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.engine.drafting import Drafting
from deepinfer_jax.engine.layout import PlanLayout, unpack
from deepinfer_jax.engine.program import (
    MaskTable,
    StepResult,
    StepRows,
    network_part,
    token_part,
)
from deepinfer_jax.grammar.masks import MaskRows
from deepinfer_jax.model.on_mesh import everywhere

#: Mask rows that travel together are padded to a power of four times this many.
_LEAST_ROWS = 8


@partial(
    jax.jit,
    static_argnames=("trees", "config", "layout", "alternatives"),
    donate_argnames="state",
)
def run_network(
    params: tuple[Array, ...],
    state: tuple[Array, ...],
    vector: Int[Array, " n"],
    *,
    trees: tuple[Any, Any],
    config: ModelConfig,
    layout: PlanLayout,
    alternatives: int,
) -> tuple[tuple[Array, ...], StepRows]:
    """Returns (leaves of the state, rows) after the network; arguments as `program.run_step`."""
    tree = jax.tree.unflatten(trees[0], params)
    run = partial(network_part, config=config, layout=layout, alternatives=alternatives)
    run_all = everywhere(run, config, tree, 2)
    after, rows = run_all(tree, jax.tree.unflatten(trees[1], state), unpack(layout, vector))
    return tuple(jax.tree.leaves(after)), rows


@partial(
    jax.jit,
    static_argnames=("trees", "config", "layout", "alternatives", "drafting", "hashes"),
    donate_argnames="state",
)
def run_tokens(
    params: tuple[Array, ...],
    state: tuple[Array, ...],
    vector: Int[Array, " n"],
    rows: StepRows,
    masks: MaskTable,
    *,
    trees: tuple[Any, Any],
    config: ModelConfig,
    layout: PlanLayout,
    alternatives: int,
    drafting: Drafting | None,
    hashes: bool,
) -> tuple[tuple[Array, ...], StepResult]:
    """Returns what `program.run_step` does, under masks.

    Args:
        params: as there, as are the arguments that are not named here.
        state: after `run_network`.
        vector: the same packed plan.
        rows: of `run_network`.
        masks: of `mask_table`.
    """
    tree = jax.tree.unflatten(trees[0], params)
    options = {"layout": layout, "alternatives": alternatives}
    options |= {"drafting": drafting, "hashes": hashes}

    def run(params: Any, state: Any, parts: Any, rows: StepRows, masks: MaskTable) -> Any:
        return token_part(params, state, parts, rows, config=config, masks=masks, **options)

    run_all = everywhere(run, config, tree, 4)
    given = (jax.tree.unflatten(trees[1], state), unpack(layout, vector), rows, masks)
    after, result = run_all(tree, *given)
    return tuple(jax.tree.leaves(after)), result


@partial(jax.jit, static_argnames="rows")
def mask_table(
    words: Int[Array, "n w"], forced: Int[Array, "n k"], place: Int[Array, " n"], *, rows: int
) -> MaskTable:
    """Returns the masks of all rows that may choose a token.

    words, forced: of the rows at `place` (`grammar.masks.MaskRows`); places beyond the table are
    dropped. All other rows allow everything, and nothing follows them.
    """

    def spread(values: Array) -> Array:
        table = jnp.full((rows, values.shape[1]), -1, jnp.int32)
        return table.at[place].set(values, mode="drop")

    return MaskTable(words=spread(words), forced=spread(forced))


def mask_sizes(layout: PlanLayout) -> list[int]:
    """Returns the numbers of mask rows that are sent: few, so that few programs serve them."""
    sizes, most = [_LEAST_ROWS], table_rows(layout)
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 4)
    return sizes


def table_rows(layout: PlanLayout) -> int:
    """Returns the rows of a layout's mask table."""
    return layout.slots * (layout.drafts + 1)


def padded(layout: PlanLayout, found: MaskRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the first three arguments of `mask_table`, padded to the next of `mask_sizes`."""
    more = next(size for size in mask_sizes(layout) if size >= len(found.words)) - len(found.words)
    rows = [(0, more), (0, 0)]
    place = np.pad(found.place, (0, more), constant_values=table_rows(layout))
    return np.pad(found.words, rows), np.pad(found.forced, rows), place
