"""The training forward: the network of inference on all rows of a batch at once.

`model.network.run_tile` with float32 numerics and without a fixed order: the rows of the batch are
one tile, every sequence has a cache slot of its own, and all rows are written before one is read,
so a fresh cache with room for the whole length makes it a causal forward pass.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ExecutionConfig, ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model import network
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.registry import empty_cache
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.model.tile import Rows
from deepinfer_jax.numerics.ops import Ops, ops_for

BLOCK_TOKENS = 128


def training_config(config: ModelConfig, *, rounded: bool = False) -> ModelConfig:
    """Returns the config as training runs it: float32, stock XLA.

    rounded: with the rounding points of checkpoint arithmetic, straight through.

    Raises:
        ConfigError: not a V4.1 model.
    """
    if config.model_type != "deepseek_v41":
        raise ConfigError(f"training supports deepseek_v41 only, got {config.model_type!r}")
    numerics = "training" if rounded else "float32"
    return replace(config, execution=ExecutionConfig(numerics=numerics, determinism="off"))


def training_ops(config: ModelConfig, *, rounded: bool = False) -> Ops:
    """Returns the primitives that training computes with; arguments as `training_config`."""
    return replace(ops_for(training_config(config, rounded=rounded).execution), training=True)


def training_forward(
    params: Params,
    config: ModelConfig,
    ids: Int[Array, "b t"],
    *,
    collect: tuple[str, ...] = (),
    remat: bool = True,
    rounded: bool = False,
    images: Float[Array, "b n d"] | None = None,
) -> tuple[Float[Array, "b t d"], dict[str, Array]]:
    """Returns (final normed hidden rows, observations [layers, b, t, ..]) of whole sequences.

    Args:
        params: Float32 parameters, quantised already where that is wanted.
        config: The model; how it is executed does not matter.
        ids: Token ids, every row a sequence from position 0.
        collect: Names of `apply_layer`'s observations.
        remat: Recompute each layer in the backward pass instead of keeping its intermediates.
        rounded: As in `training_config`.
        images: For each sequence what its image tokens carry, in order.
    """
    config = training_config(config, rounded=rounded)
    batch, length = ids.shape
    blocks = -(-length // BLOCK_TOKENS)
    layout = CacheLayout(
        num_slots=batch + 1,
        num_blocks=1 + batch * blocks,
        max_blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        row_tile=length,
        rollback=1,
    )
    tile = Rows(
        ids=ids.reshape(-1).astype(jnp.int32),
        position=jnp.tile(jnp.arange(length, dtype=jnp.int32), batch),
        slot=jnp.repeat(jnp.arange(1, batch + 1, dtype=jnp.int32), length),
        valid=jnp.ones((batch * length,), bool),
        image=None if images is None else _at_image_tokens(config, ids, images),
    )
    _, hidden, seen = network.run_tile(
        training_ops(config, rounded=rounded),
        config,
        params,
        empty_cache(config, layout),  # pyright: ignore[reportArgumentType]
        tile,
        False,
        collect,
        remat=remat,
    )
    seen = {name: rows.reshape(-1, batch, length, *rows.shape[2:]) for name, rows in seen.items()}
    return hidden.reshape(batch, length, -1), seen


def _at_image_tokens(
    config: ModelConfig, ids: Int[Array, "b t"], images: Float[Array, "b n d"]
) -> Float[Array, "r d"]:
    """Returns the image rows at the places of the image tokens; elsewhere they mean nothing."""
    rank = jnp.cumsum(ids == config.image_token_id, axis=1) - 1
    rank = jnp.clip(rank, 0, images.shape[1] - 1)
    return jnp.take_along_axis(images, rank[:, :, None], axis=1).reshape(-1, images.shape[2])
