"""tiny_v41 in both arithmetics, and parameter records made from the weights of a module file."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.expand import expand_float32
from deepinfer_jax.checkpoint.loader import load_params
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import (
    CompressorParams,
    DraftParams,
    ExpertParams,
    IndexerParams,
    LayerParams,
    MHCParams,
    Params,
)
from deepinfer_jax.model.tile import Role, Rows, role_table
from deepinfer_jax.numerics.ops import Ops, ops_for
from pallas_kernels import core
from tests.golden.ledger import FIXTURES, Fixture

TINY = FIXTURES / "tiny_v41"
#: Prefix of a module file's keys -> the arithmetic that gives them.
NUMERICS = {"f32": "float32", "bf16": "checkpoint"}
TILE = 8


@lru_cache(maxsize=4)
def tiny_config(numerics: str = "float32") -> ModelConfig:
    """Returns the config of tiny_v41 in one arithmetic."""
    config = read_config(TINY)
    return replace(config, execution=replace(config.execution, numerics=numerics))


def ops(numerics: str) -> Ops:
    """Returns the primitives of level "batch"."""
    return ops_for(tiny_config(numerics).execution)


@lru_cache(maxsize=2)
def tiny_params(numerics: str = "float32") -> Params:
    """Returns the parameters of tiny_v41, token map included."""
    from tokenizers import Tokenizer

    from deepinfer_jax.model.engram.vocabulary import build_token_map

    config = tiny_config(numerics)
    params = load_params(TINY, config)
    if numerics == "float32":
        params = expand_float32(params)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    token_map = build_token_map(tokenizer, config.engram, config.vocab_size)
    return params.replace(engram=params.engram.replace(token_map=token_map))


def role(layer: int) -> Role:
    """Returns the role of one layer of tiny_v41 as arrays."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[layer]), role_table(tiny_config()))


class Weights:
    """The weights of one module, `<prefix>.<suffix>`, in one arithmetic."""

    def __init__(self, fixture: Fixture, prefix: str, numerics: str) -> None:
        self.fixture, self.prefix, self.numerics = fixture, prefix, numerics

    def plain(self, suffix: str) -> Any:
        """Returns a BF16 or float32 tensor."""
        array = self.fixture.input(f"{self.prefix}.{suffix}")
        return jnp.asarray(array.astype(np.float32) if self.numerics == "float32" else array)

    def quantised(self, suffix: str, layout: str = "fp8_block32") -> Any:
        """Returns a quantised matrix, dequantised in float32."""
        payload, scale = (
            jnp.asarray(self.fixture.input(f"{self.prefix}.{suffix}.{part}_u8"))
            for part in ("weight", "scale")
        )
        array = core.QuantArray(payload, scale, layout)
        return array.dequantize() if self.numerics == "float32" else array

    def has(self, suffix: str) -> bool:
        """Returns whether the file holds `suffix`."""
        names = (f"{self.prefix}.{suffix}", f"{self.prefix}.{suffix}.weight_u8")
        return any(name in self.fixture.arrays for name in names)

    def attention(self) -> LayerParams:
        """Returns a layer with the attention leaves only."""
        wo_a = self.quantised("wo_a")
        if self.numerics == "checkpoint":  # BF16 at load, exactly (model.md 9.1)
            wo_a = wo_a.dequantize().astype(jnp.bfloat16)
        leaves = {name: self.quantised(name) for name in ("wq_a", "wq_b", "wkv", "wo_b")}
        leaves |= {name: self.plain(f"{name}.weight") for name in ("q_norm", "kv_norm")}
        return layer_params(**leaves, wo_a=wo_a, attn_sink=self.plain("attn_sink"))

    def compressor(self) -> CompressorParams:
        """Returns compressed-row and index-key leaves."""
        gate = "compressor.wgate.weight"
        return CompressorParams(
            wkv=self.plain("compressor.wkv.weight"),
            wgate=self.plain(gate) if self.has(gate) else None,
            norm=self.plain("compressor.norm.weight"),
            index_wk=self.plain("indexer.wk.weight"),
            index_k_norm=self.plain("indexer.k_norm.weight"),
        )

    def indexer(self) -> IndexerParams:
        """Returns index-query leaves."""
        return IndexerParams(
            wq_b=self.quantised("indexer.wq_b"),
            weights_proj=self.plain("indexer.weights_proj.weight"),
        )


def layer_params(**leaves: Any) -> LayerParams:
    """Returns a layer with the given leaves only."""
    mhc, expert = MHCParams(None, None, None), ExpertParams(None, None, None)
    records = {"hc_attn": mhc, "hc_ffn": mhc, "experts": expert, "shared": expert}
    empty: dict[str, Any] = dict.fromkeys(LayerParams.__dataclass_fields__)
    return LayerParams(**empty | records | leaves)


def draft_params(**leaves: Any) -> DraftParams:
    """Returns draft leaves with the given ones only."""
    empty: dict[str, Any] = dict.fromkeys(DraftParams.__dataclass_fields__)
    return DraftParams(**empty | {"stages": layer_params()} | leaves)


def model_params(**leaves: Any) -> Params:
    """Returns a model with the given leaves only."""
    empty: dict[str, Any] = dict.fromkeys(Params.__dataclass_fields__)
    return Params(**empty | {"layers": layer_params()} | leaves)


def stack(leaf: Any, count: int) -> Any:
    """Returns every array of a record repeated along a new first axis."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), leaf)


def rows_of(positions: np.ndarray, *, slot: int = 1) -> Rows:
    """Returns one tile whose negative positions are padding."""
    positions = np.asarray(positions, np.int32)
    return Rows(
        ids=jnp.zeros(positions.shape, jnp.int32),
        position=jnp.asarray(np.maximum(positions, 0)),
        slot=jnp.full(positions.shape, slot, jnp.int32),
        valid=jnp.asarray(positions >= 0),
    )


def tiles(count: int, start: int = 0) -> list[np.ndarray]:
    """Returns the positions of every tile of `count` rows, -1 where a tile is not full."""
    numbers = np.arange(start, start + -(-count // TILE) * TILE)
    return list(np.where(numbers < start + count, numbers, -1).reshape(-1, TILE))
