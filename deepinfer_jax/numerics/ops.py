"""The primitives the network may call, selected by numerics mode, determinism level and kernels.

No arithmetic of its own: `core` holds the fixed-order primitives, `stock` the XLA forms of
`determinism="off"` and `"run"`, and an op with a named kernel runs that at every level. Functions
are looked up at call time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jax import Array, lax
from jaxtyping import Float

from deepinfer_jax.config.model import ExecutionConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.numerics import kernels
from deepinfer_jax.numerics.straight_through import straight_through
from pallas_kernels import core
from pallas_kernels.core import stock
from sharding.exchange import agree
from sharding.mesh import AXES, MeshSizes, mesh_sizes

Weight = Any  # jax.Array or core.QuantArray


@dataclass(frozen=True, slots=True)
class Ops:
    """Primitives of one (level, numerics) pair. All activations are float32 arrays.

    `rounded`: `bf16`, `q8` and `q4m` are the rounding points of model.md 7.3, in training with the
    derivative of the identity. Otherwise (`numerics="float32"`) they are identities.
    """

    fixed_order: bool
    rounded: bool
    # Whole sequences in reverse mode: products as the backend likes them (TF32 on an NVIDIA GPU),
    # all rows of an operation at once, and no work skipped by a condition on data, whose results
    # would be copied.
    training: bool = False
    # No condition or loop bound on data: see `ExecutionConfig.branches`.
    static: bool = False
    tile: int = core.ROW_TILE  # rows of the fixed-order primitives' tiles: those of the network's

    # Implementations other than "xla", as in `ExecutionConfig`.
    kernels: tuple[tuple[str, str], ...] = ()
    # Sizes of the mesh whose `shard_map` the functions run in; None: one device.
    mesh: MeshSizes | None = None

    def kernel(self, op: str) -> str:
        """Returns the implementation of an op of `pallas_kernels.COVERED`."""
        return dict(self.kernels).get(op, "xla")

    def agree(self, count: Any) -> Any:
        """Returns the largest of a loop bound over the devices: all run a loop equally often."""
        return count if self.mesh is None else agree(count, AXES)

    @property
    def is_tiled(self) -> bool:
        """Whether the functions are given one tile of rows, or all rows at once."""
        return self.fixed_order and not self.static

    def _height(self, x: Array) -> dict[str, int]:
        """Returns the keyword that a row-tiled primitive of x needs, none at its default."""
        if self.fixed_order and self.static:
            return {"tile": x.shape[0]}
        return {"tile": self.tile} if self.fixed_order and self.tile != core.ROW_TILE else {}

    @property
    def _impl(self) -> Any:
        return core if self.fixed_order else stock

    def _product(self, name: str, x: Weight, y: Weight) -> Array:
        if self.fixed_order and self.static:
            return getattr(core.fixed, name)(x, y, self.tile)
        if self.fixed_order:
            return getattr(core, name)(x, y, **self._height(x))
        precision = lax.Precision.DEFAULT if self.training else stock.EXACT
        return getattr(stock, name)(x, y, precision)

    def contract(self, x: Float[Array, "t i"], w: Weight) -> Float[Array, "t o"]:
        """Returns x @ w^T for a weight stored [o, i]; float32 accumulation.

        x is at a rounding point: BF16 values, or Q8 values where the weight is quantised. Of a
        quantised weight only the BF16 rounding of the product means anything.
        """
        kernel = self.kernel("block_scaled_matmul")
        if kernel != "xla" and kernels.is_dense(w):
            return kernels.contract(x, w, kernel)
        return self._product("contract", x, w)

    def contract_float32(self, x: Float[Array, "t i"], w: Weight) -> Float[Array, "t o"]:
        """Returns the same for a float32 x or a float32 weight, which have no kernel."""
        return self._product("contract", x, w)

    def head(self, x: Float[Array, "t d"], w: Weight) -> Float[Array, "t v"]:
        """Returns logits, in tiles of `core.ROW_TILE` rows however tall the network's tiles are.

        Rows that choose tokens are few, and are taken in tiles of that height.
        """
        if self.is_tiled and self.kernel("block_scaled_matmul") == "xla":
            return core.contract(x, w)
        return self.contract(x, w)

    def contract_grouped(self, x: Float[Array, "t g i"], w: Weight) -> Float[Array, "t g o"]:
        """Returns one product per group for a weight stored [g, o, i]; x as in `contract`."""
        kernel = self.kernel("block_scaled_matmul")
        if kernel != "xla":
            return kernels.contract_grouped(x, w, kernel)
        return self._product("contract_grouped", x, w)

    def contract_grouped_float32(
        self, x: Float[Array, "t g i"], w: Weight
    ) -> Float[Array, "t g o"]:
        """Returns the same for a float32 x or a float32 weight, which have no kernel."""
        return self._product("contract_grouped", x, w)

    def contract_pairs(
        self, x: Float[Array, "t h c"], y: Float[Array, "t s c"]
    ) -> Float[Array, "t h s"]:
        """Returns the dot of every head with every key of its own row."""
        return self._product("contract_pairs", x, y)

    def contract_values(
        self, p: Float[Array, "t h s"], y: Float[Array, "t s c"]
    ) -> Float[Array, "t h c"]:
        """Returns the weighted sum of a row's own values."""
        return self._product("contract_values", p, y)

    def tree_sum(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Sums the last axis in a fixed tree."""
        return self._impl.tree_sum(x)

    def fold_sum(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """Sums a short axis in ascending order."""
        return self._impl.fold_sum(x, axis)

    def rms_scale(self, x: Float[Array, "t *h d"], eps: float) -> Float[Array, " t *h"]:
        """Returns rsqrt(mean(x^2) + eps) over the last axis."""
        return self._impl.rms_scale(x, eps, **self._height(x))

    def norm(
        self, x: Float[Array, "t d"], weight: Float[Array, " d"], eps: float
    ) -> Float[Array, "t d"]:
        """RMSNorm of BF16 values with one rounding at the end (model.md 0)."""
        kernel = self.kernel("rms_norm_quant")
        if kernel != "xla":
            return kernels.norm(x, weight, eps, kernel)
        return self.bf16(self._impl.rms_norm(x, weight, eps, **self._height(x)))

    def combine(
        self, expert_out: Float[Array, "t x d"], shared: Float[Array, "t d"]
    ) -> Float[Array, "t d"]:
        """Sums expert outputs in slot order, the shared expert last, with one rounding."""
        return self.bf16(self._impl.combine(expert_out, shared))

    def bf16(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The one BF16 rounding point (model.md 3.2)."""
        return self._round(core.round_bf16, x)

    def q8(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Activation quantiser before FP8 and FP4 products, dequantised."""
        return self._round(core.fake_q8, x)

    def q4m(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """MXFP4 quantiser of indexer queries, dequantised."""
        return self._round(core.fake_q4m, x)

    def _round(self, rounding: Callable[[Array], Array], x: Array) -> Array:
        if not self.rounded:
            return x
        return straight_through(rounding, x) if self.training else rounding(x)


@lru_cache(maxsize=16)
def ops_for(execution: ExecutionConfig) -> Ops:
    """Returns the primitives of an execution config.

    Raises:
        ConfigError: one that was loaded for an Ascend device, which nothing here stands in for.
    """
    if execution.on_ascend:
        raise ConfigError(
            'a model loaded with kernels="ascend" runs through LLM and the engine alone: load it '
            "without for functions of JAX arrays such as score and hidden_states"
        )
    return Ops(
        fixed_order=execution.determinism == "batch",
        rounded=execution.numerics != "float32",
        training=execution.numerics == "training",
        static=execution.branches == "static",
        tile=execution.row_tile,
        kernels=execution.kernels,
        mesh=None if execution.mesh is None else mesh_sizes(execution.mesh),
    )
