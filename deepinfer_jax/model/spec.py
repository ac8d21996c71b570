"""What one parameter leaf is made of: which checkpoint tensors, in which format, stacked how.

A tree of `ParamSpec` has the structure of the parameter tree. It is the only list of names: the
loader, the coverage check, `inspect` and the published counts all derive from it (model.md 2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

Format = Literal["plain", "fp8_block32", "fp8_block128", "fp8_row32", "fp4_row32"]

#: Bytes of one stored element, by safetensors dtype name.
DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the checkpoint. `shape` is the stored shape, `elements` the logical count."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_scale: bool = False

    @property
    def elements(self) -> int:
        """Logical elements: two per byte for packed FP4."""
        return prod(self.shape) * (2 if self.dtype == "I8" else 1)

    @property
    def nbytes(self) -> int:
        """Payload bytes in the file."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One leaf: tensors of equal shape stacked over `stack` leading axes, in row-major order.

    `shape` is the logical shape of one tensor ([out, in] for a matrix, unpacked for FP4), `axes`
    names its logical axes for sharding, `format` its number format. `load_as_bf16` marks the one
    FP8 weight that is dequantised when it is loaded (`wo_a`, model.md 9.1).
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    stack: tuple[int, ...] = ()
    format: Format = "plain"
    load_as_bf16: bool = False

    def __post_init__(self) -> None:
        if prod(self.stack) != len(self.names) or len(self.axes) != len(self.shape):
            raise ValueError(
                f"inconsistent spec: {len(self.names)} names, stack {self.stack}, axes {self.axes}"
            )

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """Stored shape of one tensor."""
        if self.format == "fp4_row32":
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Stored shape of one scale tensor, None for plain tensors."""
        if self.format == "plain":
            return None
        if self.format in ("fp8_row32", "fp4_row32"):
            return (*self.shape[:-1], self.shape[-1] // 32)
        side = 32 if self.format == "fp8_block32" else 128
        rows, columns = self.shape
        return (-(-rows // side), -(-columns // side))

    def tensors(self) -> Iterator[TensorSpec]:
        """Yields every checkpoint tensor of this leaf, the scale after its weight."""
        for name in self.names:
            yield TensorSpec(name, self.payload_shape, self.dtype)
            if self.scale_shape is not None:
                yield TensorSpec(scale_name(name), self.scale_shape, "F8_E8M0", is_scale=True)


def scale_name(name: str) -> str:
    """Returns the name of the scale of `X.weight`, which is `X.scale` (model.md 2.1)."""
    return name.removesuffix("weight") + "scale"


def plain_spec(
    name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str = "BF16"
) -> ParamSpec:
    """Returns the spec of one tensor that is stored as it is used."""
    return ParamSpec(names=(name,), shape=shape, dtype=dtype, axes=axes)


class TensorStack:
    """Builds specs of tensors that occur once per prefix."""

    def __init__(self, prefixes: tuple[str, ...], block: int) -> None:
        self.prefixes = prefixes
        self.dense: Format = "fp8_block32" if block == 32 else "fp8_block128"

    def plain(
        self, suffix: str, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str = "BF16"
    ) -> ParamSpec:
        """Returns the spec of tensors stored as they are used."""
        names = tuple(f"{prefix}.{suffix}" for prefix in self.prefixes)
        return ParamSpec(names=names, shape=shape, dtype=dtype, axes=axes, stack=(len(names),))

    def fp8(
        self,
        suffix: str,
        shape: tuple[int, int],
        axes: tuple[str | None, str | None],
        *,
        load_as_bf16: bool = False,
    ) -> ParamSpec:
        """Returns the spec of block-scaled FP8 matrices `X.weight`, `X.scale`."""
        names = tuple(f"{prefix}.{suffix}.weight" for prefix in self.prefixes)
        return ParamSpec(
            names=names,
            shape=shape,
            dtype="F8_E4M3",
            axes=axes,
            stack=(len(names),),
            format=self.dense,
            load_as_bf16=load_as_bf16,
        )

    def experts(
        self, count: int, suffix: str, shape: tuple[int, int], axes: tuple[str | None, str | None]
    ) -> ParamSpec:
        """Returns the spec of MXFP4 matrices, one per prefix and expert."""
        names = tuple(
            f"{p}.ffn.experts.{e}.{suffix}.weight" for p in self.prefixes for e in range(count)
        )
        return ParamSpec(
            names=names,
            shape=shape,
            dtype="I8",
            axes=axes,
            stack=(len(self.prefixes), count),
            format="fp4_row32",
        )
