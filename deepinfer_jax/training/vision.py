"""Training of an image encoder for a V4.1 model whose language weights stay as they are.

The encoder, the projector and the three image vectors learn from the answers of the frozen model to
questions about drawings. A linear read-out of the projected cells learns to answer beside it: what
the frozen model says back is mostly noise as long as the rows mean nothing. It is not exported.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Float, Int, UInt8

from deepinfer_jax.checkpoint.expand import expand_float32
from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.config.hf import config_from_hf, config_to_hf
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.params import Leaf, Params, VisionParams
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.spec import ParamSpec
from deepinfer_jax.model.vision.insert import image_rows
from deepinfer_jax.model.vision.patches import vision_of
from deepinfer_jax.training.drawings import DRAWING_TASKS, SIDE
from deepinfer_jax.training.forward import training_config, training_forward, training_ops
from deepinfer_jax.training.init import init_leaf
from deepinfer_jax.training.losses import expert_load
from deepinfer_jax.training.quantise import trained_value
from deepinfer_jax.training.state import OptimiserSettings, TrainState, descend
from deepinfer_jax.training.vision_data import SHARES, VisionData
from deepinfer_jax.vision.plan import plan_image

#: nano's image encoder, 1.3 MB in BF16. A drawing is nine cells, fourteen rows of a prompt.
NANO_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 16,
    "min_pixels": SIDE * SIDE,
    "max_wh_ratio": None,
}


#: Steps in which the weight of the frozen model's answers grows to that of the read-out's.
RAMP_STEPS = 300
#: How `fitted` fits a read-out.
FIT_DRAWINGS, FIT_STEPS, FIT_RATE = 3000, 100, 0.03


@struct.dataclass
class Learner:
    """What is trained. readout: float32 [cells * d, answers], from all cells of an image."""

    vision: VisionParams
    readout: Leaf


@struct.dataclass
class Questions:
    """The questions of a batch. task: int32 [b], place in `DRAWING_TASKS` of the one that is asked.

    answers, fits: int32 and bool [b, tasks], the number of the answer to each question, and whether
    it can be asked at all.
    """

    task: Leaf
    answers: Leaf
    fits: Leaf


def with_vision(config: ModelConfig, image_token_id: int | None) -> ModelConfig:
    """Returns a V4.1 model's config with nano's image encoder.

    image_token_id: of the tokenizer; the config's own comes first.

    Raises:
        ConfigError: not a V4.1 model, or no image token.
    """
    training_config(config)
    token = image_token_id if config.image_token_id is None else config.image_token_id
    if token is None:
        raise ConfigError(
            "images need an image token, and neither config.json nor tokenizer.json has one: use "
            "the tokenizer published with the checkpoint"
        )
    changed = config_to_hf(config) | {"vision_config": NANO_VISION, "image_token_id": token}
    return replace(config_from_hf(changed), execution=config.execution)


def initial_learner(
    config: ModelConfig, seed: int, answers: int, vision: VisionParams | None = None
) -> Learner:
    """Returns the float32 parameters that training begins with, drawn by seed and name.

    answers: how many different ones there are. vision: an encoder to go on with.
    """
    if vision is None:
        vision = jax.tree.map(
            lambda spec: init_leaf(config, seed, spec), spec_tree(config).vision, is_leaf=_is_spec
        )
    vision = cast(VisionParams, expand_float32(vision))
    plan = plan_image(SIDE, SIDE, vision_of(config))
    width = plan.cell_rows * plan.cell_columns * config.hidden_size
    return Learner(vision=vision, readout=jnp.zeros((width, answers)))


def stored_vision(vision: VisionParams, config: ModelConfig) -> VisionParams:
    """Returns the parameters at their stored (BF16) values; gradients pass straight through."""
    specs = spec_tree(config).vision
    return jax.tree.map(
        lambda spec, leaf: trained_value(leaf, spec), specs, vision, is_leaf=_is_spec
    )


def vision_loss(
    learner: Learner,
    target: Params,
    config: ModelConfig,
    patches: UInt8[Array, "b p v"],
    ids: Int[Array, "b t"],
    weights: Float[Array, "b t"],
    questions: Questions,
    of_task: np.ndarray,
    *,
    share: Float[Array, ""] | float = 1.0,
    rounded: bool = False,
    remat: bool = False,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns (loss, metrics) of a batch of one image a sequence.

    The model answers for the first `ids.shape[0]` drawings, the read-out for all: on a CPU a
    drawing costs a tenth of an answer.

    Args:
        learner: float32 masters, used at their stored values.
        target: the frozen model.
        config: its config, with the image encoder.
        patches: uint8, one equal-sized square drawing a sequence.
        ids: conversations with the image token once for each row of the image.
        weights: 1 at the tokens of the answer.
        questions: what is asked.
        of_task: bool [tasks, answers], which answers each question has.
        share: weight of the model's answers; that of the read-out's is 1.
        rounded: with the rounding points of checkpoint arithmetic, straight through.
        remat: recompute layers in the backward pass.

    Returns:
        `share` times the nats of an answer token, and those of a read-out answer; beside both, for
        each task the share of answers that are right as a whole.
    """
    images = drawing_rows(learner.vision, config, patches, rounded=rounded)
    answered = ids.shape[0]
    hidden, seen = training_forward(
        target,
        config,
        ids,
        collect=("expert_ids",),
        remat=remat,
        rounded=rounded,
        images=images[:answered],
    )
    logits = jnp.einsum("btd,vd->btv", hidden[:, :-1], target.head)
    targets, weights = ids[:, 1:], weights[:, 1:]
    found = jnp.take_along_axis(logits, targets[..., None], axis=2)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=2) - found
    right = ((logits.argmax(axis=2) == targets) | (weights == 0)).all(axis=1)
    token_loss = (nats * weights).sum() / weights.sum()
    read = readout_loss(learner.readout, images, questions, of_task)
    metrics = {"load": expert_load(seen["expert_ids"], config.moe.n_routed_experts)}
    metrics |= {"token_loss": token_loss, "readout_loss": read}
    for place, name in enumerate(DRAWING_TASKS):
        asked = questions.task[:answered] == place
        metrics[name] = (right & asked).sum() / jnp.maximum(asked.sum(), 1)
    return share * token_loss + read, metrics


def drawing_rows(
    vision: VisionParams,
    config: ModelConfig,
    patches: UInt8[Array, "b p v"],
    *,
    rounded: bool = False,
) -> Float[Array, "b n d"]:
    """Returns the rows of square drawings, of an encoder at its stored values."""
    ops, stored = training_ops(config, rounded=rounded), stored_vision(vision, config)
    side = round(patches.shape[1] ** 0.5)
    cells = -(-side // vision_of(config).downsample_ratio)

    def encode(one: UInt8[Array, "p v"]) -> Float[Array, "n d"]:
        rows = cells * (cells + 1) + 2
        return image_rows(ops, training_config(config), stored, one, (side, side), rows)

    return jax.vmap(encode)(patches)


def fitted(learner: Learner, config: ModelConfig, data: VisionData) -> Learner:
    """Returns the learner with a read-out that fits its encoder, which stays as it is.

    A read-out of zeros would teach an encoder that has learned something little but noise.
    """
    import optax

    count = min(FIT_DRAWINGS, len(data.patches))
    encode = jax.jit(partial(drawing_rows, config=config))
    parts = np.array_split(data.patches[:count], -(-count // 64))
    rows = jnp.concatenate([encode(learner.vision, patches=jnp.asarray(one)) for one in parts])
    asked = Questions(
        task=jnp.zeros((count,), jnp.int32),
        answers=jnp.asarray(data.answers[:count]),
        fits=jnp.asarray(data.fits[:count]),
    )
    steps = optax.adam(optax.cosine_decay_schedule(FIT_RATE, FIT_STEPS))

    @jax.jit
    def step(readout: Array, moments: Any) -> tuple[Array, Any]:
        slope = jax.grad(readout_loss)(readout, rows, asked, data.of_task)
        updates, moments = steps.update(slope, moments)
        return cast(Array, optax.apply_updates(readout, updates)), moments

    readout, moments = learner.readout, steps.init(learner.readout)
    for _ in range(FIT_STEPS):
        readout, moments = step(readout, moments)
    return replace(learner, readout=readout)


def readout_loss(
    readout: Float[Array, "w a"],
    images: Float[Array, "b n d"],
    questions: Questions,
    of_task: np.ndarray,
) -> Float[Array, ""]:
    """Returns the mean nats of a linear read-out's answers to all questions that fit an image.

    A question weighs as often as it is asked (`SHARES`).


    images: rows of square drawings as they stand in a prompt.
    """
    batch, count, width = images.shape
    cells = round((count - 2) ** 0.5 - 0.5)  # count = cells (cells + 1) + 2
    square = images[:, 1:-1].reshape(batch, cells, cells + 1, width)[:, :, :cells]  # no newlines
    flat = square.reshape(batch, -1) / (cells * cells * width) ** 0.5
    logits = jnp.where(of_task, (flat @ readout)[:, None], -1e9)  # [b, tasks, answers]
    found = jnp.take_along_axis(logits, questions.answers[:, :, None], axis=2)[:, :, 0]
    nats = jnp.where(questions.fits, jax.nn.logsumexp(logits, axis=2) - found, 0.0)
    weight = questions.fits * np.asarray([SHARES[task] for task in DRAWING_TASKS], np.float32)
    return (nats * weight).sum() / weight.sum()


def vision_step(
    target: Params,
    drawings: UInt8[Array, "n p v"],
    state: TrainState,
    batch: Any,
    *,
    config: ModelConfig,
    settings: OptimiserSettings,
    of_task: np.ndarray,
    ramp: int,
    rounded: bool,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns (state after one step, metrics). Pure; `compiled_vision_step` jits it.

    batch: of `vision_data.vision_batches`. ramp: `RAMP_STEPS`, or 1 where the rows mean something
    from the start.
    """
    ids, weights, place, *asked = batch
    questions = Questions(*asked)

    def loss(learner: Learner) -> tuple[Array, dict[str, Array]]:
        return vision_loss(
            learner,
            target,
            config,
            drawings[place],
            ids,
            weights,
            questions,
            of_task,
            share=jnp.minimum((state.step + 1) / ramp, 1.0),
            rounded=rounded,
        )

    state, _, metrics = descend(state, loss, settings)
    return state, metrics


def compiled_vision_step(
    target: AnyParams,
    config: ModelConfig,
    settings: OptimiserSettings,
    data: VisionData,
    *,
    ramp: int = RAMP_STEPS,
    rounded: bool = False,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]]:
    """Returns the jitted step; drawings move to the device once, the state is taken over."""
    run = jax.jit(
        partial(
            vision_step,
            config=training_config(config),
            settings=settings,
            of_task=data.of_task,
            ramp=ramp,
            rounded=rounded,
        ),
        donate_argnums=2,
    )
    frozen = replace(cast(Params, target), draft=None, vision=None)
    held = jnp.asarray(data.patches)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        return run(frozen, held, jax.device_put(state, held.sharding), batch)

    return step


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, ParamSpec)
