"""Reads a Hugging Face `config.json` of DeepSeek-V4.1 (nested) or DeepSeek-V4 (flat).

Every accepted key stands in a table below, with the values this package can honour; any other key
or value is refused. One `ConfigError` lists all mismatches (model.md 1.2-1.5, 10.1).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from deepinfer_jax.config import build, rules
from deepinfer_jax.config.fields import (
    Field,
    boolean,
    choice,
    constant,
    ignored,
    integer,
    integers,
    mismatch,
    nested,
    nullable,
    number,
    read_fields,
    show,
)
from deepinfer_jax.config.hf_write import config_to_hf
from deepinfer_jax.config.model import DraftHead, ModelConfig
from deepinfer_jax.errors import ConfigError

__all__ = ["config_from_hf", "config_to_hf", "read_config"]

_IGNORED = tuple(
    map(ignored, ("initializer_range", "use_cache", "transformers_version", "_name_or_path"))
)
_DTYPE = (
    constant("dtype", "bfloat16", optional=True),
    constant("torch_dtype", "bfloat16", optional=True),
)

_LANGUAGE = (
    integer("vocab_size"),
    integer("hidden_size"),
    integer("num_hidden_layers"),
    integer("num_attention_heads"),
    constant("num_key_value_heads", 1),
    integer("head_dim"),
    integer("qk_rope_head_dim"),
    integer("q_lora_rank"),
    integer("o_lora_rank"),
    integer("o_groups"),
    constant("hidden_act", "silu"),
    number("swiglu_limit"),
    number("rms_norm_eps"),
    constant("attention_bias", False, optional=True),
    constant("attention_dropout", 0.0, optional=True),
    constant("tie_word_embeddings", False, optional=True),
    integer("max_position_embeddings"),
    number("rope_theta"),
    number("compress_rope_theta"),
    nested("rope_scaling"),
    integer("n_routed_experts"),
    constant("n_shared_experts", 1),
    integer("num_experts_per_tok"),
    integer("moe_intermediate_size"),
    constant("scoring_func", "sqrtsoftplus"),
    constant("topk_method", "noaux_tc"),
    boolean("norm_topk_prob"),
    number("routed_scaling_factor"),
    integer("sliding_window"),
    integers("compress_ratios"),
    integer("index_n_heads"),
    integer("index_head_dim"),
    integer("index_topk"),
    integer("hc_mult"),
    integer("hc_sinkhorn_iters"),
    number("hc_eps"),
    integer("num_nextn_predict_layers", minimum=0),
)

_ENGRAM = (
    integers("engram_layer_ids"),
    integers("engram_num_embeddings"),
    integer("engram_vocab_size"),
    integer("engram_max_ngram_size", minimum=2),
    integer("engram_n_heads"),
    integer("engram_head_dim"),
    integer("engram_pad_token_id", minimum=0),
    integer("engram_compressed_vocab_size"),
)

_DSPARK = (
    integer("dspark_block_size"),
    integer("dspark_noise_token_id", minimum=0),
    integers("dspark_target_layer_ids"),
    integer("dspark_markov_rank"),
)

_V41_DSPARK = (
    *_DSPARK,
    integer("dspark_n_routed_experts"),
    integer("dspark_num_experts_per_tok"),
    # A key of this package: the draft stages of released files have the Markov head.
    choice("dspark_head", get_args(DraftHead), default="markov"),
)

_CANDIDATE_SOURCE = Field(
    name="candidate_source_layer_id",
    expected="a layer id, -1 or null",
    accepts=lambda value: (
        value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= -1)
    ),
    convert=lambda value: None if value == -1 else value,
    default=None,
)

_V41_TEXT = (
    constant("model_type", "deepseek_v41_text", optional=True),
    *_LANGUAGE,
    integers("kv_source_layer_ids"),
    integers("index_source_layer_ids"),
    nullable(integers("index_k_source_layer_ids")),
    _CANDIDATE_SOURCE,
    integer("candidate_topk_blocks"),
    integer("candidate_block_size"),
    constant("hc_shifted", True, optional=True),
    boolean("use_fp4_sparse_kv", default=True),
    constant("dspark_target_attn_input", True, optional=True),
    *_DTYPE,
    *_IGNORED,
)

_V41_TOP = (
    constant("architectures", ["DeepseekV41ForCausalLM"]),
    constant("model_type", "deepseek_v41"),
    integer("bos_token_id", minimum=0),
    integer("eos_token_id", minimum=0),
    nullable(integer("pad_token_id", minimum=0)),
    nullable(integer("image_token_id", minimum=0)),
    constant("tie_word_embeddings", False, optional=True),
    nested("text_config"),
    nested("vision_config", may_be_null=True),
    nested("quantization_config"),
    *_DTYPE,
    *_IGNORED,
)

_V41_VISION = (
    constant("model_type", "deepseek_v41_vision", optional=True),
    integer("num_hidden_layers"),
    integer("hidden_size"),
    integer("num_attention_heads"),
    integer("intermediate_size"),
    integer("patch_size"),
    number("rope_theta"),
    integer("downsample_ratio"),
    integer("max_image_tokens", minimum=4),
    integer("min_pixels", minimum=0),
    nullable(number("max_wh_ratio")),
    *_DTYPE,
    *_IGNORED,
)

_V4_TOP = (
    constant("architectures", ["DeepseekV4ForCausalLM"]),
    constant("model_type", "deepseek_v4"),
    integer("bos_token_id", minimum=0),
    integer("eos_token_id", minimum=0),
    nullable(integer("pad_token_id", minimum=0)),
    *_LANGUAGE,
    integer("num_hash_layers", minimum=0),
    constant("expert_dtype", "fp4"),
    nested("quantization_config"),
    *(nullable(field) for field in _DSPARK),
    *_DTYPE,
    *_IGNORED,
)

_ROPE_SCALING = (
    constant("rope_type", "yarn", optional=True),
    constant("type", "yarn", optional=True),
    number("factor", minimum=1.0),
    number("beta_fast"),
    number("beta_slow"),
    integer("original_max_position_embeddings"),
)

_LANGUAGE_RULES = (rules.rotary, rules.output_groups, rules.experts, rules.expert_groups)
_V41_RULES = (
    *_LANGUAGE_RULES,
    rules.activation_groups,
    rules.ratios_v41,
    rules.sources,
    rules.candidates,
    rules.engram,
    rules.dspark,
)


def read_config(source: str | Path) -> ModelConfig:
    """Returns the config of a checkpoint folder, or of a `config.json`.

    Raises:
        ConfigError: The file is absent, is not JSON, or holds what this package cannot honour.

    Examples:
        >>> from deepinfer_jax.loading import EMBEDDED
        >>> di.read_config(EMBEDDED).num_hidden_layers
        12
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a model folder needs a readable config.json: {error}, at {path}. "
            "Name a folder in Hugging Face layout or the config file itself."
        ) from error
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise ConfigError(
            f"config.json must be one JSON object with unique keys: {error}, in {path}. "
            "Download the file again or repair it."
        ) from error
    return _parse(data, str(path))


def config_from_hf(data: dict[str, Any]) -> ModelConfig:
    """Returns the config of a parsed `config.json`.

    Raises:
        ConfigError: A key is missing or unknown, or a value cannot be honoured; lists all of them.

    Examples:
        >>> di.config_from_hf({"model_type": "llama"})
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.ConfigError: ...
    """
    return _parse(data, "the given mapping")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the key {', '.join(map(repr, repeated))} occurs more than once")
    return result


def _parse(data: Any, where: str) -> ModelConfig:
    model_type = data.get("model_type") if isinstance(data, Mapping) else None
    readers = {"deepseek_v41": _read_v41, "deepseek_v4": _read_v4}
    if (
        not isinstance(data, Mapping)
        or not isinstance(model_type, str)
        or model_type not in readers
    ):
        received = model_type if isinstance(data, Mapping) else data
        expected = '"deepseek_v41" or "deepseek_v4"'
        raise ConfigError(
            f"{mismatch('model_type', expected, received)}, in {where}. "
            "Use a checkpoint of one of these two model types."
        )
    problems: list[str] = []
    config = readers[model_type](data, problems)
    if config is None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(
            f"every field of config.json must be known and supported; mismatches: {len(problems)}, "
            f"in {where}.\n{lines}\nCorrect these fields, or use a checkpoint that this version "
            "supports."
        )
    return config


def _read_v41(data: Mapping[str, Any], problems: list[str]) -> ModelConfig | None:
    top = read_fields(data, "", _V41_TOP, problems)
    problems.extend(_no_dtype(data))
    text: dict[str, Any] = {}
    rope: dict[str, Any] = {}
    vision: dict[str, Any] | None = None
    if "text_config" in top:
        raw = top["text_config"]
        text = read_fields(raw, "text_config.", _v41_text_fields(raw), problems)
        problems.extend(rules.broken(_V41_RULES, text, "text_config."))
        rope = _read_rope(text, "text_config.rope_scaling.", _ROPE_SCALING, problems)
    problems.extend(rules.broken((rules.token_ids,), {**text, **top}, ""))
    if top.get("vision_config") is not None:
        vision = read_fields(top["vision_config"], "vision_config.", _V41_VISION, problems)
        problems.extend(rules.broken((rules.vision,), vision, "vision_config."))
        if "image_token_id" in top and top["image_token_id"] is None:
            problems.append(
                "image_token_id: expected a token id (vision_config is present), received null"
            )
    if "quantization_config" in top:
        fields = (*_quantization(32), constant("expert_dtype", "fp4"))
        read_fields(top["quantization_config"], "quantization_config.", fields, problems)
    return None if problems else build.v41(top, text, rope, vision)


def _v41_text_fields(raw: Mapping[str, Any]) -> tuple[Field, ...]:
    """Tables of a part that is switched off (no Engram layer, no draft stage) may be absent."""
    engram, dspark = _ENGRAM, _V41_DSPARK
    if raw.get("engram_layer_ids") == []:
        engram = (
            _ENGRAM[0],
            integers("engram_num_embeddings", default=()),
            *map(nullable, _ENGRAM[2:]),
        )
    if raw.get("num_nextn_predict_layers") == 0:
        dspark = tuple(map(nullable, _V41_DSPARK))
    return (*_V41_TEXT, *engram, *dspark)


def _read_v4(data: Mapping[str, Any], problems: list[str]) -> ModelConfig | None:
    top = read_fields(data, "", _V4_TOP, problems)
    problems.extend(_no_dtype(data))
    own = (*_LANGUAGE_RULES, rules.ratios_v4, rules.draft_v4, rules.token_ids)
    problems.extend(rules.broken(own, top, ""))
    theta = (
        number("rope_theta")
        if "rope_theta" not in top
        else constant("rope_theta", top["rope_theta"])
    )
    rope = _read_rope(top, "rope_scaling.", (*_ROPE_SCALING, nullable(theta)), problems)
    if "quantization_config" in top:
        fields = (*_quantization(128), constant("fmt", "e4m3", optional=True))
        read_fields(top["quantization_config"], "quantization_config.", fields, problems)
    return None if problems else build.v4(top, rope)


def _read_rope(
    values: Mapping[str, Any], path: str, fields: tuple[Field, ...], problems: list[str]
) -> dict[str, Any]:
    if "rope_scaling" not in values:
        return {}
    raw = values["rope_scaling"]
    rope = read_fields(raw, path, fields, problems)
    named = {"rope_type": raw.get("rope_type"), "type": raw.get("type")}
    problems.extend(rules.broken((rules.yarn,), {**rope, **named}, path))
    return rope


def _quantization(block: int) -> tuple[Field, ...]:
    return (
        constant("quant_method", "fp8"),
        constant("activation_scheme", "dynamic"),
        constant("weight_block_size", [block, block]),
        constant("scale_fmt", "ue8m0"),
    )


def _no_dtype(data: Mapping[str, Any]) -> Iterator[str]:
    if "dtype" not in data and "torch_dtype" not in data:
        yield f"dtype: expected {show('bfloat16')} (no other value is supported), received no value"
