"""config.json: every refused value, one error for all mismatches, round trip."""

import copy
import json
from dataclasses import replace

import pytest

from deepinfer_jax.config import presets
from deepinfer_jax.config.hf import config_from_hf, config_to_hf, read_config
from deepinfer_jax.config.presets import PRESETS, preset
from deepinfer_jax.errors import ConfigError, DeepInferError


def tiny():
    return copy.deepcopy(presets._TINY_V41)


def flat():
    return copy.deepcopy(presets._V4_FLASH)


DELETE = object()


def edited(data, path, value):
    *parents, name = path.split(".")
    record = data
    for parent in parents:
        record = record[parent]
    if value is DELETE:
        del record[name]
    else:
        record[name] = value
    return data


def lines_of(data):
    with pytest.raises(ConfigError) as caught:
        config_from_hf(data)
    return [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_gives_the_same_config(name):
    config = preset(name)
    written = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(written) == config
    assert hash(config) == hash(config_from_hf(written))


@pytest.mark.parametrize("head", ["rnn", "none"])
def test_draft_head_is_a_key_of_the_file_where_it_is_not_the_released_one(head):
    config = config_from_hf(tiny())
    assert config.draft.dspark_head == "markov"
    assert "dspark_head" not in config_to_hf(config)["text_config"]
    assert config_from_hf(edited(tiny(), "text_config.dspark_head", "markov")) == config
    other = replace(config, draft=replace(config.draft, dspark_head=head))
    written = json.loads(json.dumps(config_to_hf(other)))
    assert written["text_config"]["dspark_head"] == head
    assert config_from_hf(written) == other


@pytest.mark.parametrize("name", ["tiny_v41", "tiny_v4"])
def test_fixture_files_are_read(fixtures_dir, name):
    folder = fixtures_dir / name
    config = read_config(folder)
    assert config == read_config(folder / "config.json")
    assert config_from_hf(config_to_hf(config)) == config
    if name == "tiny_v41":
        assert config == preset("tiny-v41")


def test_published_values():
    config = preset("deepseek-v4.1-flash")
    assert (config.vocab_size, config.hidden_size, config.rms_norm_eps) == (129280, 5120, 1e-20)
    assert config.attention.rope_scaling.factor == 16.0
    assert config.mhc.hc_shifted
    assert config.attention.use_fp4_sparse_kv
    assert config.engram is not None
    assert config.engram.columns == 24
    assert config.draft is not None
    assert config.draft.num_stages == 3
    assert config.stored_draft is None
    older = preset("DeepSeek-V4-Flash")
    assert not older.mhc.hc_shifted
    assert older.draft is None
    assert older.stored_draft is not None
    assert (older.stored_draft.num_stages, older.stored_draft.dspark) == (1, None)
    newer = preset("deepseek-v4-flash-0731").stored_draft
    assert newer is not None
    assert newer.num_stages == 3
    assert newer.dspark is not None
    assert newer.dspark.dspark_target_layer_ids == (40, 41, 42)


def test_one_error_lists_every_mismatch_with_field_expected_and_received():
    data = tiny()
    text = data["text_config"]
    text["hidden_size"] = "wide"
    text["qk_rope_head_dim"] = 15
    text["o_groups"] = 3
    text["scoring_func"] = "softmax"
    text["mystery"] = {"a": 1}
    del text["sliding_window"]
    data["vision_config"]["hidden_size"] = 30
    data["quantization_config"]["scale_fmt"] = "float"
    assert lines_of(data) == [
        'text_config.hidden_size: expected an integer >= 1, received "wide"',
        'text_config.scoring_func: expected "sqrtsoftplus" (no other value is supported), '
        'received "softmax"',
        "text_config.sliding_window: expected an integer >= 1, received no value",
        "text_config.mystery: expected no such key (unknown keys may change the arithmetic), "
        'received {"a": 1}',
        "text_config.qk_rope_head_dim: expected a multiple of 2 (channels are rotated in pairs), "
        "received 15",
        "text_config.o_groups: expected a divisor of num_attention_heads (4), received 3",
        "vision_config.hidden_size: expected a multiple of 4 * num_attention_heads (8), for the "
        "2-D rotary embedding, received 30",
        'quantization_config.scale_fmt: expected "ue8m0" (no other value is supported), '
        'received "float"',
    ]


REFUSED_V41 = [
    ("architectures", ["DeepseekV4ForCausalLM"], "architectures"),
    ("architectures", DELETE, "architectures"),
    ("dtype", "float16", "dtype"),
    ("dtype", DELETE, "dtype"),
    ("bos_token_id", -1, "bos_token_id"),
    ("eos_token_id", 512, "eos_token_id"),
    ("pad_token_id", 512, "pad_token_id"),
    ("image_token_id", 512, "image_token_id"),
    ("image_token_id", None, "image_token_id"),
    ("text_config", [], "text_config"),
    ("text_config", DELETE, "text_config"),
    ("vision_config", DELETE, "vision_config"),
    ("quantization_config", None, "quantization_config"),
    ("rope_parameters", {}, "rope_parameters"),
    ("text_config.model_type", "deepseek_v4", "text_config.model_type"),
    ("text_config.vocab_size", 0, "text_config.vocab_size"),
    ("text_config.vocab_size", 512.0, "text_config.vocab_size"),
    ("text_config.vocab_size", True, "text_config.vocab_size"),
    ("text_config.num_key_value_heads", 2, "text_config.num_key_value_heads"),
    ("text_config.num_key_value_heads", True, "text_config.num_key_value_heads"),
    ("text_config.hidden_act", "gelu", "text_config.hidden_act"),
    ("text_config.swiglu_limit", 0, "text_config.swiglu_limit"),
    ("text_config.rms_norm_eps", float("nan"), "text_config.rms_norm_eps"),
    ("text_config.rms_norm_eps", -1e-6, "text_config.rms_norm_eps"),
    ("text_config.attention_bias", True, "text_config.attention_bias"),
    ("text_config.attention_dropout", 0.1, "text_config.attention_dropout"),
    ("text_config.tie_word_embeddings", True, "text_config.tie_word_embeddings"),
    ("text_config.n_shared_experts", 2, "text_config.n_shared_experts"),
    ("text_config.topk_method", "group_limited_greedy", "text_config.topk_method"),
    ("text_config.norm_topk_prob", 1, "text_config.norm_topk_prob"),
    ("text_config.hc_shifted", False, "text_config.hc_shifted"),
    ("text_config.dspark_target_attn_input", False, "text_config.dspark_target_attn_input"),
    ("text_config.use_fp4_sparse_kv", "yes", "text_config.use_fp4_sparse_kv"),
    ("text_config.head_dim", 48, "text_config.head_dim"),
    ("text_config.head_dim", 16, "text_config.qk_rope_head_dim"),
    ("text_config.qk_rope_head_dim", 34, "text_config.qk_rope_head_dim"),
    ("text_config.hidden_size", 72, "text_config.hidden_size"),
    ("text_config.moe_intermediate_size", 80, "text_config.moe_intermediate_size"),
    ("text_config.q_lora_rank", 100, "text_config.q_lora_rank"),
    ("text_config.o_lora_rank", 24, "text_config.o_lora_rank"),
    ("text_config.num_attention_heads", 3, "text_config.o_groups"),
    ("text_config.num_experts_per_tok", 9, "text_config.num_experts_per_tok"),
    ("text_config.rope_scaling.rope_type", "linear", "text_config.rope_scaling.rope_type"),
    ("text_config.rope_scaling.rope_type", DELETE, "text_config.rope_scaling.rope_type"),
    ("text_config.rope_scaling.factor", 0.5, "text_config.rope_scaling.factor"),
    ("text_config.rope_scaling.beta_fast", 1, "text_config.rope_scaling.beta_fast"),
    ("text_config.rope_scaling.mscale", 1.0, "text_config.rope_scaling.mscale"),
    ("text_config.rope_scaling.rope_theta", 10000, "text_config.rope_scaling.rope_theta"),
    ("text_config.compress_ratios", [0] * 12, "text_config.compress_ratios"),
    (
        "text_config.compress_ratios",
        [0, 0, 2, 2, 2, 2, 1, 1, 1, 4, 0, 0, 0],
        "text_config.compress_ratios[9]",
    ),
    (
        "text_config.compress_ratios",
        [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 1, 0],
        "text_config.compress_ratios[11]",
    ),
    (
        "text_config.compress_ratios",
        [0, 0, 2, 1, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "text_config.compress_ratios[3]",
    ),
    (
        "text_config.compress_ratios",
        [0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "text_config.kv_source_layer_ids",
    ),
    ("text_config.kv_source_layer_ids", [4, 2, 6], "text_config.kv_source_layer_ids"),
    ("text_config.kv_source_layer_ids", [0, 2, 4, 6], "text_config.kv_source_layer_ids"),
    ("text_config.kv_source_layer_ids", [2, 4, 6, 10], "text_config.kv_source_layer_ids"),
    ("text_config.kv_source_layer_ids", [], "text_config.kv_source_layer_ids"),
    ("text_config.kv_source_layer_ids", [2, 3, 4, 6], "text_config.index_source_layer_ids"),
    ("text_config.index_source_layer_ids", [2, 4, 8], "text_config.index_source_layer_ids"),
    ("text_config.index_k_source_layer_ids", [2, 4], "text_config.index_k_source_layer_ids"),
    ("text_config.candidate_source_layer_id", 7, "text_config.candidate_source_layer_id"),
    ("text_config.candidate_source_layer_id", 4, "text_config.candidate_source_layer_id"),
    ("text_config.candidate_source_layer_id", -2, "text_config.candidate_source_layer_id"),
    ("text_config.candidate_topk_blocks", 2, "text_config.candidate_topk_blocks"),
    ("text_config.engram_layer_ids", [4, 1], "text_config.engram_layer_ids"),
    ("text_config.engram_layer_ids", [1, 10], "text_config.engram_layer_ids"),
    ("text_config.engram_layer_ids", [1], "text_config.engram_num_embeddings"),
    ("text_config.engram_num_embeddings", [384, 553], "text_config.engram_num_embeddings"),
    ("text_config.engram_head_dim", 48, "text_config.engram_head_dim"),
    ("text_config.engram_pad_token_id", 512, "text_config.engram_pad_token_id"),
    ("text_config.engram_max_ngram_size", 1, "text_config.engram_max_ngram_size"),
    ("text_config.engram_vocab_size", 2**60, "text_config.engram_vocab_size"),
    ("text_config.engram_n_heads", 10**9, "text_config.engram_n_heads"),
    (
        "text_config.engram_compressed_vocab_size",
        513,
        "text_config.engram_compressed_vocab_size",
    ),
    ("text_config.dspark_target_layer_ids", [], "text_config.dspark_target_layer_ids"),
    ("text_config.dspark_target_layer_ids", [9, 8], "text_config.dspark_target_layer_ids"),
    ("text_config.dspark_target_layer_ids", [40], "text_config.dspark_target_layer_ids"),
    ("text_config.dspark_noise_token_id", 512, "text_config.dspark_noise_token_id"),
    ("text_config.dspark_num_experts_per_tok", 5, "text_config.dspark_num_experts_per_tok"),
    ("text_config.dspark_markov_rank", DELETE, "text_config.dspark_markov_rank"),
    ("text_config.dspark_head", "gated", "text_config.dspark_head"),
    ("text_config.dspark_head", None, "text_config.dspark_head"),
    ("vision_config.model_type", "siglip", "vision_config.model_type"),
    ("vision_config.max_wh_ratio", 0, "vision_config.max_wh_ratio"),
    ("quantization_config.quant_method", "awq", "quantization_config.quant_method"),
    ("quantization_config.activation_scheme", "static", "quantization_config.activation_scheme"),
    ("quantization_config.weight_block_size", [128, 128], "quantization_config.weight_block_size"),
    ("quantization_config.expert_dtype", "fp8", "quantization_config.expert_dtype"),
    ("quantization_config.fmt", "e4m3", "quantization_config.fmt"),
]


@pytest.mark.parametrize(("path", "value", "field"), REFUSED_V41)
def test_v41_value_is_refused_by_name(path, value, field):
    lines = lines_of(edited(tiny(), path, value))
    assert any(line.startswith(f"{field}: expected ") for line in lines), lines


REFUSED_V4 = [
    ("torch_dtype", "float32", "torch_dtype"),
    ("torch_dtype", DELETE, "dtype"),
    ("expert_dtype", DELETE, "expert_dtype"),
    ("layer_types", [], "layer_types"),
    ("rope_parameters", {}, "rope_parameters"),
    ("hc_shifted", True, "hc_shifted"),
    ("rope_scaling.rope_theta", 5, "rope_scaling.rope_theta"),
    ("num_hash_layers", 44, "num_hash_layers"),
    ("compress_ratios", [0] * 42, "compress_ratios"),
    ("compress_ratios", [2] + [0] * 43, "compress_ratios[0]"),
    ("compress_ratios", [0] * 43 + [4], "compress_ratios[43]"),
    ("compress_ratios", [0] * 46, "compress_ratios"),
    ("dspark_block_size", 5, "dspark_markov_rank"),
    ("quantization_config.fmt", "e5m2", "quantization_config.fmt"),
    ("quantization_config.weight_block_size", [32, 32], "quantization_config.weight_block_size"),
]


@pytest.mark.parametrize(("path", "value", "field"), REFUSED_V4)
def test_v4_value_is_refused_by_name(path, value, field):
    lines = lines_of(edited(flat(), path, value))
    assert any(line.startswith(f"{field}: expected ") for line in lines), lines


ACCEPTED = [
    ("torch_dtype", "bfloat16"),
    ("transformers_version", "5.0"),
    ("_name_or_path", "somewhere"),
    ("text_config.index_k_source_layer_ids", [2, 4, 6]),
    ("text_config.hc_shifted", True),
    ("text_config.dspark_target_attn_input", True),
    ("text_config.use_fp4_sparse_kv", False),
    ("text_config.candidate_source_layer_id", -1),
    ("text_config.candidate_source_layer_id", None),
    ("text_config.attention_bias", DELETE),
    ("text_config.attention_dropout", 0),
    ("text_config.rope_scaling.type", "yarn"),
]


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_optional_v41_key_is_accepted(path, value):
    config_from_hf(edited(tiny(), path, value))


def test_optional_keys_change_what_they_name():
    off = config_from_hf(edited(tiny(), "text_config.candidate_source_layer_id", -1))
    assert off.indexer.candidate_source_layer_id is None
    assert not config_from_hf(
        edited(tiny(), "text_config.use_fp4_sparse_kv", False)
    ).attention.use_fp4_sparse_kv


def test_parts_can_be_switched_off():
    data = tiny()
    text = data["text_config"]
    for name in [name for name in text if name.startswith(("engram_", "dspark_"))]:
        del text[name]
    text["engram_layer_ids"] = []
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][:10]
    data["vision_config"] = None
    config = config_from_hf(data)
    assert (config.engram, config.draft, config.vision) == (None, None, None)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("value", [None, [], "x", {}, {"model_type": "llama"}, {"model_type": 3}])
def test_other_model_types_are_refused(value):
    with pytest.raises(ConfigError, match="model_type: expected"):
        config_from_hf(value) if isinstance(value, dict) else read_like(value)


def read_like(value):
    from deepinfer_jax.config.hf import _parse

    return _parse(value, "here")


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1, "a": 2}', "\ud800"])
def test_damaged_file_is_refused_with_its_path(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_absent_file_is_refused(tmp_path):
    with pytest.raises(DeepInferError, match=r"readable config\.json"):
        read_config(tmp_path)


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"deepseek-v4.1-flash.*received 'gpt'"):
        preset("gpt")


def test_execution_is_not_part_of_the_file():
    config = preset("tiny-v41")
    run = replace(config, execution=replace(config.execution, numerics="checkpoint"))
    assert config_to_hf(run) == config_to_hf(config)
