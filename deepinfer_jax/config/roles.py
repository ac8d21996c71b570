"""What each layer does, as one pure function of the config (model.md 1.6, 10.2)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError

Mode = Literal["window", "full", "reindex", "reuse", "csa", "hca"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRole:
    """Role of one backbone layer. `*_source` is the layer that owns what this layer reads."""

    layer: int
    ratio: int
    mode: Mode
    kv_source: int | None
    index_k_source: int | None
    topk_source: int | None
    has_engram: bool
    is_candidate_source: bool
    uses_candidates: bool
    is_tap: bool
    uses_yarn: bool
    hash_routed: bool


@lru_cache(maxsize=64)
def layer_roles(config: ModelConfig) -> tuple[LayerRole, ...]:
    """Returns the role of every backbone layer, in order.

    V4.1: the source of a layer is the last source layer at or before it. V4: ratio-4 and
    ratio-128 layers own everything they read.
    """
    if config.model_type == "deepseek_v4":
        return tuple(_v4_role(config, layer) for layer in range(config.num_hidden_layers))
    return tuple(_v41_role(config, layer) for layer in range(config.num_hidden_layers))


def _last_source(sources: tuple[int, ...], layer: int) -> int | None:
    return max((s for s in sources if s <= layer), default=None)


def _v41_role(config: ModelConfig, layer: int) -> LayerRole:
    attention, indexer = config.attention, config.indexer
    ratio = attention.compress_ratios[layer]
    owns_kv = layer in attention.kv_source_layer_ids
    owns_index = layer in attention.index_source_layer_ids
    mode: Mode = "window"
    if ratio:
        mode = "full" if owns_kv else "reindex" if owns_index else "reuse"
    candidate_source = indexer.candidate_source_layer_id
    kv_source = _last_source(attention.kv_source_layer_ids, layer) if ratio else None
    return LayerRole(
        layer=layer,
        ratio=ratio,
        mode=mode,
        kv_source=kv_source,
        index_k_source=kv_source if owns_index else None,
        topk_source=_last_source(attention.index_source_layer_ids, layer) if ratio else None,
        has_engram=config.engram is not None and layer in config.engram.engram_layer_ids,
        is_candidate_source=layer == candidate_source,
        uses_candidates=owns_index and candidate_source is not None and layer > candidate_source,
        is_tap=config.draft is not None and layer in config.draft.dspark_target_layer_ids,
        uses_yarn=ratio > 0,
        hash_routed=False,
    )


def _v4_role(config: ModelConfig, layer: int) -> LayerRole:
    ratio = config.attention.compress_ratios[layer]
    modes: dict[int, Mode] = {0: "window", 4: "csa", 128: "hca"}
    return LayerRole(
        layer=layer,
        ratio=ratio,
        mode=modes[ratio],
        kv_source=layer if ratio else None,
        index_k_source=layer if ratio == 4 else None,
        topk_source=layer if ratio == 4 else None,
        has_engram=False,
        is_candidate_source=False,
        uses_candidates=False,
        is_tap=False,
        uses_yarn=ratio > 0,
        hash_routed=layer < config.moe.num_hash_layers,
    )


def source_layers(config: ModelConfig, ratio: int) -> tuple[int, ...]:
    """Layers that own compressed rows of this ratio, ascending: the order of stacked leaves."""
    return tuple(
        r.layer for r in layer_roles(config) if r.kv_source == r.layer and r.ratio == ratio
    )


def source_ratios(config: ModelConfig) -> tuple[int, ...]:
    """Distinct ratios of the layers that own compressed rows, in order of first appearance."""
    owned = (r.ratio for r in layer_roles(config) if r.kv_source == r.layer)
    return tuple(dict.fromkeys(owned))


def index_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers that own an indexer query path, ascending."""
    return tuple(r.layer for r in layer_roles(config) if r.topk_source == r.layer)


def encoder_layers(config: ModelConfig) -> int:
    """Returns the number of layers before the last KV source: those replay never truncates.

    Raises:
        ConfigError: DeepSeek-V4, whose layers all own what they read.
    """
    if config.model_type != "deepseek_v41":
        raise ConfigError(
            f"{config.model_type} has no encoder and decoder halves to truncate at: "
            'use replay="off"'
        )
    return config.attention.kv_source_layer_ids[-1]
