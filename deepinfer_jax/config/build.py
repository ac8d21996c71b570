"""Builds config records from checked values; `config.hf` does the checking."""

from collections.abc import Mapping
from typing import Any

from deepinfer_jax.config.model import (
    AttentionConfig,
    DraftConfig,
    EngramConfig,
    IndexerConfig,
    MHCConfig,
    ModelConfig,
    MoEConfig,
    RopeScaling,
    StoredDraftConfig,
    VisionConfig,
)

Values = Mapping[str, Any]


def _pick(values: Values, record: type, **extra: Any) -> dict[str, Any]:
    """Returns the values whose names are fields of `record`."""
    names = record.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    return {name: values[name] for name in names if name in values} | extra


def v41(top: Values, text: Values, rope: Values, vision: Values | None) -> ModelConfig:
    """Returns the config of a V4.1 model."""
    values = {**text, **top}
    draft = None
    if text["num_nextn_predict_layers"]:
        draft = DraftConfig(**_pick(text, DraftConfig, num_stages=text["num_nextn_predict_layers"]))
    return ModelConfig(
        **_pick(values, ModelConfig),
        dense_block_size=32,
        attention=AttentionConfig(**_pick(text, AttentionConfig, rope_scaling=_rope(rope))),
        indexer=IndexerConfig(**_pick(text, IndexerConfig)),
        mhc=MHCConfig(**_pick(text, MHCConfig)),
        moe=MoEConfig(**_pick(text, MoEConfig)),
        engram=EngramConfig(**_pick(text, EngramConfig)) if text["engram_layer_ids"] else None,
        draft=draft,
        vision=None if vision is None else VisionConfig(**_pick(vision, VisionConfig)),
    )


def v4(values: Values, rope: Values) -> ModelConfig:
    """Returns the config of a V4 model: every layer owns what it reads, drafts are only counted."""
    ratios = values["compress_ratios"][: values["num_hidden_layers"]]
    attention = _pick(
        values,
        AttentionConfig,
        rope_scaling=_rope(rope),
        kv_source_layer_ids=tuple(layer for layer, ratio in enumerate(ratios) if ratio),
        index_source_layer_ids=tuple(layer for layer, ratio in enumerate(ratios) if ratio == 4),
        use_fp4_sparse_kv=False,
    )
    indexer = _pick(
        values,
        IndexerConfig,
        candidate_source_layer_id=None,
        candidate_topk_blocks=0,
        candidate_block_size=0,
    )
    return ModelConfig(
        **_pick(values, ModelConfig, image_token_id=None),
        dense_block_size=128,
        attention=AttentionConfig(**attention),
        indexer=IndexerConfig(**indexer),
        mhc=MHCConfig(**_pick(values, MHCConfig, hc_shifted=False)),
        moe=MoEConfig(**_pick(values, MoEConfig)),
        engram=None,
        draft=None,
        vision=None,
        stored_draft=_stored_draft(values),
    )


def _rope(rope: Values) -> RopeScaling:
    return RopeScaling(**_pick(rope, RopeScaling))


def _stored_draft(values: Values) -> StoredDraftConfig | None:
    stages = len(values["compress_ratios"]) - values["num_hidden_layers"]
    if not stages:
        return None
    dspark = None
    if values["dspark_block_size"] is not None:
        own = _pick(
            values,
            DraftConfig,
            num_stages=stages,
            dspark_n_routed_experts=values["n_routed_experts"],
            dspark_num_experts_per_tok=values["num_experts_per_tok"],
        )
        dspark = DraftConfig(**own)
    return StoredDraftConfig(num_stages=stages, dspark=dspark)
