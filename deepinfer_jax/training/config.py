"""The configuration of nano: every mechanism of V4.1 within 14 MB (architecture.md 5)."""

from typing import Any

from deepinfer_jax.config.engram_primes import bucket_primes
from deepinfer_jax.config.hf import config_from_hf
from deepinfer_jax.config.model import ModelConfig

_ENGRAM = {
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 1400,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
}

_TEXT = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 2048,
    },
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 64,
    # Window, Full and Reuse at ratio 2; Full with candidates, Reuse and Reindex at ratio 1; drafts.
    "compress_ratios": [0, 0] + [2] * 4 + [1] * 6 + [0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 128,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 128,  # of 8 positions: they restrict beyond 1024
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 24,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}

_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def nano_config(
    vocab_size: int = 2048,
    compressed_vocab_size: int = 1600,
    *,
    bos_token_id: int = 0,
    eos_token_id: int = 1,
    pad_token_id: int = 2,
    noise_token_id: int | None = None,
    image_token_id: int | None = None,
    **changes: Any,
) -> ModelConfig:
    """Returns the config of nano for a tokenizer; checked as a `config.json` would be.

    Args:
        vocab_size: Rows of the embedding; at least the ids of the tokenizer.
        compressed_vocab_size: Distinct ids of the Engram's token reduction.
        bos_token_id: Id of the token that begins a prompt.
        eos_token_id: Id of the token that ends a turn.
        pad_token_id: Padding; also what the Engram sees before the first token.
        noise_token_id: Fed at open draft positions; None takes the last id.
        image_token_id: Of images; `train vision` adds what sees them.
        changes: Fields of `text_config` that differ, for experiments and tests.

    Raises:
        ConfigError: The fields do not make a V4.1 model.
    """
    text = {**_TEXT, **_ENGRAM, "engram_pad_token_id": pad_token_id, **changes}
    if text["engram_layer_ids"]:
        primes = bucket_primes(
            num_layers=len(text["engram_layer_ids"]),
            num_orders=text["engram_max_ngram_size"] - 1,
            num_heads=text["engram_n_heads"],
            vocab_size=text["engram_vocab_size"],
        )
        text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    else:
        text = {name: value for name, value in text.items() if not name.startswith("engram_")}
        text["engram_layer_ids"] = []
    if not text["num_nextn_predict_layers"]:
        text = {name: value for name, value in text.items() if not name.startswith("dspark_")}
    else:
        text["dspark_noise_token_id"] = vocab_size - 1 if noise_token_id is None else noise_token_id
    text["vocab_size"] = vocab_size
    if text["engram_layer_ids"]:
        text["engram_compressed_vocab_size"] = compressed_vocab_size
    return config_from_hf(
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "image_token_id": image_token_id,
            "text_config": text,
            "vision_config": None,
            "quantization_config": _QUANTIZATION,
        }
    )
