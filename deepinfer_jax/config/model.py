"""What a model is: frozen, hashable records with the names of the checkpoint's config.json.

Field meanings and published values: model.md 1.2-1.5 (V4.1) and 10.1 (V4). The records are built
and checked by `config.hf`; a `ModelConfig` is usable as a static argument of `jax.jit`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

#: "training" is "checkpoint" with float32 in the place of codes and the derivative of the identity
#: at every rounding point; no `load` gives it.
NumericsMode = Literal["checkpoint", "float32", "training"]
DeterminismLevel = Literal["off", "run", "batch"]
Replay = Literal["off", "mask", "compact"]
Branches = Literal["data", "static"]
DraftHead = Literal["markov", "rnn", "none"]

#: Rows by which plans grow where all of them are computed at once.
ROW_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN parameters; used only together with `compress_rope_theta` (model.md 3.4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Projections, rotary embedding and cross-layer sharing of attention."""

    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # backbone layers first, then one entry per draft stage
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    use_fp4_sparse_kv: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Lightning indexer and candidate pre-selection (model.md 3.8, 3.9)."""

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None  # None: no candidate restriction
    candidate_topk_blocks: int
    candidate_block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MHCConfig:
    """Residual streams and their mixing (model.md 3.3)."""

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    hc_shifted: bool  # True for V4.1: the input mix comes from the previous sub-layer


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Routed and shared experts (model.md 3.11)."""

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    swiglu_limit: float
    num_hash_layers: int = 0  # V4 only: layers routed by token id


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    """Hashed n-gram tables (model.md 3.10)."""

    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int

    @property
    def columns(self) -> int:
        """Number of table rows looked up per token and layer: orders 2..max times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """DSpark draft stages (model.md 3.12).

    dspark_head: what makes a draft depend on those before it in its block (`model.draft_heads`).
    Released files have no such key: theirs is "markov".
    """

    num_stages: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    dspark_head: DraftHead = "markov"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDraftConfig:
    """Draft stages of a V4 file: counted, never loaded; `dspark` is None in the first release."""

    num_stages: int
    dspark: DraftConfig | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Image encoder (model.md 1.4)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    """How `load` decided to run the model; static, part of every compiled program's identity.

    Made by `load`, which checks its options first and says what it raises.

    Examples:
        >>> model.config.execution.numerics, model.config.execution.kernel("rms_norm_quant")
        ('float32', 'xla')
    """

    numerics: NumericsMode = "float32"
    determinism: DeterminismLevel = "batch"
    kernels: tuple[tuple[str, str], ...] = ()  # operation -> implementation, sorted
    row_tile: int = 8  # rows per tile of the network, or of its products; part of the arithmetic
    # V4.1 prefill past the last KV source (engine.md 4.2): "mask" hides window rows below the floor
    # of their slot, "compact" also skips tiles below it. The floor is state, not configuration.
    replay: Replay = "off"
    # "data": one loop over layers whose roles are data, conditions and loop bounds on data: what no
    # row needs is skipped. "static": layers one by one with known roles, everything computed for
    # every row: a GPU waits for the host at each condition, which costs more than small work. Part
    # of the arithmetic. At "batch" the rows are then tiled product by product.
    branches: Branches = "data"
    mesh: Any = None  # jax.sharding.Mesh with the axes er, dp, cp, tp; None: one device

    @property
    def is_tiled(self) -> bool:
        """Whether the network runs tile by tile of its rows, or on all of them at once."""
        return self.determinism == "batch" and self.branches == "data"

    @property
    def row_step(self) -> int:
        """Rows by which plans grow: those of a tile of the network."""
        return self.row_tile if self.is_tiled else ROW_STEP

    @property
    def on_ascend(self) -> bool:
        """Whether the network runs on an Ascend device, through `backends.AscendModel`."""
        return self.kernel("network") == "ascend"

    def kernel(self, operation: str) -> str:
        """Returns the implementation chosen for an operation, "xla" unless another was named."""
        return dict(self.kernels).get(operation, "xla")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model: dimensions, parts and how it is run. Hashable: a static argument of `jax.jit`.

    Made by `read_config`, `config_from_hf` and `preset`; each says what it raises.

    Examples:
        >>> model.config.hidden_size, model.config.mhc.hc_mult, model.config.draft.num_stages
        (192, 4, 3)
    """

    model_type: Literal["deepseek_v41", "deepseek_v4"]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int | None
    image_token_id: int | None
    dense_block_size: int  # side of the square FP8 scale blocks: 32 (V4.1) or 128 (V4)
    attention: AttentionConfig
    indexer: IndexerConfig
    mhc: MHCConfig
    moe: MoEConfig
    engram: EngramConfig | None
    draft: DraftConfig | None
    vision: VisionConfig | None
    stored_draft: StoredDraftConfig | None = None  # V4 only
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
