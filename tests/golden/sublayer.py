"""The attention sub-layer alone, over tiles of one sequence, with the weights of a module file."""

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.attention.sublayer import attention, empty_selection
from deepinfer_jax.model.params import CompressorParams, IndexerParams, LayerParams
from deepinfer_jax.model.registry import single_sequence
from deepinfer_jax.model.state import CacheState
from tests.golden.network import (
    Weights,
    model_params,
    ops,
    role,
    rows_of,
    stack,
    tiles,
    tiny_config,
)


class Sublayer:
    """`attention` over tiles of one sequence, one compiled program for all layer kinds."""

    def __init__(self, mode: str, tokens: int = 50) -> None:
        self.config, self.prims, self.tokens = tiny_config(mode), ops(mode), tokens

        def run(layer, compressors, indexers, role, state, tile, v):
            params = model_params(compressors=compressors, indexers=indexers)
            selection = empty_selection(self.config, state, v.shape[0])
            return attention(
                self.prims, self.config, params, layer, role, state, selection, tile, v
            )[:2]

        self.step = jax.jit(run)

    def state(self) -> CacheState:
        """Returns an empty state."""
        return single_sequence(self.config, self.tokens, row_tile=8)

    def rows(
        self, weights: tuple, number: int, state: CacheState, v: np.ndarray, start: int = 0
    ) -> tuple[CacheState, np.ndarray]:
        """Returns (state, outputs) after the rows `v` at positions from `start`."""
        outputs = []
        for positions in tiles(len(v), start):
            padded = np.zeros((8, v.shape[1]), np.float32)
            padded[positions >= 0] = v[positions[positions >= 0] - start]
            state, y = self.step(*weights, role(number), state, rows_of(positions), padded)
            outputs.append(np.asarray(y)[positions >= 0])
        return state, np.concatenate(outputs)


def sublayer_weights(weights: Weights) -> tuple[LayerParams, tuple, IndexerParams]:
    """Returns (layer, compressors of both ratios, indexers); absent leaves are never used."""
    layer = weights.attention()
    if not weights.has("indexer.wq_b"):
        empty = jnp.zeros((64, 64)), jnp.zeros((64,)), jnp.zeros((32, 64)), jnp.zeros((32,))
        own = CompressorParams(empty[0], empty[0], empty[1], empty[2], empty[3])
        queries = IndexerParams(layer.wq_b, jnp.zeros((8, 64)))
    else:
        own, queries = weights.compressor(), weights.indexer()
    with_gate = own if own.wgate is not None else own.replace(wgate=own.wkv)
    compressors = (stack(with_gate, 2), stack(own.replace(wgate=None), 1))
    return layer, compressors, stack(queries, 4)
