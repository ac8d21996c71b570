"""Operations of the network by named kernels, in terms of what the network passes around.

The network carries float32 arrays that hold checkpoint values: BF16, or Q8 dequantised. Kernels
read codes and scales. Q8 of dequantised Q8 gives the same values again, so encoding here is exact
and costs one fused elementwise pass.
Every function takes the name of an implementation (kernels.md section 8), which runs or raises.
Each is jitted, so that a kernel is traced and lowered once a program, not once a layer.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt8

from deepinfer_jax.config.model import MHCConfig
from pallas_kernels import core

Weight = Any  # jax.Array or core.QuantArray


def is_dense(w: Weight) -> bool:
    """Says whether a weight is one of the dense products, not an expert's MXFP4."""
    return not isinstance(w, core.QuantArray) or w.format.startswith("fp8_block")


@partial(jax.jit, static_argnames="implementation")
def contract(x: Float[Array, "t i"], w: Weight, implementation: str) -> Float[Array, "t o"]:
    """Returns x @ w^T for a weight stored [o, i], x at a rounding point.

    A quantised weight gives BF16 values: every caller rounds such a product, and the kernel has
    done it. A BF16 weight gives the float32 sum.
    """
    from pallas_kernels.block_scaled_matmul.api import block_scaled_matmul, matmul_bf16

    if isinstance(w, core.QuantArray):
        codes, scale = core.quantize_q8(x)
        out = block_scaled_matmul(codes, scale, w, implementation=implementation)
        return out.astype(jnp.float32)
    return matmul_bf16(
        x.astype(jnp.bfloat16), w, out_dtype=jnp.float32, implementation=implementation
    )


@partial(jax.jit, static_argnames="implementation")
def contract_grouped(
    x: Float[Array, "t g i"], w: Float[Array, "g o i"], implementation: str
) -> Float[Array, "t g o"]:
    """Returns one product per group for a BF16 weight stored [g, o, i]; float32 sums."""
    from pallas_kernels.block_scaled_matmul.api import matmul_bf16

    return matmul_bf16(
        x.astype(jnp.bfloat16), w, out_dtype=jnp.float32, implementation=implementation
    )


@partial(jax.jit, static_argnames=("eps", "implementation"))
def norm(
    x: Float[Array, "t d"], weight: Float[Array, " d"], eps: float, implementation: str
) -> Float[Array, "t d"]:
    """Returns RMSNorm of BF16 values, rounded once to BF16."""
    from pallas_kernels.rms_norm_quant.api import rms_norm_quant

    row, _, _ = rms_norm_quant(x.astype(jnp.bfloat16), weight, eps, implementation=implementation)
    return row.astype(jnp.float32)


@partial(jax.jit, static_argnames=("mhc", "eps", "implementation"))
def mhc_pre(
    mhc: MHCConfig,
    eps: float,
    streams: Float[Array, "t k"],
    fn: Float[Array, "w k"],
    scale: Float[Array, " 3"],
    base: Float[Array, " w"],
    implementation: str,
) -> tuple[Float[Array, "t m"], Float[Array, "t m"], Float[Array, "t m m"]]:
    """Returns input mix, output gain and residual mixing matrix of streams of BF16 values.

    eps: added to the mean square of a row.
    """
    from pallas_kernels.mhc_pre.api import mhc_pre as coefficients

    return coefficients(
        streams,
        fn,
        scale,
        base,
        streams=mhc.hc_mult,
        iterations=mhc.hc_sinkhorn_iters,
        eps=mhc.hc_eps,
        rms_eps=eps,
        implementation=implementation,
    )


@partial(jax.jit, static_argnames=("count", "limit", "implementation"))
def routed_experts(
    x: Float[Array, "t d"],
    experts: tuple[Weight, Weight, Weight],
    first: Int[Array, ""] | int,
    count: int,
    ids: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    limit: float,
    implementation: str,
) -> Float[Array, "t k d"]:
    """Returns the BF16 outputs of the selected experts, [t, slot, d].

    Args:
        x: rows at the Q8 rounding point.
        experts: w1 (gate), w3 (up), w2 (down), MXFP4 [g, ..]: the experts of all layers, as stored
            or as the kernel wants them.
        first: the first expert of this layer in that stack.
        count: experts of a layer, e.
        ids: selected experts of each row, in [0, e); e marks a padding row, whose output is zero.
        weights: routing weights.
        limit: the clamp of gate and up.
        implementation: of `grouped_matmul`.
    """
    from pallas_kernels.grouped_matmul.api import routed_experts as grouped
    from pallas_kernels.grouped_matmul.plan import group_rows

    rows, slots = ids.shape
    codes, scale = core.quantize_q8(x)
    groups = group_rows(ids, count)
    out = grouped(
        codes,
        scale,
        *experts,
        groups.offsets,
        groups.order // slots,
        weights.reshape(-1)[groups.order],
        first_group=jnp.asarray(first, jnp.int32),
        limit=limit,
        implementation=implementation,
    )
    # selected, not multiplied: padding rows of the kernel may hold anything
    is_routed = (ids.reshape(-1) < count)[:, None]
    found = jnp.where(is_routed, out[groups.slot].astype(jnp.float32), 0.0)
    return found.reshape(rows, slots, -1)


@partial(jax.jit, static_argnames="implementation")
def attend(
    query: Float[Array, "t h c"],
    window: UInt8[Array, "r w"],
    window_ids: Int[Array, "t n"],
    selected: UInt8[Array, "q v"] | None,
    selected_ids: Int[Array, "t m"] | None,
    sink: Float[Array, " h"],
    implementation: str,
) -> Float[Array, "t h c"]:
    """Returns attention over rows of caches, rounded once to BF16 (model.md 3.6).

    Args:
        query: BF16 values.
        window: cache rows in the window format, all of them.
        window_ids: the rows of every query's list, -1 for none.
        selected: a second set of rows, in either format; None for none.
        selected_ids: its part of the list, behind the first.
        sink: one logit a head.
        implementation: of `sparse_mla_decode`.
    """
    from pallas_kernels.sparse_mla_decode.api import sparse_mla_decode

    out = sparse_mla_decode(
        query.astype(jnp.bfloat16),
        window,
        window_ids,
        selected,
        selected_ids,
        sink,
        implementation=implementation,
    )
    return out.astype(jnp.float32)


@partial(jax.jit, static_argnames="implementation")
def index_scores(
    query: Float[Array, "t h i"],
    weight: Float[Array, "t h"],
    key_codes: UInt8[Array, "p s j"],
    key_scale: UInt8[Array, "p s g"],
    pages: Int[Array, "n b"],
    length: Int[Array, " t"],
    implementation: str,
) -> Float[Array, "t s2"]:
    """Returns the index scores, bfloat16, of every key of a sequence's pages; -inf at >= length.

    Args:
        query: at the Q4m rounding point.
        weight: BF16 values, the constant included.
        key_codes: all pages of the index cache.
        key_scale: beside them.
        pages: the pages of a sequence in order, one list for each t / n neighbouring rows.
        length: visible keys of every row.
        implementation: of `indexer_logits`.
    """
    from pallas_kernels.indexer_logits.api import indexer_logits

    codes, scale = core.quantize_q4m(query)
    return indexer_logits(
        codes,
        scale,
        weight.astype(jnp.bfloat16),
        key_codes,
        key_scale,
        pages,
        length,
        implementation=implementation,
    )


@partial(jax.jit, static_argnames=("k", "implementation"))
def select_topk(
    scores: Float[Array, "t s"],
    k: int,
    length: Int[Array, " t"],
    inside: Bool[Array, "t s"] | None,
    implementation: str,
) -> Int[Array, "t k"]:
    """Returns the k best visible indices, ascending, -1 padded; ties to the lower index.

    Args:
        scores: BF16 values.
        k: how many.
        length: visible indices of every row.
        inside: indices that may be chosen at all; None for all.
        implementation: of `select_topk`.
    """
    from pallas_kernels.select_topk.api import select_topk as select

    scores = scores.astype(jnp.bfloat16)
    if inside is not None:
        scores = jnp.where(inside, scores, -jnp.inf)
    return select(scores, k, length=length, implementation=implementation)


@partial(jax.jit, static_argnames=("block_size", "topk_blocks", "implementation"))
def select_blocks(
    scores: Float[Array, "t s"],
    length: Int[Array, " t"],
    block_size: int,
    topk_blocks: int,
    implementation: str,
) -> Bool[Array, "t b"]:
    """Returns which blocks of indices are kept; scores are BF16 values, as in `select_topk`."""
    from pallas_kernels.select_topk.api import select_blocks as select

    return select(
        scores.astype(jnp.bfloat16), length, block_size, topk_blocks, implementation=implementation
    )
