"""Pure functions over a whole sequence: logits, hidden states, one draft round (architecture.md 4).

Each recomputes the sequence from its first token through `step`, the program that serves prefill
and decode, with every row in every layer: `replay` is for an engine's prefill. Under `vmap` they
become a `lax.map`: a batched body would be other arithmetic. Their reverse mode recomputes the
forward pass.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.custom_batching import sequential_vmap
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import InputError
from deepinfer_jax.model.draft import DraftOutput, draft_blocks, draft_params, draft_settings
from deepinfer_jax.model.on_mesh import over_mesh
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.registry import AnyParams, AnyState, single_sequence
from deepinfer_jax.model.share import rows_before_read
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.step import logits, plan_length, sequence_plan, step

TokenIds = Any  # int array or sequence [t]; checked here rather than by its type


def score(params: AnyParams, config: ModelConfig, token_ids: TokenIds) -> Float[Array, "t v"]:
    """Returns float32 logits of every position, by full recomputation.

    Pure; works under `jit`, `vmap` and `grad`. At "batch" a row's bits do not depend on the other
    rows.

    Raises:
        InputError: no tokens, a rank other than 1, or (for concrete ids) an id outside the
        vocabulary.
    """
    ids = check_ids(config, token_ids, minimum=1)
    return _differentiable(partial(over_mesh, score_ids, _every_row(config)))(params, ids)


def hidden_states(
    params: AnyParams, config: ModelConfig, token_ids: TokenIds
) -> list[Float[Array, "..."]]:
    """Returns the residual streams [t, m, d] leaving every layer, then the final normed hidden [t,
    d].

    Raises:
        InputError: as `score`.
    """
    ids = check_ids(config, token_ids, minimum=1)
    streams, final = _differentiable(partial(over_mesh, _hidden, _every_row(config)))(params, ids)
    return [*streams, final]


def draft(params: AnyParams, config: ModelConfig, token_ids: TokenIds) -> DraftOutput:
    """Returns one DSpark round after `token_ids`, whose last id is the anchor (not yet processed).

    Raises:
        InputError: the checkpoint has no draft stages, or fewer than two ids (a round needs a
            processed position before the anchor); otherwise as `score`.
    """
    draft_settings(config)
    draft_params(params)
    ids = check_ids(config, token_ids, minimum=2)
    run = partial(over_mesh, _draft, _every_row(config))
    return sequential_vmap(run)(cast(Params, params), ids)


def check_ids(config: ModelConfig, token_ids: TokenIds, *, minimum: int) -> Int[Array, " t"]:
    """Returns the ids as int32 [t] after checking rank, length, range and images.

    Raises:
        InputError: the ids break one of these rules.
    """
    if isinstance(token_ids, Tracer):
        _check_shape(config, token_ids, minimum)
        return token_ids.astype(jnp.int32)
    return jnp.asarray(host_ids(config, token_ids, minimum=minimum))


def host_ids(config: ModelConfig, token_ids: TokenIds, *, minimum: int) -> np.ndarray:
    """Returns concrete ids as a NumPy array int32 [t], checked as by `check_ids`.

    Raises:
        InputError: the ids break one of its rules.
    """
    ids = np.asarray(token_ids)
    _check_shape(config, ids, minimum)
    _check_values(config, ids)
    return ids.astype(np.int32)


def _check_shape(config: ModelConfig, ids: Any, minimum: int) -> None:
    if ids.ndim != 1 or not (jnp.issubdtype(ids.dtype, jnp.integer) or ids.size == 0):
        raise InputError(f"token ids must be integers of shape [t], got {ids.dtype} {ids.shape}")
    if ids.shape[0] < minimum:
        raise InputError(
            f"at least {minimum} token id(s) are needed, got {ids.shape[0]}: the prompt is empty "
            "or too short"
        )
    if ids.shape[0] > config.max_position_embeddings:
        raise InputError(
            "a sequence may have at most max_position_embeddings="
            f"{config.max_position_embeddings} tokens, got {ids.shape[0]}"
        )


def _check_values(config: ModelConfig, ids: Any) -> None:
    outside = [
        (int(p), int(ids[p])) for p in ((ids < 0) | (ids >= config.vocab_size)).nonzero()[0][:3]
    ]
    if outside:
        raise InputError(
            f"token ids must lie in 0..{config.vocab_size - 1}; got "
            + ", ".join(f"{token} at position {position}" for position, token in outside)
        )
    if config.image_token_id is not None and (ids == config.image_token_id).any():
        raise InputError(
            f"the image token {config.image_token_id} needs an image, and images are not supported "
            "yet: remove it from the prompt"
        )


def _differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps f(params, ids): `vmap` runs one sequence after the other, also in the backward pass.

    `sequential_vmap` alone cannot be differentiated in reverse, hence the explicit rule.
    """
    serial = sequential_vmap(function)
    wrapped = jax.custom_vjp(serial)

    def forward(params: AnyParams, ids: Array) -> tuple[Any, tuple[AnyParams, Array]]:
        return serial(params, ids), (params, ids)

    @sequential_vmap
    def pull_back(params: AnyParams, ids: Array, cotangent: Any) -> Any:
        return jax.vjp(lambda p: function(p, ids), params)[1](cotangent)[0]

    def backward(saved: tuple[AnyParams, Array], cotangent: Any) -> tuple[Any, None]:
        return pull_back(*saved, cotangent), None

    wrapped.defvjp(forward, backward)
    return wrapped


def _every_row(config: ModelConfig) -> ModelConfig:
    return replace(config, execution=replace(config.execution, replay="off"))


def fresh_cache(config: ModelConfig, tokens: int) -> AnyState:
    """Returns an empty cache for one sequence of `tokens` tokens in slot 1."""
    execution = config.execution
    whole = plan_length(tokens, execution.row_step)
    height = rows_before_read(execution) if execution.is_tiled else whole
    return single_sequence(config, tokens, row_tile=height)


def score_ids(config: ModelConfig, params: AnyParams, ids: Int[Array, " t"]) -> Float[Array, "t v"]:
    """Returns `score` of checked ids, as every device of a mesh computes it."""
    plan = sequence_plan(ids, config.execution.row_step)
    _, hidden, _ = step(params, config, fresh_cache(config, ids.shape[0]), plan)
    return logits(params, config, hidden)[: ids.shape[0]]


def _hidden(
    config: ModelConfig, params: AnyParams, ids: Int[Array, " t"]
) -> tuple[list[Float[Array, "t m d"]], Float[Array, "t d"]]:
    plan = sequence_plan(ids, config.execution.row_step)
    state = fresh_cache(config, ids.shape[0])
    _, hidden, seen = step(params, config, state, plan, collect=("x_out",))
    count = ids.shape[0]
    return [layer[:count] for layer in seen["x_out"]], hidden[:count]


def _draft(config: ModelConfig, params: Params, ids: Int[Array, " t"]) -> DraftOutput:
    tile, processed = config.execution.row_step, ids.shape[0] - 1
    plan = sequence_plan(ids[:-1], tile)
    fresh = fresh_cache(config, processed)
    state, _, _ = step(params, config, fresh, plan, drafting=True)
    rounds = draft_blocks(
        params,
        config,
        cast(CacheState, state),
        ids[-1:],
        jnp.full((1,), processed - 1, jnp.int32),
        jnp.ones((1,), jnp.int32),
        1,
        with_logits=True,
    )
    return jax.tree.map(lambda leaf: leaf[0], rounds)
