"""Parameter records of DeepSeek-V4.1 and the spec tree that names every tensor (model.md 2).

Tensors of equal role are stacked over their layers, so that the network can scan over them. The
same records hold specs, shardings or arrays. Leaf names are the checkpoint's.
"""

from typing import Any

import jax
from flax import struct

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import index_layers, source_layers, source_ratios
from deepinfer_jax.model.spec import ParamSpec, TensorStack, plain_spec

Leaf = Any  # jax.Array, QuantArray, EngramTable or ParamSpec


@struct.dataclass
class MHCParams:
    """Mixing of the residual streams: fn [.., 24, m*d], base [.., 24], scale [.., 3]; float32."""

    fn: Leaf
    base: Leaf
    scale: Leaf


@struct.dataclass
class ExpertParams:
    """SwiGLU weights: w1 (gate) and w3 (up) [.., f, d], w2 (down) [.., d, f]."""

    w1: Leaf
    w3: Leaf
    w2: Leaf


@struct.dataclass
class ReplicaMaps:
    """Where the copies of an expert lie (parallelism.md 4.1): operands, never constants.

    slots: int32 [.., e, most], places among the stacked experts. count: int32 [.., e].
    """

    slots: Leaf
    count: Leaf


@struct.dataclass
class LayerParams:
    """What every layer and every draft stage owns, stacked over layers."""

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
    gate_bias: Leaf
    gate_bias_vl: Leaf
    experts: Leaf  # ExpertParams; None while one layer is taken out of the stack
    shared: ExpertParams
    hc_attn: MHCParams
    hc_ffn: MHCParams
    replicas: Leaf = None  # ReplicaMaps; None: expert e lies in place e


@struct.dataclass
class CompressorParams:
    """Compressed rows and index keys, stacked over one ratio's sources; no wgate at ratio 1."""

    wkv: Leaf
    wgate: Leaf | None
    norm: Leaf
    index_wk: Leaf
    index_k_norm: Leaf


@struct.dataclass
class IndexerParams:
    """Query side of the indexer, stacked over the index source layers."""

    wq_b: Leaf
    weights_proj: Leaf


@struct.dataclass
class EngramParams:
    """Hashed n-gram memory: one table per Engram layer, the other leaves stacked over them."""

    tables: tuple[Leaf, ...]
    wkv: Leaf
    q_weight: Leaf
    k_weight: Leaf
    token_map: Any = struct.field(
        pytree_node=False, default=None
    )  # engram.vocabulary.TokenMap, set by load


@struct.dataclass
class DraftParams:
    """DSpark stages and heads.

    markov_embed, markov_head [v, r]: W1 and W2 of engine.md 3.2, None with the head "none".
    rnn_joint [3 r, 2 r + d]: None unless the head is "rnn". confidence [1, d + r]; r = 0 with the
    head "none".
    """

    stages: LayerParams
    main_proj: Leaf
    main_norm: Leaf
    norm: Leaf
    markov_embed: Leaf
    markov_head: Leaf
    rnn_joint: Leaf
    confidence: Leaf


@struct.dataclass
class VisionBlockParams:
    """Blocks of the image encoder, stacked."""

    norm1: Leaf
    norm2: Leaf
    wqkv: Leaf
    wqkv_bias: Leaf
    wo: Leaf
    wo_bias: Leaf
    w1: Leaf
    w2: Leaf


@struct.dataclass
class VisionParams:
    """Image encoder, projector and the three image vectors."""

    patch_proj: Leaf
    patch_bias: Leaf
    blocks: VisionBlockParams
    norm: Leaf
    aligner_w1: Leaf
    aligner_b1: Leaf
    aligner_w2: Leaf
    aligner_b2: Leaf
    image_start: Leaf
    image_end: Leaf
    image_newline: Leaf


@struct.dataclass
class Params:
    """All parameters of one V4.1 model. `compressors` follows `roles.source_ratios`."""

    embed: Leaf
    norm: Leaf
    head: Leaf
    layers: LayerParams
    compressors: tuple[CompressorParams, ...]
    indexers: IndexerParams
    engram: EngramParams | None
    draft: DraftParams | None
    vision: VisionParams | None


def param_specs(config: ModelConfig) -> Params:
    """Returns the spec tree of a V4.1 config; 96,085 tensors when released (model.md 2.5)."""
    width, vocab = config.hidden_size, config.vocab_size
    layers = tuple(f"layers.{layer}" for layer in range(config.num_hidden_layers))
    return Params(
        embed=plain_spec("embed.weight", (vocab, width), ("vocab", "embed")),
        norm=plain_spec("norm.weight", (width,), ("embed",)),
        head=plain_spec("head.weight", (vocab, width), ("vocab", "embed")),
        layers=layer_specs(config, layers, config.moe.n_routed_experts),
        compressors=tuple(_compressor_specs(config, ratio) for ratio in source_ratios(config)),
        indexers=_indexer_specs(config),
        engram=_engram_specs(config),
        draft=_draft_specs(config),
        vision=_vision_specs(config),
    )


def layer_specs(config: ModelConfig, prefixes: tuple[str, ...], num_experts: int) -> LayerParams:
    """Returns the specs of what every layer owns, for the layers named by `prefixes`."""
    attention, width, inner = config.attention, config.hidden_size, config.moe.moe_intermediate_size
    heads, head_dim = attention.num_attention_heads, attention.head_dim
    q_rank, groups, o_rank = attention.q_lora_rank, attention.o_groups, attention.o_lora_rank
    mixes = config.mhc.hc_mult * (2 + config.mhc.hc_mult)
    stack = TensorStack(prefixes, config.dense_block_size)

    def mhc(kind: str) -> MHCParams:
        return MHCParams(
            fn=stack.plain(
                f"hc_{kind}_fn", (mixes, config.mhc.hc_mult * width), (None, None), "F32"
            ),
            base=stack.plain(f"hc_{kind}_base", (mixes,), (None,), "F32"),
            scale=stack.plain(f"hc_{kind}_scale", (3,), (None,), "F32"),
        )

    return LayerParams(
        attn_norm=stack.plain("attn_norm.weight", (width,), ("embed",)),
        ffn_norm=stack.plain("ffn_norm.weight", (width,), ("embed",)),
        wq_a=stack.fp8("attn.wq_a", (q_rank, width), ("q_rank", "embed")),
        q_norm=stack.plain("attn.q_norm.weight", (q_rank,), ("q_rank",)),
        wq_b=stack.fp8("attn.wq_b", (heads * head_dim, q_rank), ("heads", "q_rank")),
        wkv=stack.fp8("attn.wkv", (head_dim, width), ("latent", "embed")),
        kv_norm=stack.plain("attn.kv_norm.weight", (head_dim,), ("latent",)),
        attn_sink=stack.plain("attn.attn_sink", (heads,), ("heads",), "F32"),
        wo_a=stack.fp8(
            "attn.wo_a",
            (groups * o_rank, heads // groups * head_dim),
            ("o_groups", None),
            load_as_bf16=True,
        ),
        wo_b=stack.fp8("attn.wo_b", (width, groups * o_rank), ("embed", "o_groups")),
        gate=stack.plain("ffn.gate.weight", (num_experts, width), (None, "embed")),
        gate_bias=stack.plain("ffn.gate.bias", (num_experts,), (None,), "F32"),
        gate_bias_vl=stack.plain("ffn.gate.bias_vl", (num_experts,), (None,), "F32"),
        experts=ExpertParams(
            w1=stack.experts(num_experts, "w1", (inner, width), ("expert_width", "embed")),
            w3=stack.experts(num_experts, "w3", (inner, width), ("expert_width", "embed")),
            w2=stack.experts(num_experts, "w2", (width, inner), ("embed", "expert_width")),
        ),
        shared=ExpertParams(
            w1=stack.fp8("ffn.shared_experts.w1", (inner, width), ("expert_width", "embed")),
            w3=stack.fp8("ffn.shared_experts.w3", (inner, width), ("expert_width", "embed")),
            w2=stack.fp8("ffn.shared_experts.w2", (width, inner), ("embed", "expert_width")),
        ),
        hc_attn=mhc("attn"),
        hc_ffn=mhc("ffn"),
    )


def _compressor_specs(config: ModelConfig, ratio: int) -> CompressorParams:
    prefixes = tuple(f"layers.{layer}.attn" for layer in source_layers(config, ratio))
    stack = TensorStack(prefixes, config.dense_block_size)
    dim, index_dim, width = (
        config.attention.head_dim,
        config.indexer.index_head_dim,
        config.hidden_size,
    )
    return CompressorParams(
        wkv=stack.plain("compressor.wkv.weight", (dim, width), ("latent", "embed")),
        wgate=stack.plain("compressor.wgate.weight", (dim, width), ("latent", "embed"))
        if ratio > 1
        else None,
        norm=stack.plain("compressor.norm.weight", (dim,), ("latent",)),
        index_wk=stack.plain("indexer.wk.weight", (index_dim, dim), (None, "latent")),
        index_k_norm=stack.plain("indexer.k_norm.weight", (index_dim,), (None,)),
    )


def _indexer_specs(config: ModelConfig) -> IndexerParams:
    prefixes = tuple(f"layers.{layer}.attn.indexer" for layer in index_layers(config))
    stack = TensorStack(prefixes, config.dense_block_size)
    indexer, rank = config.indexer, config.attention.q_lora_rank
    return IndexerParams(
        wq_b=stack.fp8(
            "wq_b",
            (indexer.index_n_heads * indexer.index_head_dim, rank),
            ("index_heads", "q_rank"),
        ),
        weights_proj=stack.plain(
            "weights_proj.weight",
            (indexer.index_n_heads, config.hidden_size),
            ("index_heads", "embed"),
        ),
    )


def _engram_specs(config: ModelConfig) -> EngramParams | None:
    engram = config.engram
    if engram is None:
        return None
    width, streams = config.hidden_size, config.mhc.hc_mult
    stack = TensorStack(
        tuple(f"layers.{layer}.engram" for layer in engram.engram_layer_ids),
        config.dense_block_size,
    )
    tables = tuple(
        ParamSpec(
            names=(f"layers.{layer}.engram.embed.weight",),
            shape=(rows, engram.engram_head_dim),
            dtype="F8_E4M3",
            axes=("engram_rows", None),
            format="fp8_row32",
        )
        for layer, rows in zip(engram.engram_layer_ids, engram.engram_num_embeddings, strict=True)
    )
    return EngramParams(
        tables=tables,
        wkv=stack.fp8(
            "wkv", ((streams + 1) * width, engram.columns * engram.engram_head_dim), (None, None)
        ),
        q_weight=stack.plain("q_weight", (streams, width), (None, "embed")),
        k_weight=stack.plain("k_weight", (streams, width), (None, "embed")),
    )


def _draft_specs(config: ModelConfig) -> DraftParams | None:
    draft = config.draft
    if draft is None:
        return None
    width, head = config.hidden_size, draft.dspark_head
    rank = 0 if head == "none" else draft.dspark_markov_rank
    first, last = "mtp.0", f"mtp.{draft.num_stages - 1}"
    taps = len(draft.dspark_target_layer_ids)
    prefixes = tuple(f"mtp.{stage}" for stage in range(draft.num_stages))
    main_proj = ParamSpec(
        names=(f"{first}.main_proj.weight",),
        shape=(width, taps * width),
        dtype="F8_E4M3",
        axes=("embed", None),
        format="fp8_block32",
    )

    def table(name: str) -> ParamSpec | None:
        if head == "none":
            return None
        full = f"{last}.markov_head.{name}.weight"
        return plain_spec(full, (config.vocab_size, rank), ("vocab", None))

    # A name of this package: released files have no recurrent head.
    joint = plain_spec(f"{last}.rnn_head.joint.weight", (3 * rank, 2 * rank + width), (None, None))
    return DraftParams(
        stages=layer_specs(config, prefixes, draft.dspark_n_routed_experts),
        main_proj=main_proj,
        main_norm=plain_spec(f"{first}.main_norm.weight", (width,), ("embed",)),
        norm=plain_spec(f"{last}.norm.weight", (width,), ("embed",)),
        markov_embed=table("embed"),
        markov_head=table("head"),
        rnn_joint=joint if head == "rnn" else None,
        confidence=plain_spec(
            f"{last}.confidence_head.proj.weight", (1, width + rank), (None, None)
        ),
    )


def _vision_specs(config: ModelConfig) -> VisionParams | None:
    vision = config.vision
    if vision is None:
        return None
    width, inner, out = vision.hidden_size, vision.intermediate_size, config.hidden_size
    patch, cells = 3 * vision.patch_size**2, width * vision.downsample_ratio**2
    stack = TensorStack(
        tuple(f"vision.blocks.{block}" for block in range(vision.num_hidden_layers)), 32
    )
    return VisionParams(
        patch_proj=plain_spec("vision.patch_embed.proj.weight", (width, patch), (None, None)),
        patch_bias=plain_spec("vision.patch_embed.proj.bias", (width,), (None,)),
        blocks=VisionBlockParams(
            norm1=stack.plain("norm1.weight", (width,), (None,)),
            norm2=stack.plain("norm2.weight", (width,), (None,)),
            wqkv=stack.plain("attn.wqkv.weight", (3 * width, width), (None, None)),
            wqkv_bias=stack.plain("attn.wqkv.bias", (3 * width,), (None,)),
            wo=stack.plain("attn.wo.weight", (width, width), (None, None)),
            wo_bias=stack.plain("attn.wo.bias", (width,), (None,)),
            w1=stack.plain("mlp.w1.weight", (2 * inner, width), (None, None)),
            w2=stack.plain("mlp.w2.weight", (width, inner), (None, None)),
        ),
        norm=plain_spec("vision.norm.weight", (width,), (None,)),
        aligner_w1=plain_spec("aligner.w1.weight", (out, cells), ("embed", None)),
        aligner_b1=plain_spec("aligner.w1.bias", (out,), ("embed",)),
        aligner_w2=plain_spec("aligner.w2.weight", (out, out), ("embed", None)),
        aligner_b2=plain_spec("aligner.w2.bias", (out,), ("embed",)),
        image_start=plain_spec("image_start", (out,), ("embed",)),
        image_end=plain_spec("image_end", (out,), ("embed",)),
        image_newline=plain_spec("image_newline", (out,), ("embed",)),
    )


def same_form(a: Any, b: Any) -> bool:
    """Says whether two trees have the same structure, shapes and dtypes."""
    first, second = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (a, b))
    return first == second
