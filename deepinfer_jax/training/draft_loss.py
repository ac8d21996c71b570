"""What the training of the draft stages minimises (engine.md 3.3).

Per block position k = 1..size, weighted by exp(-(k - 1) / scale) times the weight of the token that
it predicts:

    0.1 * cross entropy of the true token + 0.9 * |q - p|_1 + BCE(confidence, 1 - |q - p|_1 / 2)

q: the draft's distribution, p: the frozen target's at the same place, both at temperature 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.draft import draft_settings
from deepinfer_jax.model.params import DraftParams, Params
from deepinfer_jax.training.draft_forward import (
    Blocks,
    TargetRows,
    block_hidden,
    block_logits,
)
from deepinfer_jax.training.forward import training_ops
from deepinfer_jax.training.losses import expert_load

#: Chance of a block without weighted tokens against one with a single such token.
_UNWEIGHTED = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLossSettings:
    """How the loss of the draft stages is computed.

    anchors: blocks of a sequence and step. seed: of the anchors' places. position_scale: positions
    within which a block position loses a factor e of its weight. logit_rows: rows whose logits are
    held at once.
    """

    anchors: int
    seed: int = 0
    cross_entropy: float = 0.1
    l1: float = 0.9
    position_scale: float = 4.0
    logit_rows: int = 16384


def draw_blocks(key: Array, weights: Float[Array, "b t"], size: int, anchors: int) -> Blocks:
    """Returns `anchors` different blocks of every sequence, drawn without replacement.

    A block lies inside its sequence and has at least one position before its anchor. Its chance is
    proportional to how many weighted tokens it predicts.

    Raises:
        ConfigError: There are fewer places than anchors.
    """
    batch, length = weights.shape
    places = length - 1 - size  # anchors 1..length - 1 - size
    if places < anchors or anchors < 1:
        raise ConfigError(
            f"sequences of {length} tokens have {max(places, 0)} places for blocks of {size}, and "
            f"{anchors} anchors were asked for: use fewer anchors or longer sequences"
        )
    total = jnp.pad(jnp.cumsum((weights > 0).astype(jnp.float32), axis=1), ((0, 0), (1, 0)))
    # Block at anchor a predicts tokens a + 1 .. a + size.
    predicted = total[:, size + 2 :] - total[:, 2:-size]
    noise = jax.random.gumbel(key, predicted.shape)
    _, place = lax.top_k(jnp.log(jnp.maximum(predicted, _UNWEIGHTED)) + noise, anchors)
    return Blocks(
        row=jnp.repeat(jnp.arange(batch, dtype=jnp.int32), anchors),
        anchor=1 + place.reshape(-1).astype(jnp.int32),
    )


def draft_loss(
    draft: DraftParams,
    target: Params,
    rows: TargetRows,
    config: ModelConfig,
    ids: Int[Array, "b t"],
    weights: Float[Array, "b t"],
    blocks: Blocks,
    settings: DraftLossSettings,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns (loss, metrics) of draft parameters at the values given.

    Args:
        draft: Float32 parameters of the stages; only they get a gradient.
        target: The frozen model, whose embedding and head the stages share.
        rows: What `target_rows` returned for `ids`.
        config: The model.
        ids: Token ids, every row a sequence from position 0.
        weights: Weight of each token as a target.
        blocks: Where to draft.
        settings: Coefficients.

    Returns:
        The loss, and weighted means over block positions: `cross_entropy` (nats), `l1`,
        `confidence_loss` (nats), `acceptance` (1 - l1 / 2); `accepted_length`: drafts + 1 that
        greedy verification accepts after the true tokens, over blocks of weighted tokens alone;
        `weight`; `load` [stages, experts] (rows per expert).
    """
    size = draft_settings(config).dspark_block_size
    hidden, experts = block_hidden(config, target.embed, draft, rows.taps, ids, blocks)
    before, after = blocks.positions(size), blocks.positions(size, offset=1)
    row = blocks.row[:, None]
    weight = weights[row, after]
    decay = jnp.exp(-jnp.arange(size) / settings.position_scale)
    sums = _in_chunks(
        lambda *part: _block_sums(config, target.head, draft, *part),
        (
            hidden,
            rows.hidden[row, before],
            ids[row, before],
            ids[row, after],
            weight,
            weight * decay,
        ),
        chunk=max(1, settings.logit_rows // size),
    )
    total = jnp.maximum(sums.pop("weight"), 1e-6)
    whole = jnp.maximum(sums.pop("whole_blocks"), 1.0)
    accepted = 1.0 + sums.pop("matches") / whole
    mean = {name: value / total for name, value in sums.items()}
    loss = (
        settings.cross_entropy * mean["cross_entropy"]
        + settings.l1 * mean["l1"]
        + mean["confidence_loss"]
    )
    metrics = mean | {
        "acceptance": 1.0 - mean["l1"] / 2.0,
        "accepted_length": accepted,
        "weight": total,
        "load": expert_load(experts, draft_settings(config).dspark_n_routed_experts),
    }
    return loss, metrics


def _block_sums(
    config: ModelConfig,
    head: Float[Array, "v d"],
    draft: DraftParams,
    hidden: Float[Array, "a k d"],
    target_hidden: Float[Array, "a k d"],
    previous: Int[Array, "a k"],
    actual: Int[Array, "a k"],
    weight: Float[Array, "a k"],
    position_weight: Float[Array, "a k"],
) -> dict[str, Array]:
    """Returns the weighted sums of some blocks."""
    ops = training_ops(config)
    width = hidden.shape[2]
    logits, confidence = block_logits(config, head, draft, hidden, previous)
    target_logits = lax.stop_gradient(ops.contract(target_hidden.reshape(-1, width), head))
    log_q = jax.nn.log_softmax(logits)
    l1 = jnp.abs(jnp.exp(log_q) - jax.nn.softmax(target_logits)).sum(axis=1)
    survives = lax.stop_gradient(1.0 - l1 / 2.0)
    terms = {
        "cross_entropy": -jnp.take_along_axis(log_q, actual.reshape(-1, 1), axis=1)[:, 0],
        "l1": l1,
        "confidence_loss": jax.nn.softplus(confidence) - survives * confidence,
    }
    flat = position_weight.reshape(-1)
    sums = {name: (flat * term).sum() for name, term in terms.items()}
    is_match = (logits.argmax(axis=1) == target_logits.argmax(axis=1)).reshape(weight.shape)
    matches = jnp.cumprod(is_match.astype(jnp.float32), axis=1).sum(axis=1)
    is_whole = (weight > 0).all(axis=1)
    return sums | {
        "weight": flat.sum(),
        "whole_blocks": is_whole.sum().astype(jnp.float32),
        "matches": jnp.where(is_whole, matches, 0.0).sum(),
    }


def _in_chunks(
    function: Callable[..., dict[str, Array]], arrays: tuple[Array, ...], *, chunk: int
) -> dict[str, Array]:
    """Returns function(*arrays) summed over chunks of the first axis, recomputed in reverse mode.

    Padding has weight 0, so it adds nothing.
    """
    count = arrays[0].shape[0]
    if count <= chunk:
        return function(*arrays)
    missing = -count % chunk
    padded = [jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)) for a in arrays]
    parts = tuple(a.reshape(-1, chunk, *a.shape[1:]) for a in padded)
    sums = lax.map(lambda part: jax.checkpoint(function)(*part), parts)
    return jax.tree.map(lambda value: value.sum(axis=0), sums)
