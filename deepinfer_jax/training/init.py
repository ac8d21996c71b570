"""Random parameters to begin training from (model.md 6, the note on random initialisation).

Every tensor is a function of the seed and its checkpoint name alone: not of the order in which
leaves are drawn, nor of which other tensors exist.
"""

import hashlib
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from deepinfer_jax.checkpoint.expand import expand_float32
from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.loading import Model
from deepinfer_jax.model.engram.vocabulary import TokenMap
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.spec import ParamSpec

#: Standard deviations. Small embeddings drown in what the first layer adds, and names are then not
#: copied: with 0.02 the cosine between a layer's input and the embedding begins at 0.09.
EMBED_STD = 1.0
HEAD_STD = 0.02
#: Noise on the mixing matrices, so that they are not symmetric.
MIX_NOISE = 0.05


def init_params(config: ModelConfig, seed: int, token_map: TokenMap | None = None) -> Params:
    """Returns float32 parameters of a V4.1 model, draft stages included.

    Args:
        config: The model.
        seed: Any integer from 0.
        token_map: Compressed ids of the vocabulary; needed if the model has Engram layers.

    Raises:
        ConfigError: The config is not V4.1, or its Engram lacks a token map.
    """
    if config.model_type != "deepseek_v41":
        raise ConfigError(f"training supports deepseek_v41 only, got {config.model_type!r}")
    if config.engram is not None and token_map is None:
        raise ConfigError("a model with Engram layers needs a token map: build it from a tokenizer")
    tree = jax.tree.map(
        lambda spec: init_leaf(config, seed, spec),
        spec_tree(config),
        is_leaf=lambda leaf: isinstance(leaf, ParamSpec),
    )
    if tree.engram is None:
        return tree
    return replace(tree, engram=replace(tree.engram, token_map=token_map))


def stored_params(model: Model, config: ModelConfig) -> Params:
    """Returns float32 parameters to train further from: the stored values of a checkpoint.

    An image encoder is left out: `train vision` makes one for the language weights as they are.

    Args:
        model: Whose values they are.
        config: What is trained.

    Raises:
        ConfigError: The language model has another config.
    """
    own = replace(model.config, execution=config.execution, vision=None)
    if replace(own, image_token_id=config.image_token_id) != config:
        raise ConfigError(
            f"--init continues a checkpoint of nano's config, {model.source} has another"
        )
    return replace(cast(Params, expand_float32(model.params)), vision=None)


def init_leaf(config: ModelConfig, seed: int, spec: ParamSpec) -> Array:
    """Returns the float32 values that training begins with for one leaf of the spec tree."""
    values = [_tensor(config, _generator(seed, name), name, spec.shape) for name in spec.names]
    return jnp.asarray(np.stack(values).reshape(*spec.stack, *spec.shape).astype(np.float32))


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def _tensor(
    config: ModelConfig, draw: np.random.Generator, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns one tensor by the last part of its name."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind.startswith("hc_") and kind.endswith("_base"):
        return _mix_base(config, draw, name)
    if kind.startswith("hc_") and kind.endswith("_scale"):
        return np.full(shape, 0.01)
    if kind.endswith("norm") or kind in ("q_weight", "k_weight", "norm1", "norm2"):
        return np.ones(shape)
    if kind in ("attn_sink", "bias", "bias_vl"):
        return np.zeros(shape)
    noise = draw.standard_normal(shape)
    if kind == "joint":
        return _recurrent_joint(noise)
    if kind in ("embed", "head"):
        return noise * (EMBED_STD if kind == "embed" else HEAD_STD)
    if kind.startswith("image_"):  # they stand among embeddings
        return noise * EMBED_STD
    deviation = shape[-1] ** -0.5
    # What is added to the streams, twice a layer.
    if kind in ("wo_b", "w2") and not name.startswith("aligner"):
        deviation *= (2 * config.num_hidden_layers) ** -0.5
    return noise * deviation


def _recurrent_joint(noise: np.ndarray) -> np.ndarray:
    """Returns a recurrent draft head that starts as the Markov head (`draft_heads.head_output`).

    Its output is W1[x], its memory is empty until the candidate has learned something.
    """
    rank = noise.shape[0] // 3
    joint = noise * noise.shape[1] ** -0.5
    joint[rank:] = 0.0
    joint[2 * rank :, rank : 2 * rank] = np.eye(rank)
    return joint


def _mix_base(config: ModelConfig, draw: np.random.Generator, name: str) -> np.ndarray:
    """Returns pre, post and mixing entries: one stream in, every stream out, streams kept apart."""
    count = config.mhc.hc_mult
    prefix, index = name.split(".")[:2]
    layer = int(index) + (config.num_hidden_layers if prefix == "mtp" else 0)
    pre = np.full(count, -3.0)
    pre[layer % count] = 3.0
    mixing = np.where(np.eye(count) > 0, 3.0, -3.0)
    mixing = mixing + MIX_NOISE * draw.standard_normal((count, count))
    return np.concatenate([pre, np.zeros(count), mixing.reshape(-1)])
