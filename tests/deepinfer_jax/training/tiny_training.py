"""Small models and a learnable stand-in for the corpus."""

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.loading import read_tokenizer
from deepinfer_jax.model.engram.vocabulary import TokenMap, build_token_map
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.init import init_params
from tests.golden.network import TINY

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "moe_intermediate_size": 32,
    "sliding_window": 8,
    "index_n_heads": 2,
    "engram_vocab_size": 53,
    "num_nextn_predict_layers": 0,
}


def two_layer_config():
    """One window layer with Engram, one Full layer of ratio 2; nothing is selected by score."""
    return nano_config(
        64,
        50,
        **SMALL,
        num_hidden_layers=2,
        compress_ratios=[0, 2],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        candidate_source_layer_id=None,
        engram_layer_ids=[0],
        n_routed_experts=2,
        index_topk=16,
    )


def every_role_config():
    """Window, Engram, Full at both ratios, candidates, Reindex, Reuse; tokenizer of tiny_v41."""
    changes = {**SMALL, "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [4]}
    return nano_config(
        512,
        417,
        **changes,
        num_hidden_layers=5,
        compress_ratios=[0, 2, 1, 1, 1, 0],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2, 3],
        candidate_source_layer_id=2,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        engram_layer_ids=[0],
        n_routed_experts=4,
        dspark_n_routed_experts=2,
        index_topk=6,
    )


def parameters(config, seed=0):
    """Random parameters, noise on what starts as a constant so that it matters."""
    if config.vocab_size == 512:
        token_map = build_token_map(read_tokenizer(TINY), config.engram, 512)
    else:
        token_map = TokenMap((np.arange(config.vocab_size) % 50).astype(np.int32))
    return init_params(config, seed, token_map)


def counting(config, *, batch=4, length=32):
    """Returns batch_at(step): sequences that count upwards by a step of their own."""

    def at(step):
        draw = np.random.default_rng([7, step])
        start = draw.integers(0, 64, (batch, 1))
        stride = draw.integers(1, 4, (batch, 1))
        ids = (start + stride * np.arange(length)) % min(64, config.vocab_size)
        return ids.astype(np.int32), np.ones((batch, length), np.float32)

    return at


def random_ids(config, shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape), jnp.int32)
