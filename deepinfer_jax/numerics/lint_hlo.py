"""Lint of a compiled program's optimised HLO text against determinism.md 4.5.

What the compiler made of a program may differ from what was traced: a loop of one trip is inlined,
an operation is moved out of a body or replaced by a library call.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from deepinfer_jax.numerics.lint_jaxpr import Finding, Rule, carries_rows

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_FLOAT = re.compile(r"^(?:f\d|bf16|c64|c128)")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_LOOP_PARTS = re.compile(r"\b(?:body|condition)=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ONE_TRIP = re.compile(r'known_trip_count"?:\{"?n"?:"1"\}')
_BATCHED_LIBRARY = re.compile(r"cublas|onednn|gemm|matmul", re.IGNORECASE)
_TEXT_LIMIT = 200


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def is_float(self) -> bool:
        return any(_FLOAT.match(kind) for kind, _ in _SHAPE.findall(self.shape))


@dataclass(slots=True)
class _Computation:
    name: str
    is_entry: bool
    instructions: dict[str, _Instruction] = field(default_factory=dict)

    @property
    def adds_floats(self) -> bool:
        """Whether it combines values by an operation whose order changes bits."""
        return any(
            one.opcode in ("add", "multiply") and one.is_float for one in self.instructions.values()
        )


def lint_hlo(text: str, *, rows: int | None = None) -> list[Finding]:
    """Returns every violation of optimised HLO, in program order.

    Args:
        text: `compiled.as_text()`.
        rows: Row count of the step on one device, as for `lint_jaxpr`.

    Raises:
        ValueError: The text has no entry computation.
    """
    computations = _parse(text)
    outside = _outside_loops(computations)
    found = []
    for computation in computations.values():
        in_body = computation.name not in outside
        for one in computation.instructions.values():
            has_rows = _has_rows(one, computation, rows)
            is_suspect = not in_body if rows is None else has_rows
            rule = _violated(
                one, computations, is_fixed=in_body and not has_rows, is_suspect=is_suspect
            )
            if rule is not None:
                place = "loop body" if in_body else "outside loops"
                found.append(Finding(rule, f"%{computation.name}, {place}", _short(one.line)))
    return list(dict.fromkeys(found))


def _violated(
    one: _Instruction, computations: dict[str, _Computation], *, is_fixed: bool, is_suspect: bool
) -> Rule | None:
    opcode = one.opcode.removesuffix("-start")
    if opcode in ("dot", "convolution", "ragged-dot", "scaled-dot"):
        return None if is_fixed else "contraction"
    if opcode == "custom-call":
        return _library_call(one, is_fixed=is_fixed)
    if opcode in ("rng", "rng-get-and-update-state"):
        return "random"
    if opcode == "rng-bit-generator":
        return "random" if "algorithm=rng_default" in one.line else None
    if opcode == "sort":
        return "unstable-sort" if _lacks_tie_break(one, computations) else None
    if not one.is_float:
        return None
    if opcode in ("all-reduce", "reduce-scatter"):
        return "float-collective"
    if opcode == "select-and-scatter":
        return "select-and-scatter"
    adds = any(computations[name].adds_floats for name in _called(one) if name in computations)
    if opcode == "scatter" and adds:
        return None if "unique_indices=true" in one.line else "scatter-add"
    if opcode in ("reduce", "reduce-window") and adds:
        return "row-sum" if is_suspect else None
    return None


def _library_call(one: _Instruction, *, is_fixed: bool) -> Rule | None:
    match = _TARGET.search(one.line)
    target = match[1] if match else ""
    if "ApproxTopK" in target or target == "PartialReduce":
        return "approximate-top-k"
    if "cudnn" in target.lower():
        return "library-call"
    if _BATCHED_LIBRARY.search(target):  # at a fixed shape a GEMM library repeats its choice
        return None if is_fixed else "library-call"
    return None


def _lacks_tie_break(one: _Instruction, computations: dict[str, _Computation]) -> bool:
    """Returns whether an unstable sort compares floats and looks at no integer operand."""
    if "is_stable=true" in one.line:
        return False
    for name in _called(one):
        parameters = {
            i.name: i for i in computations[name].instructions.values() if i.opcode == "parameter"
        }
        used = {
            operand
            for i in computations[name].instructions.values()
            for operand in i.operands
            if operand in parameters
        }
        kinds = {parameters[operand].is_float for operand in used}
        if kinds == {True}:
            return True
    return False


def _has_rows(one: _Instruction, computation: _Computation, rows: int | None) -> bool:
    shapes = [one.shape]
    shapes += [
        computation.instructions[name].shape
        for name in one.operands
        if name in computation.instructions
    ]
    return any(
        carries_rows(tuple(int(size) for size in sizes.split(",") if size), rows)
        for shape in shapes
        for _, sizes in _SHAPE.findall(shape)
    )


def _outside_loops(computations: dict[str, _Computation]) -> set[str]:
    """Returns the computations that run, on some path, outside every loop of several trips."""
    todo = [computation.name for computation in computations.values() if computation.is_entry]
    if not todo:
        raise ValueError("HLO text needs an ENTRY computation: give the whole compiled.as_text()")
    outside: set[str] = set()
    while todo:
        name = todo.pop()
        if name in outside or name not in computations:
            continue
        outside.add(name)
        for one in computations[name].instructions.values():
            todo += _called(one)
            if one.opcode == "while" and _ONE_TRIP.search(one.line):
                todo += _LOOP_PARTS.findall(one.line)
    return outside


def _called(one: _Instruction) -> list[str]:
    names = _CALLED.findall(one.line)
    for group in _CALLED_LIST.findall(one.line):
        names += _NAME.findall(group)
    return names


def _parse(text: str) -> dict[str, _Computation]:
    computations: dict[str, _Computation] = {}
    current: _Computation | None = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = _Computation(header[2], is_entry=bool(header[1]))
            computations[current.name] = current
        elif line.startswith("}"):
            current = None
        elif current is not None:
            for one in _instruction(line):
                current.instructions[one.name] = one
    return computations


def _instruction(line: str) -> Iterator[_Instruction]:
    match = _INSTRUCTION.match(line)
    if not match:
        return
    rest = match[2]
    cut = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, cut)
    if opcode:
        end = _closing(rest, opcode.end() - 1)
        operands = tuple(_NAME.findall(rest[opcode.end() : end]))
        yield _Instruction(match[1], rest[:cut], opcode[1], operands, line)


def _closing(text: str, start: int) -> int:
    """Returns the place of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text) - 1


def _short(line: str) -> str:
    return line.strip().split(", metadata=")[0][:_TEXT_LIMIT]
