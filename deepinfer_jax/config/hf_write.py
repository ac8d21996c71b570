"""Writes a config as the `config.json` that `config.hf` reads."""

from dataclasses import asdict
from typing import Any

from deepinfer_jax.config.model import DraftConfig, ModelConfig


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the `config.json` mapping of a config; reading it gives the same config again.

    `execution` says how a model runs, not what it is, and is not written.
    """
    return _v4(config) if config.model_type == "deepseek_v4" else _v41(config)


def _plain(record: Any, *dropped: str) -> dict[str, Any]:
    """Returns a record's fields as JSON values, without the dropped ones."""
    fields = asdict(record)
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
        if name not in dropped
    }


def _language(config: ModelConfig) -> dict[str, Any]:
    attention = _plain(
        config.attention,
        "rope_scaling",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "use_fp4_sparse_kv",
    )
    indexer = config.indexer
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": 1,
        **attention,
        "rope_scaling": {"rope_type": "yarn", **asdict(config.attention.rope_scaling)},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        **_plain(config.moe, "num_hash_layers"),
        "index_n_heads": indexer.index_n_heads,
        "index_head_dim": indexer.index_head_dim,
        "index_topk": indexer.index_topk,
        **_plain(config.mhc, "hc_shifted"),
    }


def _tokens(config: ModelConfig) -> dict[str, Any]:
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _quantization(config: ModelConfig) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [config.dense_block_size] * 2,
        "scale_fmt": "ue8m0",
    }


def _v41(config: ModelConfig) -> dict[str, Any]:
    indexer, draft = config.indexer, config.draft
    text = {
        "model_type": "deepseek_v41_text",
        **_language(config),
        "kv_source_layer_ids": list(config.attention.kv_source_layer_ids),
        "index_source_layer_ids": list(config.attention.index_source_layer_ids),
        "use_fp4_sparse_kv": config.attention.use_fp4_sparse_kv,
        "candidate_source_layer_id": indexer.candidate_source_layer_id,
        "candidate_topk_blocks": indexer.candidate_topk_blocks,
        "candidate_block_size": indexer.candidate_block_size,
        **({"engram_layer_ids": []} if config.engram is None else _plain(config.engram)),
        "num_nextn_predict_layers": 0 if draft is None else draft.num_stages,
        **({} if draft is None else _draft(draft)),
    }
    vision = None
    if config.vision is not None:
        vision = {"model_type": "deepseek_v41_vision", **_plain(config.vision)}
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **_tokens(config),
        "image_token_id": config.image_token_id,
        "text_config": text,
        "vision_config": vision,
        "quantization_config": {**_quantization(config), "expert_dtype": "fp4"},
    }


def _draft(draft: DraftConfig) -> dict[str, Any]:
    """Returns the fields of draft stages; the key of their head only where it is not released."""
    return _plain(draft, "num_stages", *(["dspark_head"] if draft.dspark_head == "markov" else []))


def _v4(config: ModelConfig) -> dict[str, Any]:
    stored = config.stored_draft
    dspark = {}
    if stored is not None and stored.dspark is not None:
        dropped = ("num_stages", "dspark_n_routed_experts", "dspark_num_experts_per_tok")
        dspark = _plain(stored.dspark, "dspark_head", *dropped)
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        **_tokens(config),
        **_language(config),
        "num_hash_layers": config.moe.num_hash_layers,
        "num_nextn_predict_layers": 0 if stored is None else 1,
        **dspark,
        "expert_dtype": "fp4",
        "quantization_config": {**_quantization(config), "fmt": "e4m3"},
    }
