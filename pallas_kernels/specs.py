"""Shapes on which an op is tested and compiled, as data (kernels.md section 7)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Tier = Literal["interpret", "real"]


@dataclass(frozen=True)
class ArgSpec:
    """One set of arguments of an op.

    Attributes:
        name: what the shapes are, unique inside the op, for example ``"wq_b m=64"``.
        shapes: the shape of each array argument, in the order of the op's api.
        dtypes: the dtype name of each array argument, beside `shapes`.
        kwargs: the remaining arguments (static ones) by name.
        tier: ``"interpret"`` for shapes the CPU interpreter runs within seconds, ``"real"`` for
            the rows of kernels.md section 4.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    tier: Tier = "interpret"

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise ValueError(
                f"ArgSpec {self.name!r}: one dtype per shape is needed, got {len(self.shapes)} "
                f"shapes and {len(self.dtypes)} dtypes."
            )


@dataclass(frozen=True)
class BenchCase:
    """One row of `python -m benchmarks.kernels`: how to make, run, check and rate it.

    Attributes:
        name: shape and meaning, unique inside the op, for example ``"wo_b m=64"``.
        make: ``make(seed)`` returns the arguments as device arrays, random normal data.
        run: ``run(implementation, *args)`` returns the output; a pure function of jax arrays.
        implementation: what is timed against "xla", for example ``"mosaic_sm90"``.
        flop: multiplications and additions of the products.
        bytes: bytes that must be read and written once.
        tolerance: largest ``max |out - xla| / rms(xla)``; 0 asks for equal bits.
        peer: (m, n, k) of the same product with 128-blocks for the peer, None where it has none.
        stock: ``stock(*args)`` is JAX's own op for the purpose, timed beside; None where there is
            none.
    """

    name: str
    make: Callable[[int], tuple[Any, ...]]
    run: Callable[..., Any]
    implementation: str
    flop: float
    bytes: float
    tolerance: float
    peer: tuple[int, int, int] | None = None
    stock: Callable[..., Any] | None = None
