"""Training of the draft stages of a V4.1 model, everything else frozen (engine.md 3.1-3.3).

The target runs once a batch at its stored values, and many blocks of each sequence are drafted in
parallel from its taps. Those features are streamed: computed within the step that uses them and
never stored, so they need neither disk nor a pass over the data beforehand. State, optimiser,
saving and the loop are those of the backbone's training.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import jax
import numpy as np
from jax import Array

from deepinfer_jax.checkpoint.expand import expand_float32
from deepinfer_jax.checkpoint.inventory import spec_leaves, spec_tree
from deepinfer_jax.config.model import DraftHead, ModelConfig
from deepinfer_jax.errors import ConfigError, InputError
from deepinfer_jax.model.draft import draft_params, draft_settings
from deepinfer_jax.model.params import DraftParams, Params
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.spec import ParamSpec
from deepinfer_jax.training.data import Packed, packed_token_map
from deepinfer_jax.training.draft_forward import target_rows
from deepinfer_jax.training.draft_loss import draft_loss, draw_blocks
from deepinfer_jax.training.forward import training_config
from deepinfer_jax.training.init import init_leaf
from deepinfer_jax.training.loop import Step
from deepinfer_jax.training.losses import balanced_bias
from deepinfer_jax.training.quantise import trained_value
from deepinfer_jax.training.state import (
    Batch,
    OptimiserSettings,
    TrainState,
    descend,
)


def with_draft_settings(
    config: ModelConfig, *, head: DraftHead | None = None, block: int | None = None
) -> ModelConfig:
    """Returns a model's config with another head or block size of its draft stages.

    Raises:
        ConfigError: Not a V4.1 model, or a block without positions.
        InputError: The model has no draft stages.
    """
    training_config(config)
    settings = draft_settings(config)
    size = settings.dspark_block_size if block is None else block
    if size < 1:
        raise ConfigError(f"a block of drafts has at least one position, got {size}")
    settings = replace(settings, dspark_head=head or settings.dspark_head, dspark_block_size=size)
    return replace(config, draft=settings)


def initial_draft(
    params: AnyParams, target: ModelConfig, config: ModelConfig, *, seed: int, fresh: bool = False
) -> DraftParams:
    """Returns the float32 stages that training begins with.

    Leaves that the target has too, by names and shape, are taken from it; the others, which belong
    to a head that it does not have, are drawn at random.

    Args:
        params: Parameters of the target.
        target: Its config.
        config: The same with the draft settings that are trained (`with_draft_settings`).
        seed: Of what is drawn.
        fresh: Draw everything.

    Raises:
        InputError: The model has no draft stages.
    """
    stages = draft_params(params)
    kept: dict[ParamSpec, Array] = {}
    if not fresh:
        leaves = jax.tree.leaves(expand_float32(stages))
        kept = dict(zip(spec_leaves(spec_tree(target).draft), leaves, strict=True))
    return jax.tree.map(
        lambda spec: kept[spec] if spec in kept else init_leaf(config, seed, spec),
        spec_tree(config).draft,
        is_leaf=lambda leaf: isinstance(leaf, ParamSpec),
    )


def quantised_draft(draft: DraftParams, config: ModelConfig) -> DraftParams:
    """Returns the stages with every leaf at its stored value; gradients pass straight through."""
    return jax.tree.map(
        lambda spec, leaf: trained_value(leaf, spec),
        spec_tree(config).draft,
        draft,
        is_leaf=lambda leaf: isinstance(leaf, ParamSpec),
    )


def draft_step(
    target: Params,
    state: TrainState,
    batch: Batch,
    *,
    config: ModelConfig,
    settings: OptimiserSettings,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns (state after one step, metrics as scalars). Pure; `compiled_draft_step` jits it.

    The blocks of a step are a function of (seed, step) and of the weights of the batch.
    """
    ids, weights = batch
    key = jax.random.fold_in(jax.random.key(settings.loss.seed), state.step)
    size = draft_settings(config).dspark_block_size
    blocks = draw_blocks(key, weights, size, settings.loss.anchors)
    rows = target_rows(target, config, ids)

    def loss(draft: DraftParams) -> tuple[Array, dict[str, Array]]:
        stored = quantised_draft(draft, config)
        return draft_loss(stored, target, rows, config, ids, weights, blocks, settings.loss)

    state, load, metrics = descend(state, loss, settings)
    stages = state.params.stages
    bias = balanced_bias(stages.gate_bias, load, settings.bias_rate)
    params = replace(state.params, stages=replace(stages, gate_bias=bias))
    return replace(state, params=params), metrics


@lru_cache(maxsize=4)
def _compiled(config: ModelConfig, settings: OptimiserSettings) -> Callable[..., Any]:
    return jax.jit(partial(draft_step, config=config, settings=settings), donate_argnums=1)


def compiled_draft_step(
    target: AnyParams, config: ModelConfig, settings: OptimiserSettings
) -> Step:
    """Returns the jitted step of a frozen target; it takes over the state that it is given."""
    run, frozen = _compiled(training_config(config), settings), replace(target, draft=None)
    place = cast(Params, frozen).embed.sharding

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        # Where the target is: a state that moves there in its first step would compile twice.
        return run(frozen, jax.device_put(state, place), batch)

    return step


def with_draft(params: AnyParams, draft: DraftParams) -> Params:
    """Returns the target with these draft stages; image rows route as text rows do."""
    stages = replace(draft.stages, gate_bias_vl=draft.stages.gate_bias)
    return replace(cast(Params, params), draft=replace(draft, stages=stages))


def check_data(packed: Packed, params: AnyParams, config: ModelConfig) -> None:
    """Checks that packed sequences are of the target's tokenizer.

    Raises:
        InputError: An id outside the vocabulary, or another token reduction than the target's.
    """
    vocab = config.vocab_size
    newest = int(packed.ids.max())
    if newest >= vocab or len(packed.token_map) > vocab:
        raise InputError(
            f"training data must be of the target's tokenizer: the vocabulary has {vocab} ids, the "
            f"data uses id {newest} of a vocabulary of {len(packed.token_map)}. Pack it again."
        )
    engram = getattr(params, "engram", None)
    if engram is not None and packed_token_map(packed, vocab) != engram.token_map:
        raise InputError(
            "training data must be of the target's tokenizer: its token reduction differs from the "
            "target's. Pack the data again with that tokenizer."
        )


def check_exportable(params: AnyParams) -> None:
    """Checks that the export would leave the backbone as it is.

    Raises:
        ConfigError: Its routers have image biases of their own, which the export replaces by those
            of text.
    """
    layers = cast(Params, params).layers
    if (layers.gate_bias != layers.gate_bias_vl).any():
        raise ConfigError(
            "the draft stages of a target with image biases cannot be written: the export gives "
            "every router one bias. Train the stages of a text-only model."
        )


def target_digest(params: AnyParams) -> str:
    """Returns the SHA-256 of everything but the draft stages, in the order of the tree."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(replace(params, draft=None)):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return digest.hexdigest()
