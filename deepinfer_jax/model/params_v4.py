"""Parameter records of DeepSeek-V4 and the spec tree that names every tensor (model.md 10.3).

As in `params`, tensors of equal role are stacked over the layers that own them: what every layer
has over all layers, compressors over the layers of one ratio, router data over hash-routed and
scored layers.
"""

from flax import struct

from deepinfer_jax.config.model import DraftConfig, ModelConfig
from deepinfer_jax.config.roles import index_layers, layer_roles, source_layers, source_ratios
from deepinfer_jax.model.params import (
    ExpertParams,
    Leaf,
    MHCParams,
    layer_specs,
)
from deepinfer_jax.model.spec import ParamSpec, TensorStack, plain_spec


@struct.dataclass
class V4LayerParams:
    """What every layer owns, stacked over all layers; names and shapes as in V4.1."""

    attn_norm: Leaf
    ffn_norm: Leaf
    wq_a: Leaf
    q_norm: Leaf
    wq_b: Leaf
    wkv: Leaf
    kv_norm: Leaf
    attn_sink: Leaf
    wo_a: Leaf
    wo_b: Leaf
    gate: Leaf
    experts: Leaf  # ExpertParams; None while one layer is taken out of the stack
    shared: ExpertParams
    hc_attn: MHCParams
    hc_ffn: MHCParams


@struct.dataclass
class V4CompressorParams:
    """Pooling of keys over one ratio, stacked over its layers; at ratio 4 both halves."""

    wkv: Leaf
    wgate: Leaf
    ape: Leaf
    norm: Leaf


@struct.dataclass
class V4IndexerParams:
    """Query side of the indexer and its own compressor, stacked over the ratio-4 layers."""

    wq_b: Leaf
    weights_proj: Leaf
    compressor: V4CompressorParams


@struct.dataclass
class V4Params:
    """All loaded parameters of one V4 model.

    `gate_bias` is stacked over the scored layers, `tid2eid` over the hash-routed ones (None without
    such layers); `compressors` follows `roles.source_ratios`.
    """

    embed: Leaf
    norm: Leaf
    head: Leaf
    hc_head: MHCParams
    layers: V4LayerParams
    gate_bias: Leaf | None
    tid2eid: Leaf | None
    compressors: tuple[V4CompressorParams, ...]
    indexers: V4IndexerParams | None


def param_specs_v4(config: ModelConfig) -> V4Params:
    """Returns the spec tree of a V4 config, without the stored draft stages."""
    width, vocab = config.hidden_size, config.vocab_size
    prefixes = tuple(f"layers.{layer}" for layer in range(config.num_hidden_layers))
    roles = layer_roles(config)
    hashed = tuple(f"layers.{role.layer}.ffn.gate" for role in roles if role.hash_routed)
    scored = tuple(f"layers.{role.layer}.ffn.gate" for role in roles if not role.hash_routed)
    return V4Params(
        embed=plain_spec("embed.weight", (vocab, width), ("vocab", "embed")),
        norm=plain_spec("norm.weight", (width,), ("embed",)),
        head=plain_spec("head.weight", (vocab, width), ("vocab", "embed")),
        hc_head=_hc_head_specs(config, ""),
        layers=_v4_layer_specs(config, prefixes),
        gate_bias=_gate_bias_specs(config, scored) if scored else None,
        tid2eid=_tid2eid_specs(config, hashed) if hashed else None,
        compressors=tuple(_compressor_specs(config, ratio) for ratio in source_ratios(config)),
        indexers=_indexer_specs(config) if index_layers(config) else None,
    )


def stored_draft_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Returns the specs of a V4 file's draft stages: recognised and counted, never loaded."""
    stored = config.stored_draft
    if stored is None:
        return ()
    prefixes = tuple(f"mtp.{stage}" for stage in range(stored.num_stages))
    layers = _v4_layer_specs(config, prefixes)
    gates = _gate_bias_specs(config, tuple(f"{prefix}.ffn.gate" for prefix in prefixes))
    heads = _hc_head_specs(config, f"{prefixes[-1]}.")
    common = (*_leaves(layers), gates, heads.fn, heads.base, heads.scale)
    if stored.dspark is None:
        return (*common, *_plain_draft_specs(config, prefixes))
    return (*common, *_dspark_specs(config, stored.dspark, prefixes))


def _leaves(layers: V4LayerParams) -> tuple[ParamSpec, ...]:
    nested = (layers.experts, layers.shared, layers.hc_attn, layers.hc_ffn)
    own = [value for value in vars(layers).values() if isinstance(value, ParamSpec)]
    return (*own, *(leaf for record in nested for leaf in vars(record).values()))


def _v4_layer_specs(config: ModelConfig, prefixes: tuple[str, ...]) -> V4LayerParams:
    shared = vars(layer_specs(config, prefixes, config.moe.n_routed_experts))
    names = V4LayerParams.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    return V4LayerParams(**{name: shared[name] for name in names})


def _gate_bias_specs(config: ModelConfig, gates: tuple[str, ...]) -> ParamSpec:
    stack = TensorStack(gates, config.dense_block_size)
    return stack.plain("bias", (config.moe.n_routed_experts,), (None,), "F32")


def _tid2eid_specs(config: ModelConfig, gates: tuple[str, ...]) -> ParamSpec:
    stack = TensorStack(gates, config.dense_block_size)
    shape = (config.vocab_size, config.moe.num_experts_per_tok)
    return stack.plain("tid2eid", shape, ("vocab", None), "I64")


def _hc_head_specs(config: ModelConfig, prefix: str) -> MHCParams:
    streams, width = config.mhc.hc_mult, config.hidden_size
    return MHCParams(
        fn=plain_spec(f"{prefix}hc_head_fn", (streams, streams * width), (None, None), "F32"),
        base=plain_spec(f"{prefix}hc_head_base", (streams,), (None,), "F32"),
        scale=plain_spec(f"{prefix}hc_head_scale", (1,), (None,), "F32"),
    )


def _compressor_specs(config: ModelConfig, ratio: int) -> V4CompressorParams:
    prefixes = tuple(f"layers.{layer}.attn.compressor" for layer in source_layers(config, ratio))
    return _pool_specs(config, prefixes, ratio, config.attention.head_dim)


def _pool_specs(
    config: ModelConfig, prefixes: tuple[str, ...], ratio: int, dim: int
) -> V4CompressorParams:
    stack = TensorStack(prefixes, config.dense_block_size)
    pooled = 2 * dim if ratio == 4 else dim  # ratio 4 pools overlapping windows: two halves
    return V4CompressorParams(
        wkv=stack.plain("wkv.weight", (pooled, config.hidden_size), ("latent", "embed")),
        wgate=stack.plain("wgate.weight", (pooled, config.hidden_size), ("latent", "embed")),
        ape=stack.plain("ape", (ratio, pooled), (None, "latent"), "F32"),
        norm=stack.plain("norm.weight", (dim,), ("latent",)),
    )


def _indexer_specs(config: ModelConfig) -> V4IndexerParams:
    prefixes = tuple(f"layers.{layer}.attn.indexer" for layer in index_layers(config))
    stack = TensorStack(prefixes, config.dense_block_size)
    indexer, rank = config.indexer, config.attention.q_lora_rank
    rows = indexer.index_n_heads * indexer.index_head_dim
    shape = (indexer.index_n_heads, config.hidden_size)
    return V4IndexerParams(
        wq_b=stack.fp8("wq_b", (rows, rank), ("index_heads", "q_rank")),
        weights_proj=stack.plain("weights_proj.weight", shape, ("index_heads", "embed")),
        compressor=_pool_specs(
            config, tuple(f"{p}.compressor" for p in prefixes), 4, indexer.index_head_dim
        ),
    )


def _plain_draft_specs(config: ModelConfig, prefixes: tuple[str, ...]) -> tuple[ParamSpec, ...]:
    stack, width = TensorStack(prefixes, config.dense_block_size), config.hidden_size
    projections = tuple(
        stack.fp8(name, (width, width), ("embed", "embed")) for name in ("e_proj", "h_proj")
    )
    norms = tuple(
        stack.plain(f"{name}.weight", (width,), ("embed",)) for name in ("enorm", "hnorm", "norm")
    )
    return (*projections, *norms)


def _dspark_specs(
    config: ModelConfig, draft: DraftConfig, prefixes: tuple[str, ...]
) -> tuple[ParamSpec, ...]:
    width, rank, taps = config.hidden_size, draft.dspark_markov_rank, draft.dspark_target_layer_ids
    first, last = prefixes[0], prefixes[-1]
    markov = tuple(
        plain_spec(f"{last}.markov_head.{name}.weight", (config.vocab_size, rank), ("vocab", None))
        for name in ("markov_w1", "markov_w2")
    )
    main = TensorStack((first,), config.dense_block_size)
    return (
        main.fp8("main_proj", (width, len(taps) * width), ("embed", None)),
        plain_spec(f"{first}.main_norm.weight", (width,), ("embed",)),
        plain_spec(f"{last}.norm.weight", (width,), ("embed",)),
        *markov,
        plain_spec(f"{last}.confidence_head.proj.weight", (1, width + rank), (None, None)),
    )
