"""Projections into and out of attention (model.md 3.5, 3.6)."""

from jax import Array
from jaxtyping import Float

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import LayerParams
from deepinfer_jax.model.rope import apply_rope
from deepinfer_jax.numerics.ops import Ops

Rope = tuple[Float[Array, "t r2"], Float[Array, "t r2"]]  # cos, sin of every row's position


def query_latent(
    ops: Ops, config: ModelConfig, layer: LayerParams, v: Float[Array, "t d"]
) -> Float[Array, "t q"]:
    """Returns the normed query latent, shared by attention and indexer."""
    return ops.norm(
        ops.bf16(ops.contract(ops.q8(v), layer.wq_a)), layer.q_norm, config.rms_norm_eps
    )


def queries(
    ops: Ops, config: ModelConfig, layer: LayerParams, latent: Float[Array, "t q"], rope: Rope
) -> Float[Array, "t h c"]:
    """Returns rotated queries of every head; V4.1 has no per-head norm."""
    q = ops.bf16(ops.contract(ops.q8(latent), layer.wq_b))
    q = q.reshape(q.shape[0], config.attention.num_attention_heads, config.attention.head_dim)
    return ops.bf16(apply_rope(q, *rope))


def window_key(
    ops: Ops, config: ModelConfig, layer: LayerParams, v: Float[Array, "t d"], rope: Rope
) -> Float[Array, "t c"]:
    """Returns the rotated window key, which is also the value; quantised when it is stored."""
    k = ops.norm(ops.bf16(ops.contract(ops.q8(v), layer.wkv)), layer.kv_norm, config.rms_norm_eps)
    return ops.bf16(apply_rope(k, *rope))


def output(
    ops: Ops, config: ModelConfig, layer: LayerParams, o: Float[Array, "t h c"], rope: Rope
) -> Float[Array, "t d"]:
    """Returns the sub-layer output: inverse rotation, grouped product, second product.

    By default `o` is not quantised and `wo_a` is a BF16 weight (model.md 9.1). The variant
    `output_projection="fp8"` is the GPU form of DeepInfer: `o` goes through Q8, and the product of
    the groups is quantised straight from its float32 sum. Its weights have the same values.
    """
    groups = config.attention.o_groups
    o = ops.bf16(apply_rope(ops.bf16(o), *rope, inverse=True))
    grouped = o.reshape(o.shape[0], groups, -1)
    weight = layer.wo_a.reshape(groups, -1, layer.wo_a.shape[-1])
    if config.execution.kernel("output_projection") == "fp8":
        low_rank = ops.contract_grouped(ops.q8(grouped), weight)
    else:
        low_rank = ops.bf16(ops.contract_grouped(grouped, weight))
    return ops.bf16(ops.contract(ops.q8(low_rank.reshape(o.shape[0], -1)), layer.wo_b))
