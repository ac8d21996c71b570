"""Whole-network runs of tiny_v41 through `step`, with every observation of every layer."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.registry import single_sequence
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.step import logits, sequence_plan, step
from tests.golden.network import TILE, tiny_config, tiny_params

ROWS = 304  # prompt C, in whole tiles
MOST_IMAGE_ROWS = 24
SEEN = (
    "x_in",
    "tap",
    "attn_in",
    "attn_out",
    "ffn_in",
    "ffn_out",
    "x_out",
    "pre_out",
    "topk",
    "expert_ids",
    "expert_weights",
    "compressed_rows",
    "index_keys",
)


@dataclass
class Run:
    """What one pass over a prompt gave: `seen[name]` is [layers, tokens, ...]."""

    state: CacheState
    normed: np.ndarray
    logits: np.ndarray
    seen: dict[str, np.ndarray]


@lru_cache(maxsize=2)
def _program(numerics: str) -> Any:
    config = tiny_config(numerics)

    def run(params, state, plan):
        state, hidden, seen = step(params, config, state, plan, drafting=True, collect=SEEN)
        return state, hidden, logits(params, config, hidden), seen

    return jax.jit(run)


def run_prompt(
    ids: np.ndarray, numerics: str = "float32", image_rows: np.ndarray | None = None
) -> Run:
    """Returns one pass from position 0; one compiled program serves every length up to ROWS.

    image_rows: what takes the place of image tokens, in order.
    """
    count = len(ids)
    plan = sequence_plan(jnp.asarray(np.pad(ids, (0, ROWS - count))), TILE)
    place = np.maximum(np.cumsum(ids == tiny_config().image_token_id) - 1, 0)
    rows = jnp.zeros((MOST_IMAGE_ROWS, tiny_config().hidden_size))
    if image_rows is not None:
        rows = rows.at[: len(image_rows)].set(image_rows)
    plan = plan.replace(
        count=jnp.int32(count),
        image_rows=rows,
        image_place=jnp.asarray(np.pad(place, (0, ROWS - count)).astype(np.int32)),
    )
    state = single_sequence(tiny_config(numerics), ROWS, row_tile=TILE)
    state, hidden, scores, seen = _program(numerics)(tiny_params(numerics), state, plan)
    return Run(
        state=state,
        normed=np.asarray(hidden)[:count],
        logits=np.asarray(scores)[:count],
        seen={name: np.asarray(array)[:, :count] for name, array in seen.items()},
    )
