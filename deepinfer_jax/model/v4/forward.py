"""Whole-sequence functions of DeepSeek-V4, as `model.forward` dispatches to them."""

from jax import Array
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params_v4 import V4Params
from deepinfer_jax.model.step import plan_length, sequence_plan
from deepinfer_jax.model.v4.state import V4CacheState, single_sequence_v4
from deepinfer_jax.model.v4.step import logits_v4, step_v4


def score_v4(config: ModelConfig, params: V4Params, ids: Int[Array, " t"]) -> Float[Array, "t v"]:
    """Returns float32 logits of every position, by full recomputation."""
    plan = sequence_plan(ids, config.execution.row_tile)
    _, hidden, _ = step_v4(params, config, _fresh(config, ids.shape[0]), plan)
    return logits_v4(params, config, hidden)[: ids.shape[0]]


def hidden_v4(
    config: ModelConfig, params: V4Params, ids: Int[Array, " t"]
) -> tuple[list[Float[Array, "t m d"]], Float[Array, "t d"]]:
    """Returns the streams leaving every layer, and the final normed hidden."""
    count = ids.shape[0]
    plan = sequence_plan(ids, config.execution.row_tile)
    _, hidden, seen = step_v4(params, config, _fresh(config, count), plan, collect=("x_out",))
    return [layer[:count] for layer in seen["x_out"]], hidden[:count]


def _fresh(config: ModelConfig, tokens: int) -> V4CacheState:
    tile = config.execution.row_tile
    height = tile if config.execution.determinism == "batch" else plan_length(tokens, tile)
    return single_sequence_v4(config, tokens, row_tile=height)
