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
from deepinfer_jax.model.step import Plan, logits, plan_length, sequence_plan, step
from deepinfer_jax.model.vision.positions import image_mask

TokenIds = Any  # int array or sequence [t]; checked here rather than by its type


def score(
    params: AnyParams,
    config: ModelConfig,
    token_ids: TokenIds,
    image_rows: Float[Array, "n d"] | None = None,
) -> Float[Array, "t v"]:
    """Returns float32 logits [t, v] of every position, by full recomputation.

    Pure; works under `jit`, `vmap` and `grad`. At "batch" a row's bits do not depend on the other
    rows.

    Args:
        params: `Model.params`.
        config: `Model.config`; static under `jit`.
        token_ids: integers [t], concrete or traced; a list will do.
        image_rows: of `encode_images`: a row for every image token id, in their order; None for
            text.

    Raises:
        InputError: no tokens, a rank other than 1, or (for concrete ids) an id outside the
            vocabulary, or another number of image rows than of image token ids.

    Examples:
        >>> logits = di.score(model.params, model.config, [368, 440, 557])
        >>> logits.shape, logits.dtype
        ((3, 2048), dtype('float32'))
    """
    ids = check_ids(config, token_ids, minimum=1, image_rows=image_rows)
    run = _differentiable(partial(_over_mesh, score_ids, _every_row(config)))
    return run(params, ids, image_rows)


def hidden_states(
    params: AnyParams,
    config: ModelConfig,
    token_ids: TokenIds,
    image_rows: Float[Array, "n d"] | None = None,
) -> list[Float[Array, "..."]]:
    """Returns a list: the residual streams leaving every layer, then the final normed hidden.

    The streams are float32 [t, m, d] (m streams of width d), the last entry is float32 [t, d].
    Pure, as `score`, with the same arguments.

    Raises:
        InputError: as `score`.

    Examples:
        >>> found = di.hidden_states(model.params, model.config, [368, 440, 557])
        >>> len(found), found[0].shape, found[-1].shape
        (13, (3, 4, 192), (3, 192))
    """
    ids = check_ids(config, token_ids, minimum=1, image_rows=image_rows)
    run = _differentiable(partial(_over_mesh, _hidden, _every_row(config)))
    streams, final = run(params, ids, image_rows)
    return [*streams, final]


def draft(
    params: AnyParams,
    config: ModelConfig,
    token_ids: TokenIds,
    image_rows: Float[Array, "n d"] | None = None,
) -> DraftOutput:
    """Returns one DSpark round after `token_ids`, whose last id is the anchor (not yet processed).

    `.token_ids` is int32 [block], `.confidence` and `.confidence_logit` float32 [block], `.logits`
    float32 [block, v]. Pure, as `score`, with the same arguments.

    Raises:
        InputError: the checkpoint has no draft stages, fewer than two ids (a round needs a
            processed position before the anchor), or an image at the end; otherwise as `score`.

    Examples:
        >>> found = di.draft(model.params, model.config, [368, 440, 557])
        >>> found.token_ids.shape, found.logits.shape
        ((5,), (5, 2048))
    """
    draft_settings(config)
    draft_params(params)
    ids = check_ids(config, token_ids, minimum=2, image_rows=image_rows)
    is_image = image_mask(config, ids)
    if is_image is not None and not isinstance(ids, Tracer) and bool(is_image[-1]):
        raise InputError(
            "drafts follow a text token, and the last id is the image token "
            f"{config.image_token_id}: end token_ids with text"
        )
    run = partial(_over_mesh, _draft, _every_row(config))
    return sequential_vmap(run)(cast(Params, params), ids, image_rows)


def check_ids(
    config: ModelConfig,
    token_ids: TokenIds,
    *,
    minimum: int,
    image_rows: Float[Array, "n d"] | None = None,
) -> Int[Array, " t"]:
    """Returns the ids as int32 [t] after checking rank, length, range and images.

    Raises:
        InputError: the ids break one of these rules.
    """
    if isinstance(token_ids, Tracer):
        _check_shape(config, token_ids, minimum)
        return token_ids.astype(jnp.int32)
    count = 0 if image_rows is None else image_rows.shape[0]
    return jnp.asarray(host_ids(config, token_ids, minimum=minimum, image_rows=count))


def host_ids(
    config: ModelConfig, token_ids: TokenIds, *, minimum: int, image_rows: int = 0
) -> np.ndarray:
    """Returns concrete ids as a NumPy array int32 [t], checked as by `check_ids`.

    image_rows: how many rows of images there are.

    Raises:
        InputError: the ids break one of its rules.
    """
    ids = np.asarray(token_ids)
    _check_shape(config, ids, minimum)
    _check_values(config, ids, image_rows)
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


def _check_values(config: ModelConfig, ids: Any, image_rows: int) -> None:
    outside = [
        (int(p), int(ids[p])) for p in ((ids < 0) | (ids >= config.vocab_size)).nonzero()[0][:3]
    ]
    if outside:
        raise InputError(
            f"token ids must lie in 0..{config.vocab_size - 1}; got "
            + ", ".join(f"{token} at position {position}" for position, token in outside)
        )
    found = 0
    if config.image_token_id is not None:
        found = int((ids == config.image_token_id).sum())
    if found and config.vision is None:
        raise InputError(
            f"the image token {config.image_token_id} stands for an image, and this model has no "
            "image encoder: remove it from the prompt"
        )
    if found != image_rows:
        raise InputError(
            f"every image token {config.image_token_id} takes one row of an encoded image, got "
            f"{found} tokens and {image_rows} rows: give the images of the prompt (images=), or "
            "image_rows to the pure functions"
        )


def _differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps f(params, ids, image rows or None): `vmap` runs one sequence after the other.

    Also in the backward pass.

    `sequential_vmap` alone cannot be differentiated in reverse, hence the explicit rule.
    """
    serial = sequential_vmap(function)
    wrapped = jax.custom_vjp(serial)

    def forward(params: AnyParams, ids: Array, images: Array | None) -> tuple[Any, tuple]:
        return serial(params, ids, images), (params, ids, images)

    @sequential_vmap
    def pull_back(params: AnyParams, ids: Array, images: Array | None, cotangent: Any) -> Any:
        return jax.vjp(lambda p, i: function(p, ids, i), params, images)[1](cotangent)

    def backward(saved: tuple, cotangent: Any) -> tuple[Any, None, Any]:
        params, images = pull_back(*saved, cotangent)
        return params, None, images

    wrapped.defvjp(forward, backward)
    return wrapped


def _over_mesh(
    function: Callable[..., Any],
    config: ModelConfig,
    params: AnyParams,
    ids: Array,
    images: Array | None,
) -> Any:
    """Returns function(config, params, ids, images) on the mesh of the config, if it has one."""
    given = (ids,) if images is None else (ids, images)
    return over_mesh(function, config, params, *given)


def _every_row(config: ModelConfig) -> ModelConfig:
    return replace(config, execution=replace(config.execution, replay="off"))


def fresh_cache(config: ModelConfig, tokens: int) -> AnyState:
    """Returns an empty cache for one sequence of `tokens` tokens in slot 1."""
    execution = config.execution
    whole = plan_length(tokens, execution.row_step)
    height = rows_before_read(execution) if execution.is_tiled else whole
    return single_sequence(config, tokens, row_tile=height)


def whole_plan(
    config: ModelConfig, ids: Int[Array, " t"], images: Float[Array, "n d"] | None
) -> Plan:
    """Returns the plan of one sequence from its first row, with its images' rows in order."""
    is_image = image_mask(config, ids)
    placed = None
    if images is not None and images.shape[0] and is_image is not None:
        place = jnp.cumsum(is_image, dtype=jnp.int32) - 1
        placed = (images, jnp.where(is_image, place, 0))
    return sequence_plan(ids, config.execution.row_step, images=placed)


def score_ids(
    config: ModelConfig,
    params: AnyParams,
    ids: Int[Array, " t"],
    images: Float[Array, "n d"] | None = None,
) -> Float[Array, "t v"]:
    """Returns `score` of checked ids, as every device of a mesh computes it."""
    plan = whole_plan(config, ids, images)
    _, hidden, _ = step(params, config, fresh_cache(config, ids.shape[0]), plan)
    return logits(params, config, hidden)[: ids.shape[0]]


def _hidden(
    config: ModelConfig,
    params: AnyParams,
    ids: Int[Array, " t"],
    images: Float[Array, "n d"] | None = None,
) -> tuple[list[Float[Array, "t m d"]], Float[Array, "t d"]]:
    plan = whole_plan(config, ids, images)
    state = fresh_cache(config, ids.shape[0])
    _, hidden, seen = step(params, config, state, plan, collect=("x_out",))
    count = ids.shape[0]
    return [layer[:count] for layer in seen["x_out"]], hidden[:count]


def _draft(
    config: ModelConfig,
    params: Params,
    ids: Int[Array, " t"],
    images: Float[Array, "n d"] | None = None,
) -> DraftOutput:
    processed = ids.shape[0] - 1
    plan = whole_plan(config, ids[:-1], images)
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
