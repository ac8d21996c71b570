"""What training minimises, and how routers are balanced (model.md 3.8, 3.11).

loss = weighted cross entropy of the next token + coefficient * KL of the indexers. Routers get no
loss: a bias per expert, which selects but does not weigh, follows the load.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import index_layers
from deepinfer_jax.model.params import Params
from deepinfer_jax.training.forward import training_forward
from deepinfer_jax.training.quantise import quantised_params


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """How a loss is computed.

    index_coefficient: weight of the indexers' KL. remat: recompute layers in the backward pass.
    logit_rows: rows whose logits are held at once. is_quantised: parameters count at their stored
    values; False (plain float32) is for gradient checks and ablations. rounded: activations are
    rounded as in checkpoint arithmetic, so that both arithmetics choose the same tokens.
    """

    index_coefficient: float = 0.1
    remat: bool = True
    logit_rows: int = 16384
    is_quantised: bool = True
    rounded: bool = False


def total_loss(
    params: Params,
    config: ModelConfig,
    ids: Int[Array, "b t"],
    weights: Float[Array, "b t"],
    settings: LossSettings,
    *,
    axis: str | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns (loss, metrics) of float32 master parameters, which are used at their stored values.

    weights[:, t] weighs the prediction of ids[:, t] from what stands before it; the first token of
    a sequence is never predicted. axis: a mesh axis over which a batch is split; every device
    returns its share, and the sums over the devices are the loss and the metrics of the batch.

    Returns:
        The loss, and `token_loss` (mean nats a weighted token), `index_loss` (mean KL of a row of
        an index source), `weight` (their sum) and `load` [layers, experts] (rows per expert).
    """
    stored = quantised_params(params, config) if settings.is_quantised else params
    collect = ("expert_ids", "index_loss") if settings.index_coefficient else ("expert_ids",)
    hidden, seen = training_forward(
        stored, config, ids, collect=collect, remat=settings.remat, rounded=settings.rounded
    )
    # The last row predicts nothing here: weight 0 instead of a length that is no power of two.
    targets = jnp.roll(ids, -1, axis=1)
    weights = jnp.roll(weights, -1, axis=1).at[:, -1].set(0.0)
    rows = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1))
    summed = weighted_cross_entropy(stored.head, *rows, chunk=settings.logit_rows)
    weight, devices = weights.sum(), 1 if axis is None else lax.axis_size(axis)
    all_weight = weight if axis is None else lax.psum(weight, axis)
    token_loss = summed / jnp.maximum(all_weight, 1.0)
    index_loss = jnp.zeros(())
    if settings.index_coefficient:
        index_loss = seen["index_loss"].sum() / (len(index_layers(config)) * ids.size * devices)
    metrics = {
        "token_loss": token_loss,
        "index_loss": index_loss,
        "weight": weight,
        "load": expert_load(seen["expert_ids"], config.moe.n_routed_experts),
    }
    return token_loss + settings.index_coefficient * index_loss, metrics


def weighted_cross_entropy(
    head: Float[Array, "v d"],
    hidden: Float[Array, "n d"],
    targets: Int[Array, " n"],
    weights: Float[Array, " n"],
    *,
    chunk: int,
) -> Float[Array, ""]:
    """Returns sum of weight * -log p(target); logits of at most `chunk` rows exist at a time."""

    def part(hidden: Array, targets: Array, weights: Array) -> Array:
        logits = jnp.einsum("nd,vd->nv", hidden, head)
        found = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return (weights * (jax.nn.logsumexp(logits, axis=1) - found)).sum()

    count = hidden.shape[0]
    if count <= chunk:
        return part(hidden, targets, weights)
    missing = -count % chunk
    padded = [
        jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)) for a in (hidden, targets, weights)
    ]
    parts = [a.reshape(-1, chunk, *a.shape[1:]) for a in padded]
    return lax.map(lambda rows: jax.checkpoint(part)(*rows), tuple(parts)).sum()


def expert_load(expert_ids: Int[Array, "l b t x"], experts: int) -> Float[Array, "l e"]:
    """Returns how many rows chose each expert of each layer."""
    chosen = expert_ids.reshape(expert_ids.shape[0], -1)
    return jax.vmap(lambda ids: jnp.bincount(ids, length=experts))(chosen).astype(jnp.float32)


def balanced_bias(
    bias: Float[Array, "l e"], load: Float[Array, "l e"], rate: float | Array
) -> Float[Array, "l e"]:
    """Returns the selection biases after a step: down for a crowded expert, up for an idle one."""
    return bias + rate * jnp.sign(load.mean(axis=1, keepdims=True) - load)
