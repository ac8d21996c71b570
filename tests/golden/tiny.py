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


def run_prompt(ids: np.ndarray, numerics: str = "float32") -> Run:
    """Returns one pass from position 0; one compiled program serves every length up to ROWS."""
    count = len(ids)
    plan = sequence_plan(jnp.asarray(np.pad(ids, (0, ROWS - count))), TILE)
    plan = plan.replace(count=jnp.int32(count))
    state = single_sequence(tiny_config(numerics), ROWS, row_tile=TILE)
    state, hidden, scores, seen = _program(numerics)(tiny_params(numerics), state, plan)
    return Run(
        state=state,
        normed=np.asarray(hidden)[:count],
        logits=np.asarray(scores)[:count],
        seen={name: np.asarray(array)[:, :count] for name, array in seen.items()},
    )
