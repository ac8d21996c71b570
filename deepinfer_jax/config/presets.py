"""Published models, and the tiny one of the tests, by name; no file or network is needed."""

from typing import Any

from deepinfer_jax.config.hf import config_from_hf
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError

_COMMON = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "tie_word_embeddings": False,
}

_RELEASED = {
    **_COMMON,
    "vocab_size": 129280,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_topk": 512,
}

_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
}

_V41_TOP = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "quantization_config": {**_QUANTIZATION, "weight_block_size": [32, 32], "expert_dtype": "fp4"},
}

_V41_FLASH = {
    **_V41_TOP,
    "image_token_id": 129264,
    "text_config": {
        "model_type": "deepseek_v41_text",
        **_RELEASED,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "q_lora_rank": 1280,
        "rms_norm_eps": 1e-20,
        "n_routed_experts": 384,
        "moe_intermediate_size": 2304,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_vocab_size": 16000000,
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}

_TINY_V41 = {
    **_V41_TOP,
    "image_token_id": 502,
    "text_config": {
        "model_type": "deepseek_v41_text",
        **_COMMON,
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 96,
        "o_lora_rank": 32,
        "o_groups": 2,
        "swiglu_limit": 0.5,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1024,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 128,
        },
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "sliding_window": 8,
        "compress_ratios": [0, 0] + [2] * 4 + [1] * 4 + [0, 0, 0],
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 6,
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [384, 552],
        "engram_vocab_size": 53,
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 417,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 511,
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "patch_size": 4,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 24,
        "min_pixels": 256,
        "max_wh_ratio": None,
    },
}

_V4_RATIOS = [0, 0] + [4, 128] * 20 + [4]

_V4_FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    **_RELEASED,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "q_lora_rank": 1024,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "compress_ratios": [*_V4_RATIOS, 0],
    "index_n_heads": 64,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {**_QUANTIZATION, "weight_block_size": [128, 128], "fmt": "e4m3"},
}

_V4_FLASH_0731 = {
    **_V4_FLASH,
    "compress_ratios": [*_V4_RATIOS, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}

_BY_NAME: dict[str, dict[str, Any]] = {
    "deepseek-v4.1-flash": _V41_FLASH,
    "deepseek-v4-flash": _V4_FLASH,
    "deepseek-v4-flash-0731": _V4_FLASH_0731,
    "tiny-v41": _TINY_V41,
}

PRESETS = tuple(_BY_NAME)
"""Names that `preset` knows: str.

Examples:
    >>> "deepseek-v4.1-flash" in di.PRESETS
    True
"""


def preset(name: str) -> ModelConfig:
    """Returns the config of a published model (or of `tiny-v41`) by name; case does not matter.

    Raises:
        ConfigError: There is no preset of this name.

    Examples:
        >>> config = di.preset("deepseek-v4.1-flash")
        >>> config.num_hidden_layers, config.hidden_size
        (40, 5120)
    """
    data = _BY_NAME.get(name.lower())
    if data is None:
        raise ConfigError(
            f"a preset is one of {', '.join(PRESETS)}: received {name!r}. "
            "Use one of these names, or read a config.json."
        )
    return config_from_hf(data)
