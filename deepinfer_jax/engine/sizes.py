"""How large the engine's plans and its cache are."""

from dataclasses import replace

import jax

from deepinfer_jax.cache.capacity import Capacity, blocks_for, plan_capacity
from deepinfer_jax.cache.hit import hit_rule
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import ROLLBACK, RuntimeConfig
from deepinfer_jax.engine.images import pool_bytes, pool_rows
from deepinfer_jax.engine.layout import PlanLayout
from deepinfer_jax.engine.plan import Limits
from deepinfer_jax.model.share import rows_before_read
from deepinfer_jax.model.step import plan_length

#: Rows of the smallest plan where programs are few: those of a GPU take long to compile, and fewer
#: rows save it no time.
STATIC_ROWS = 64
CPU_CACHE_BYTES = 2**30
GPU_CACHE_SHARE = 0.8
#: No bound: an Ascend device has room for the longest sequence of every slot, or raises at once.
ASCEND_CACHE_BYTES = 2**62


def plan_layouts(
    config: ModelConfig, runtime: RuntimeConfig, capacity: Capacity, drafts: int
) -> tuple[PlanLayout, ...]:
    """Returns the layouts of plans, by rows: one where tiles beyond the count are not computed.

    Otherwise all rows of a plan are, so there is one per power of four. The host of a GPU waits for
    every condition on the device, so drafting is not one: its steps without are programs apart
    (`PlanLayout.without_drafting`).
    """
    tile = config.execution.row_step
    most = _most_rows(config, runtime, drafts)
    is_static = config.execution.branches == "static"
    sizes = [most]
    if not config.execution.is_tiled:
        size = plan_length(STATIC_ROWS if is_static else 1, tile)
        sizes = []
        while size < most:
            sizes.append(size)
            size *= 4
        sizes.append(most)
    deltas = capacity.layout.max_blocks + most // runtime.block_tokens + 2 * runtime.max_seqs + 64
    return tuple(
        PlanLayout(
            rows=size,
            slots=runtime.max_seqs,
            deltas=deltas,
            stop_ids=runtime.max_stop_ids,
            drafts=drafts,
            image_rows=pool_rows(config, runtime),
            makes_drafts=True if is_static and drafts else None,
            counts_experts=runtime.rebalance_steps is not None,
        )
        for size in sizes
    )


def _most_rows(config: ModelConfig, runtime: RuntimeConfig, drafts: int) -> int:
    """Returns the rows of the longest plan: all rounds with all drafts, and a prompt row.

    Or a whole image in place of that row.
    """
    rounds = runtime.max_seqs * (drafts + 1)
    least = 1 if config.vision is None else config.vision.max_image_tokens
    return plan_length(max(runtime.max_tokens_per_step, rounds + least), config.execution.row_step)


def engine_limits(
    config: ModelConfig, runtime: RuntimeConfig, capacity: Capacity, drafts: int
) -> Limits:
    """Returns what scheduling obeys."""
    return Limits(
        layouts=plan_layouts(config, runtime, capacity, drafts),
        budget=runtime.max_tokens_per_step,
        row_step=config.execution.row_step,
        depth=runtime.async_depth,
        prefix_cache=runtime.prefix_cache,
        eos=config.eos_token_id,
        rule=hit_rule(
            config,
            block_tokens=runtime.block_tokens,
            replay=runtime.replay,
            keep_tokens=runtime.replay_keep_tokens,
            restore=runtime.prefix_restore,
            rollback=ROLLBACK,
        ),
    )


def engine_capacity(config: ModelConfig, runtime: RuntimeConfig, drafts: int) -> Capacity:
    """Returns slots and blocks for the budget, at most what all sequences at full length need.

    Raises:
        CapacityError: the budget holds less than one longest sequence.
    """
    tile = rows_before_read(config.execution)
    if not config.execution.is_tiled:
        tile = _most_rows(config, runtime, drafts)
    device = jax.devices()[0]
    budget = ASCEND_CACHE_BYTES if config.execution.on_ascend else runtime.cache_bytes
    if budget is None:
        found = device.memory_stats() if device.platform != "cpu" else None
        free = found["bytes_limit"] - found["bytes_in_use"] if found else None
        budget = CPU_CACHE_BYTES if free is None else int(GPU_CACHE_SHARE * free)
    capacity = plan_capacity(
        config,
        budget,
        max_seqs=runtime.max_seqs,
        max_len=runtime.longest(config),
        block_tokens=runtime.block_tokens,
        row_tile=tile,
        rollback=ROLLBACK,
        image_bytes=pool_bytes(config, pool_rows(config, runtime)),
    )
    most = _most_blocks(runtime, capacity.layout.max_blocks, drafts)
    if runtime.cache_bytes is not None or capacity.layout.num_blocks <= most:
        return capacity
    layout = replace(capacity.layout, num_blocks=most)
    return replace(capacity, layout=layout)


def _most_blocks(runtime: RuntimeConfig, max_blocks: int, drafts: int) -> int:
    """Returns the blocks with which `max_seqs` sequences of any length run together.

    Those they fill, the null block, and what admission of the last one leaves for the others.
    """
    ahead = blocks_for((runtime.async_depth + 1) * (drafts + 1), runtime.block_tokens)
    filled = 1 + runtime.max_seqs * max_blocks + (runtime.max_seqs - 1) * ahead
    return filled + filled // 99 + 1  # 1 % of all, rounded up, see `reserved_blocks`
