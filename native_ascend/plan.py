"""Builds plans: tensors, and the operators that run on them in order, as one int64 array.

The native side reads the array (src/plan.cc) and does not know the model. An operator that is not
in the table cannot be put into a plan.
"""

import struct
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from native_ascend.errors import AscendUnsupported
from native_ascend.operators import OPERATORS, Operator, Parameter

#: Number of a data type in ACL, and its bits.
ACL_TYPES: dict[str, tuple[int, int]] = {
    "float32": (0, 32),
    "float16": (1, 16),
    "int8": (2, 8),
    "int32": (3, 32),
    "uint8": (4, 8),
    "int64": (9, 64),
    "bool": (12, 8),
    "bfloat16": (27, 16),
    "float8_e5m2": (35, 8),
    "float8_e4m3fn": (36, 8),
    "float8_e8m0fnu": (37, 8),
    "float4_e2m1fn": (40, 4),
}
ND, NZ = 2, 29
_OPERAND, _RESULT, _SCRATCH, _HANDLE = range(4)
_ALIGNMENT = 64


def acl_type(dtype: str) -> int:
    """Returns ACL's number of a data type."""
    if dtype not in ACL_TYPES:
        raise AscendUnsupported(
            f"the bridge carries {sorted(ACL_TYPES)}, received {dtype}: convert before the call"
        )
    return ACL_TYPES[dtype][0]


def byte_count(shape: tuple[int, ...], dtype: str) -> int:
    """Returns the bytes of a contiguous array."""
    acl_type(dtype)
    return (int(np.prod(shape, dtype=np.int64)) * ACL_TYPES[dtype][1] + 7) // 8


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A view of an operand, a result, scratch memory or a handle's buffer.

    offset: bytes to the allocation, start: elements from there; strides in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    source: int
    index: int = 0
    offset: int = 0
    start: int = 0
    format: int = ND
    storage: tuple[int, ...] = ()

    def reshape(self, *shape: int) -> "Tensor":
        """Returns the same elements in another shape; the tensor is contiguous."""
        if self.strides != _strides(self.shape) or np.prod(shape) != np.prod(self.shape):
            raise ValueError(f"{self.shape} with strides {self.strides} does not become {shape}")
        return replace(self, shape=shape, strides=_strides(shape))

    def transpose(self, *axes: int) -> "Tensor":
        """Returns the axes in another order."""
        return replace(
            self,
            shape=tuple(self.shape[a] for a in axes),
            strides=tuple(self.strides[a] for a in axes),
        )

    def cut(self, axis: int, first: int, size: int) -> "Tensor":
        """Returns `size` entries of an axis from `first` on."""
        if not 0 <= first <= first + size <= self.shape[axis]:
            raise ValueError(f"[{first}, {first + size}) is not inside axis {axis} of {self.shape}")
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        return replace(self, shape=shape, start=self.start + first * self.strides[axis])

    def repeat(self, axis: int, size: int) -> "Tensor":
        """Returns a new axis along which every entry is the same memory."""
        shape = (*self.shape[:axis], size, *self.shape[axis:])
        return replace(self, shape=shape, strides=(*self.strides[:axis], 0, *self.strides[axis:]))

    def viewed(self, dtype: str) -> "Tensor":
        """Returns the same bytes as another data type of the same width."""
        if ACL_TYPES[dtype][1] != ACL_TYPES[self.dtype][1]:
            raise ValueError(f"{self.dtype} and {dtype} differ in width")
        return replace(self, dtype=dtype)

    def as_fp4(self) -> "Tensor":
        """Returns contiguous bytes uint8 [.., k / 2] as E2M1 [.., k], the even code low."""
        shape = (*self.shape[:-1], 2 * self.shape[-1])
        return replace(
            self, dtype="float4_e2m1fn", shape=shape, strides=_strides(shape), start=2 * self.start
        )

    def words(self) -> list[int]:
        """Returns the tensor as the native side reads it."""
        storage = self.storage or self.shape
        head = [acl_type(self.dtype), self.format, self.source, self.index, self.offset, self.start]
        lists = (self.shape, self.strides, storage)
        return head + [word for values in lists for word in (len(values), *values)]


def _real(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", float(value)))[0]


@dataclass(slots=True)
class PlanBuilder:
    """Collects tensors and operators. Scratch memory is a stack: `mark` and `release`."""

    tensors: dict[Tensor, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    calls: list[list[int]] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    operands: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    results: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    top: int = 0
    highest: int = 0

    def operand(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Returns the next operand of the call."""
        self.operands.append((shape, dtype))
        place = len(self.operands) - 1
        strides = _strides(shape)
        return Tensor(dtype=dtype, shape=shape, strides=strides, source=_OPERAND, index=place)

    def result(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Returns the next result of the call."""
        self.results.append((shape, dtype))
        place = len(self.results) - 1
        strides = _strides(shape)
        return Tensor(dtype=dtype, shape=shape, strides=strides, source=_RESULT, index=place)

    def handle(self, index: int, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Returns the buffer of the call's handle number `index`."""
        strides = _strides(shape)
        return Tensor(dtype=dtype, shape=shape, strides=strides, source=_HANDLE, index=index)

    def scratch(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Returns device memory that belongs to one call."""
        offset = self.top
        size = byte_count(shape, dtype)
        self.top += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.highest = max(self.highest, self.top)
        strides = _strides(shape)
        return Tensor(dtype=dtype, shape=shape, strides=strides, source=_SCRATCH, offset=offset)

    def mark(self) -> int:
        """Returns the scratch memory in use, for `release`."""
        return self.top

    def release(self, mark: int) -> None:
        """Gives back scratch memory. What runs later may overwrite it: one stream, in order."""
        self.top = mark

    def call(self, name: str, /, **arguments: Any) -> None:
        """Adds an operator; tensors, lists and int arrays that are left out are null.

        Raises:
            AscendUnsupported: the operator table does not have the operator.
            TypeError: an attribute is left out, or an argument has no parameter.
        """
        operator = OPERATORS.get(name)
        if operator is None:
            raise AscendUnsupported(
                f"{name} is not in the operator table, so nothing runs it: see "
                "native_ascend.operators.OPERATORS"
            )
        unknown = arguments.keys() - {p.name for p in operator.parameters}
        if unknown:
            raise TypeError(f"{name} has no parameters {sorted(unknown)}")
        words = [self._name(name), len(operator.parameters)]
        for parameter in operator.parameters:
            words += self._argument(operator, parameter, arguments.get(parameter.name))
        self.calls.append(words)
        if name not in self.used:
            self.used.append(name)

    def words(self) -> np.ndarray:
        """Returns the plan, int64."""
        found = [self.highest, len(self.tensors)]
        for tensor in self.tensors:
            found += tensor.words()
        found.append(len(self.calls))
        for call in self.calls:
            found += call
        return np.asarray(found, np.int64)

    def text(self) -> str:
        """Returns the plan's names, one a line, in the order of their numbers."""
        return "\n".join(self.names)

    def _name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def _place(self, tensor: Tensor) -> int:
        return self.tensors.setdefault(tensor, len(self.tensors))

    def _argument(self, operator: Operator, parameter: Parameter, value: Any) -> list[int]:
        name, kind = parameter.name, parameter.kind
        if value is None:
            if kind not in "TOLMA":
                raise TypeError(f"{operator.name} needs {name}")
            null = {"O": "T", "M": "L"}.get(kind, kind)
            return [ord("T"), -1] if null == "T" else [ord(null), 1, 0]
        if kind in "TO":
            return [ord("T"), self._place(value)]
        if kind in "LM":
            return [ord("L"), 0, len(value), *(self._place(tensor) for tensor in value)]
        if kind == "A":
            return [ord("A"), 0, len(value), *value]
        if kind in "IJ":
            return [ord("I"), int(value)]
        if kind == "B":
            return [ord("B"), int(bool(value))]
        if kind in "DF":
            return [ord("D"), _real(value)]
        if kind == "C":
            return [ord("C"), acl_type("float32"), _real(value)]
        return [ord("S"), self._name(value)]
