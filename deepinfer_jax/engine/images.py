"""Where the encoded rows of images lie on the device, and which step encodes them.

An image is encoded ahead of the step that runs its rows, all of which run in that one step: chunks
end before an image or behind it. Once that step is dispatched the rows may be overwritten, since
the device does one thing after the other. They stay until their place is needed: a request that was
preempted, or another one with the same image, may find them.
"""

from collections import OrderedDict
from collections.abc import Sequence as Items
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.prompt import PromptImage
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.errors import CacheError


def pool_rows(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """Returns the rows of the pool on the device: those of a step, or of one largest image.

    0 for a model without an image encoder.
    """
    if config.vision is None:
        return 0
    return max(runtime.max_tokens_per_step, config.vision.max_image_tokens)


def empty_pool(config: ModelConfig, rows: int) -> Float[Array, "n d"] | None:
    """Returns zeroed rows, in BF16 where encoded rows have its values; None without rows."""
    dtype = jnp.bfloat16 if config.execution.numerics == "checkpoint" else jnp.float32
    return jnp.zeros((rows, config.hidden_size), dtype) if rows else None


def pool_bytes(config: ModelConfig, rows: int) -> int:
    """Returns the bytes of `empty_pool`; allocates nothing."""
    pool = jax.eval_shape(partial(empty_pool, config, rows))
    return 0 if pool is None else pool.size * pool.dtype.itemsize


@partial(jax.jit, donate_argnames="pool")
def put_rows(
    pool: Float[Array, "n d"], rows: Float[Array, "t d"], target: Int[Array, " t"]
) -> Float[Array, "n d"]:
    """Returns the pool with rows in the places `target`; places outside it are dropped."""
    return pool.at[target].set(rows.astype(pool.dtype), mode="drop")


class ImagePool:
    """Who has which rows of the pool. Host integers only."""

    def __init__(self, rows: int) -> None:
        """Starts with all rows free."""
        self.rows = rows
        self._free: list[int] = []
        self._held: OrderedDict[bytes, np.ndarray] = OrderedDict()  # least recently used first
        self._needed: set[bytes] = set()
        self.clear()

    def begin_step(self) -> None:
        """Lets every image give way that the steps before needed."""
        self._needed.clear()

    def place(self, image: PromptImage) -> tuple[np.ndarray, bool] | None:
        """Returns (rows of an image, whether it must be encoded into them), for this step.

        None if the images of this step leave no room.
        """
        digest, count = image.span.digest, image.span.length
        if digest in self._held:
            self._held.move_to_end(digest)
            self._needed.add(digest)
            return self._held[digest], False
        pinned = sum(len(self._held[one]) for one in self._needed)
        if count > self.rows - pinned:
            return None
        while len(self._free) < count:
            oldest = next(one for one in self._held if one not in self._needed)
            self._free += self._held.pop(oldest).tolist()
        rows = np.asarray([self._free.pop() for _ in range(count)], np.int32)
        self._held[digest] = rows
        self._needed.add(digest)
        return rows, True

    def clear(self) -> None:
        """Forgets all images: other weights encode them differently."""
        self._free = list(range(self.rows - 1, -1, -1))
        self._held.clear()
        self._needed.clear()

    def check(self) -> None:
        """Checks that every row is free or used once.

        Raises:
            CacheError: it is not.
        """
        used = self._free + [int(row) for rows in self._held.values() for row in rows]
        if sorted(used) != list(range(self.rows)):
            raise CacheError("every row of the image pool must be free or used once")


def image_chunk(
    pool: ImagePool,
    plan: StepPlan,
    sequence: Sequence,
    start: int,
    stop: int,
) -> int:
    """Returns where a chunk [start, stop) ends so that no image is cut; plans its images' rows.

    Shrunk to the start of an image that does not fit, or grown to the end of one if the step has no
    other prompt rows (engine.md 2.4). May be `start`: then a later step takes it.
    """
    for one in sequence.images:
        if one.stop <= start:
            continue
        if one.start >= stop:
            break
        if one.stop > stop:
            has_room = plan.rows + one.stop - start <= plan.layout.rows
            if one.start > start or plan.chunks or not has_room:
                return max(one.start, start)
            stop = one.stop
        found = pool.place(one)
        if found is None:
            return max(one.start, start)
        rows, is_new = found
        if is_new:
            plan.before.append(("encode", (one.image.pixels, rows)))
        first = max(one.start, start)  # not the image's own first row behind a prefix hit
        plan.images.append((plan.prompt_rows + first - start, rows[first - one.start :]))
    return stop


def cuts_beside_images(
    cuts: Items[int], images: Items[PromptImage], block_tokens: int
) -> tuple[int, ...]:
    """Returns positions at which prefill is cut, those inside an image moved to a border before."""
    moved = set()
    for cut in cuts:
        for one in reversed(images):
            if one.start < cut < one.stop:
                cut = one.start // block_tokens * block_tokens
        moved.add(cut)
    return tuple(sorted(moved - {0}))
