"""What a step costs on many devices: bytes, exchanges and the time they allow (parallelism.md 7).

Formulas, not measurements: time is the larger of memory and arithmetic, plus exchanges that nothing
hides. All sizes come from the config.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.model.placement import param_tree
from deepinfer_jax.model.spec import ParamSpec
from deepinfer_jax.model.vision.patches import Grid, vision_of
from sharding.footprint import Footprint
from sharding.mesh import MeshSizes
from sharding.rules import padded

#: Shares of the published rates that are assumed to be reached.
MEMORY_SHARE, ARITHMETIC_SHARE, LINK_SHARE, NETWORK_SHARE = 0.8, 0.5, 0.7, 0.8
#: Busiest over mean rank, after placement by load.
IMBALANCE = 1.2
#: Seconds of one exchange, inside a link domain and across.
LATENCY = (8e-6, 30e-6)
EXCHANGES_PER_LAYER = 2  # there and back


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device: memory in bytes, rates in bytes/s and FP8 operations/s, link domain."""

    name: str
    memory: float
    bandwidth: float
    fp8: float
    link: float
    domain: int
    network: float


HARDWARE: Mapping[str, Hardware] = {
    one.name: one
    for one in (
        Hardware(
            name="H100",
            memory=80e9,
            bandwidth=3.35e12,
            fp8=1.98e15,
            link=450e9,
            domain=8,
            network=50e9,
        ),
        Hardware(
            name="H200",
            memory=141e9,
            bandwidth=4.8e12,
            fp8=1.98e15,
            link=450e9,
            domain=8,
            network=50e9,
        ),
        Hardware(
            name="B200",
            memory=180e9,
            bandwidth=8e12,
            fp8=4.5e15,
            link=900e9,
            domain=8,
            network=50e9,
        ),
        Hardware(
            name="GB200",
            memory=186e9,
            bandwidth=8e12,
            fp8=4.5e15,
            link=900e9,
            domain=64,
            network=100e9,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Of one step on every device: bytes read, operations, bytes received, seconds.

    tokens: rows of one device. inside, outside: bytes received within the link domain and across.
    """

    tokens: int
    weight_bytes: float
    cache_bytes: float
    operations: float
    inside: float
    outside: float
    memory_seconds: float
    arithmetic_seconds: float
    exchange_seconds: float
    latency_seconds: float

    @property
    def seconds(self) -> float:
        """Time of the step."""
        own = max(self.memory_seconds, self.arithmetic_seconds)
        return own + self.exchange_seconds + self.latency_seconds

    @property
    def tokens_per_second(self) -> float:
        """Rows per second of one device."""
        return self.tokens / self.seconds


def decode_cost(
    config: ModelConfig,
    sizes: MeshSizes,
    held: Footprint,
    hardware: Hardware,
    *,
    tokens: int,
    context: int,
    pre_reduced: bool = False,
) -> StepCost:
    """Returns the cost of a step in which every device decodes `tokens` sequences.

    Args:
        config: of the model.
        sizes: of the mesh.
        held: `describe` of its parameters there.
        hardware: of every device.
        tokens: rows of one device.
        context: tokens that each sequence has.
        pre_reduced: answers of one rank are added before they come home: fewer bytes, and bits that
            depend on the placement, so that it exists here only for comparison.
    """
    cache = tokens * cache_bytes_read(config, context)
    return _cost(config, sizes, held, hardware, tokens, context, cache, 0.0, pre_reduced)


def prefill_cost(
    config: ModelConfig,
    sizes: MeshSizes,
    held: Footprint,
    hardware: Hardware,
    *,
    tokens: int,
    pre_reduced: bool = False,
) -> StepCost:
    """Returns the cost of prefilling one prompt of `tokens` tokens on each replica's cp devices."""
    mine = -(-tokens // sizes.cp)
    gathered = (sizes.cp - 1) / sizes.cp * tokens * context_bytes(config)
    # A key is read once for a tile of rows: small beside the products.
    cache = tokens * context_bytes(config)
    return _cost(config, sizes, held, hardware, mine, tokens // 2, cache, gathered, pre_reduced)


def _cost(
    config: ModelConfig,
    sizes: MeshSizes,
    held: Footprint,
    hardware: Hardware,
    tokens: int,
    history: int,
    cache: float,
    gathered: float,
    pre_reduced: bool,
) -> StepCost:
    ranks, layers = sizes.expert_parallel, config.num_hidden_layers
    weights = weight_bytes_read(config, sizes, held, tokens)
    operations = tokens * 2.0 * (active_elements(config) + index_elements(config, history))
    near = (min(ranks, hardware.domain) - 1) / ranks
    far = max(ranks - hardware.domain, 0) / ranks
    moved = exchange_bytes(config, ranks, tokens, pre_reduced=pre_reduced) * layers * IMBALANCE
    inside, outside = moved * near + gathered, moved * far
    exchange = inside / (LINK_SHARE * hardware.link) + outside / (NETWORK_SHARE * hardware.network)
    latency = EXCHANGES_PER_LAYER * layers * LATENCY[1 if far else 0] if ranks > 1 else 0.0
    return StepCost(
        tokens=tokens,
        weight_bytes=weights,
        cache_bytes=cache,
        operations=operations,
        inside=inside,
        outside=outside,
        memory_seconds=(weights + cache) / (MEMORY_SHARE * hardware.bandwidth),
        arithmetic_seconds=operations / (ARITHMETIC_SHARE * hardware.fp8),
        exchange_seconds=exchange,
        latency_seconds=latency,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """Of encoding one image on one device, in BF16: bytes of weights read, operations, seconds.

    tokens: rows it takes in the prompt. The seconds are at the published rates, nothing assumed
    about what share of them is reached.
    """

    patches: int
    tokens: int
    weight_bytes: float
    operations: float
    memory_seconds: float
    arithmetic_seconds: float

    @property
    def seconds(self) -> float:
        """Time of the image."""
        return max(self.memory_seconds, self.arithmetic_seconds)


def image_cost(config: ModelConfig, hardware: Hardware, grid: Grid) -> ImageCost:
    """Returns what one image of so many patches costs; padding and norms are not counted.

    Raises:
        InputError: the model has no image encoder.
    """
    vision, width, out = vision_of(config), vision_of(config).hidden_size, config.hidden_size
    patch, cell = 3 * vision.patch_size**2, width * vision.downsample_ratio**2
    block = 4 * width**2 + 3 * width * vision.intermediate_size
    encoder = width * patch + vision.num_hidden_layers * block
    projector = out * cell + out**2
    count, cells = grid.patches, grid.cell_rows * grid.cell_columns
    pairs = vision.num_hidden_layers * 2 * width * count**2  # scores and their values
    operations = 2.0 * (count * encoder + pairs + cells * projector)
    weights = 2.0 * (encoder + projector)
    return ImageCost(
        patches=count,
        tokens=grid.tokens,
        weight_bytes=weights,
        operations=operations,
        memory_seconds=weights / hardware.bandwidth,
        arithmetic_seconds=operations / (hardware.fp8 / 2),
    )


def distinct_ranks(config: ModelConfig, ranks: int) -> float:
    """Returns on how many ranks the experts of one token lie, in the mean."""
    return ranks * (1 - (1 - 1 / ranks) ** config.moe.num_experts_per_tok)


def exchange_bytes(
    config: ModelConfig, ranks: int, tokens: int, *, pre_reduced: bool = False
) -> float:
    """Returns bytes that a device sends to experts and gets back in one layer, to all ranks.

    A row goes once to every rank that needs it, as FP8 codes, scales, and an id and a weight a
    slot; its answers are BF16, one a slot.
    """
    width, top = config.hidden_size, config.moe.num_experts_per_tok
    reached = distinct_ranks(config, ranks)
    there = reached * (width + width / 32 + 6 * top)
    back = 2 * width * (reached if pre_reduced else top)
    return tokens * (there + back)


def weight_bytes_read(config: ModelConfig, sizes: MeshSizes, held: Footprint, tokens: int) -> float:
    """Returns bytes of weights that one step reads on a device: what is replicated, experts hit."""
    # Read by row, or not by the backbone.
    idle = sum(
        leaf.device
        for leaf in held.leaves
        if {"embed", "tables", "draft", "vision"} & set(leaf.name.split("."))
    )
    draft_experts = sum(
        leaf.device for leaf in held.leaves if {"draft", "experts"} <= set(leaf.name.split("."))
    )
    experts = held.matching("experts")[0] - draft_experts
    slots = padded(config.moe.n_routed_experts, sizes.expert_parallel)
    share = config.moe.num_experts_per_tok / slots
    hit = 1 - (1 - share) ** (tokens * sizes.expert_parallel)
    return held.device - idle - experts + hit * experts


def active_elements(config: ModelConfig) -> float:
    """Returns the weights that one token of the backbone multiplies with, the head included."""
    flat = jax.tree_util.tree_flatten_with_path(
        param_tree(config), is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )[0]
    share = config.moe.num_experts_per_tok / config.moe.n_routed_experts
    total = 0.0
    for path, spec in flat:
        parts = set(jax.tree_util.keystr(path, simple=True, separator=".").split("."))
        if not {"embed", "tables", "draft", "vision"} & parts:
            count = len(spec.names) * prod(spec.shape)
            total += count * (share if "experts" in parts else 1.0)
    return total


def index_elements(config: ModelConfig, context: int) -> float:
    """Returns products of one token with the index keys that it scores, over all layers."""
    heads, dim = config.indexer.index_n_heads, config.indexer.index_head_dim
    return heads * dim * scored_keys(config, context)


def scored_keys(config: ModelConfig, context: int) -> float:
    """Returns the index keys that one token scores, over all layers."""
    indexer, keys = config.indexer, 0.0
    for role in layer_roles(config):
        if role.topk_source != role.layer:
            continue
        pool = context / role.ratio
        if role.uses_candidates and role.mode == "reindex":
            pool = min(pool, indexer.candidate_topk_blocks * indexer.candidate_block_size)
        keys += pool
    return keys


def cache_bytes_read(config: ModelConfig, context: int) -> float:
    """Returns bytes of the cache that one decoded token reads: windows, selected rows, keys."""
    attention, indexer = config.attention, config.indexer
    window = config.num_hidden_layers * attention.sliding_window * _window_bytes(config)
    layers = sum(1 for role in layer_roles(config) if role.ratio)
    selected = layers * min(indexer.index_topk, context) * _main_bytes(config)
    return window + selected + _key_bytes(config) * scored_keys(config, context)


def context_bytes(config: ModelConfig) -> float:
    """Returns bytes of a prompt token that context ranks exchange: window rows, compressed rows.

    As gathered: quantised window rows of every layer, and BF16 latents of the compressed rows.
    """
    latents = sum(
        2 * config.attention.head_dim / role.ratio
        for role in layer_roles(config)
        if role.ratio and role.kv_source == role.layer
    )
    return config.num_hidden_layers * _window_bytes(config) + latents


def _window_bytes(config: ModelConfig) -> int:
    return config.attention.head_dim + config.attention.head_dim // 32


def _main_bytes(config: ModelConfig) -> int:
    dim = config.attention.head_dim
    return dim // 2 + dim // 16 if config.attention.use_fp4_sparse_kv else _window_bytes(config)


def _key_bytes(config: ModelConfig) -> int:
    return config.indexer.index_head_dim // 2 + config.indexer.index_head_dim // 32
