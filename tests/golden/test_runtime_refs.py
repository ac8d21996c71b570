"""Golden file runtime_refs: stored rows, compressor ring and block maxima, and the whole file.

The filter, confidence, schedule and acceptance cases are those of the sampling tests.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.presets import preset
from deepinfer_jax.model import rows
from deepinfer_jax.model.params import CompressorParams, IndexerParams
from deepinfer_jax.model.registry import single_sequence
from deepinfer_jax.model.state import CacheState
from pallas_kernels import core
from pallas_kernels.core import topk
from tests.deepinfer_jax.sampling.test_golden import RUNTIME_CASES
from tests.golden import compare
from tests.golden.ledger import Fixture, Left, Suite
from tests.golden.network import layer_params, stack, tiny_config
from tests.golden.sublayer import Sublayer

SOURCE = 2  # a layer that owns compressed rows of ratio 2


def real_config(*, fp4: bool) -> ModelConfig:
    """Returns the released size in checkpoint arithmetic, compressed rows in FP4 or FP8."""
    config = preset("deepseek-v4.1-flash")
    return replace(
        config,
        attention=replace(config.attention, use_fp4_sparse_kv=fp4),
        execution=replace(config.execution, numerics="checkpoint"),
    )


def check_rows(fixture: Fixture) -> None:
    """Bytes of window, compressed and index rows at the released size; exact."""
    fp4, fp8 = real_config(fp4=True), real_config(fp4=False)
    x, key = fixture.value("rows.x"), fixture.value("rows.index_x")
    window, want = jax.jit(lambda x: rows.encode_window(fp4, x))(x), fixture.take("rows.V41_528")
    compare.exact("rows.V41_528 window", window, want)
    compare.exact("rows.V41_528 main", jax.jit(lambda x: rows.encode_main(fp8, x))(x), want)
    main = jax.jit(lambda x: rows.encode_main(fp4, x))(x)
    compare.exact("rows.V41_FP4_288", main, fixture.take("rows.V41_FP4_288"))
    data, scale = jax.jit(lambda x: rows.encode_index(fp4, x))(key)
    compare.exact("rows.index_data64", data, fixture.take("rows.index_data64"))
    compare.exact("rows.index_scale4", scale, fixture.take("rows.index_scale4"))
    for stored in (window, main, data, scale):
        assert stored.dtype == jnp.uint8


class Ring(Sublayer):
    """The attention sub-layer of a ratio-2 source whose published rows are the pooled values.

    Its input is (gate, value) side by side, and the projections pick one half each. The file has no
    norm and no rotation after the pooling: a norm with eps 2^60 and weight 2^30 changes nothing,
    and the rotated channels come after the file's. Rounding as in the checkpoint, rows stored in
    float32, because the file's are not quantised.
    """

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__("checkpoint", tokens)
        config = tiny_config("float32")
        attention = replace(config.attention, head_dim=width + config.attention.qk_rope_head_dim)
        self.config = replace(config, attention=attention, rms_norm_eps=2.0**60)
        self.width = width

    def state(self) -> CacheState:
        """Returns an empty state with DeepInfer's capacities: six rows may be written at once."""
        return single_sequence(self.config, self.tokens, row_tile=6)

    def weights(self) -> tuple:
        """Returns projections that pick the halves of the input; everything else is zero."""
        attention, indexer = self.config.attention, self.config.indexer
        heads, dim, rank = attention.num_attention_heads, attention.head_dim, attention.q_lora_rank
        low, size = attention.o_groups * attention.o_lora_rank, 2 * self.width
        gate, value = (jnp.eye(dim, size, k).at[self.width :].set(0) for k in (0, self.width))
        zeros, ones = jnp.zeros, jnp.ones
        layer = layer_params(
            wq_a=zeros((rank, size)),
            q_norm=ones(rank),
            wq_b=zeros((heads * dim, rank)),
            wkv=zeros((dim, size)),
            kv_norm=ones(dim),
            attn_sink=zeros(heads),
            wo_a=zeros((low, heads * dim // attention.o_groups)),
            wo_b=zeros((size, low)),
        )
        key = zeros((indexer.index_head_dim, dim)), ones(indexer.index_head_dim)
        one = CompressorParams(value, gate, ones(dim) * 2.0**30, *key)
        queries = IndexerParams(
            zeros((indexer.index_n_heads * indexer.index_head_dim, rank)),
            zeros((indexer.index_n_heads, size)),
        )
        return layer, (stack(one, 2), stack(one.replace(wgate=None), 1)), stack(queries, 4)


def check_ring(fixture: Fixture) -> None:
    """Chunks 5, 1, 4, 7, then one by one: rings exact, pooled rows appear when their pair closes.

    Seven ring rows allow six written before the first is read, so the chunk of seven is 6 + 1.
    """
    gates, values = fixture.input("ring.gate_scores"), fixture.input("ring.values")
    (tokens, width), group = gates.shape, 0
    run = Ring(width, tokens)
    state, weights = run.state(), run.weights()
    v, start = np.concatenate([gates, values], axis=1), 0
    want = fixture.take("ring.compressed")
    assert state.comp_tail[group].shape[2] == int(fixture.input("ring.slots"))

    def tail() -> np.ndarray:
        found = np.asarray(state.comp_tail[group])[0, 1]
        compare.exact("channels after the file's", found[..., width:], 0 * found[..., width:])
        return found[..., :width]

    chunks = fixture.input("ring.chunks").tolist()
    for chunk in chunks + [1] * (tokens - sum(chunks)):
        for first in range(0, chunk, 6):
            part = v[start : start + min(6, chunk - first)]
            state, _ = run.rows(weights, SOURCE, state, part, start)
            start += len(part)
        pages = np.asarray(state.main[group])[0, 1, : len(want), :width]
        closed = start // 2
        compare.exact("ring.compressed", pages[:closed], want[:closed])
        compare.exact("rows of open pairs", pages[closed:], np.zeros_like(pages[closed:]))
        if start == sum(chunks):
            key = "ring.state_after_prefill17"
            compare.exact(key, tail(), fixture.take(key))
    compare.exact("ring.state_final", tail(), fixture.take("ring.state_final"))


def block_scores(scores, length, block_size: int) -> jax.Array:
    """Returns the block scores that `core.select_blocks` ranks, forced last block included."""
    ranked = []

    def observe(best, k):
        ranked.append(best)
        return top_k(best, k)

    top_k = topk.top_k
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "top_k", observe)
        core.select_blocks(scores, length, block_size, 1)
    (best,) = ranked
    return best


def check_block_maxima(fixture: Fixture, name: str) -> None:
    """Block scores and the number of visible blocks; then every pool size keeps the best ones."""
    size = int(fixture.input(f"{name}.block_size"))
    score, length = fixture.value(f"{name}.score"), fixture.input(f"{name}.len")
    want = fixture.take(f"{name}.block_score")
    got = jax.jit(lambda s, n: block_scores(s, n, size))(score, length)
    compare.exact(f"{name}.block_score", got, want)
    blocks = want.shape[1]
    for pool in range(blocks + 1):
        kept = jax.jit(lambda s, n, p=pool: core.select_blocks(s, n, size, p))(score, length)
        best = np.argsort(-want, axis=1, kind="stable")[:, :pool]
        expected = np.zeros(want.shape, bool)
        np.put_along_axis(expected, best, True, axis=1)
        compare.exact(f"{name} pool of {pool}", kept, expected & (want > -np.inf))
    key = f"{name}.valid_blocks"
    compare.exact(key, np.asarray(kept).sum(axis=1), fixture.take(key))


CASES = {"rows": check_rows, "ring": check_ring} | {
    f"blockmax.{name}": lambda fixture, name=name: check_block_maxima(fixture, f"blockmax.{name}")
    for name in "abc"
}
SUITE = Suite(
    "modules/runtime_refs",
    RUNTIME_CASES | CASES,
    [
        Left(
            2,
            "variant not implemented: codes formed with the reciprocal scale",
            ("rows.V41_FP4_288_reciprocal_variant",),
        )
    ],
)
pytestmark = pytest.mark.accept(3)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
