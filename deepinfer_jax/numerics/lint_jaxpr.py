"""Lint of a traced program against determinism.md 4.5: cheap, and the same on every backend."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

Rule = Literal[
    "float-collective",
    "scatter-add",
    "select-and-scatter",
    "cumulative-sum",
    "approximate-top-k",
    "contraction",
    "row-sum",
    "random",
    "unstable-sort",
    "library-call",
]

#: Why each rule exists; ends up in error messages and in the docs.
REASONS: dict[Rule, str] = {
    "float-collective": "the order of a collective sum depends on message size and rank",
    "scatter-add": "additions to one place happen in no fixed order unless indices are unique",
    "select-and-scatter": "overlapping windows are added in no fixed order",
    "cumulative-sum": "a parallel scan of floats adds in an order the compiler chooses",
    "approximate-top-k": "the result depends on how the operand is partitioned",
    "contraction": "outside a loop over fixed tiles the kernel is chosen by the number of rows",
    "row-sum": "a sum over an array that contains the rows is split by their number",
    "random": "random bits may depend on shape, call order and flags; use the counters",
    "unstable-sort": "equal float keys keep no order without an index as tie-break",
    "library-call": "the library chooses its algorithm by the number of rows",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation: the rule, where in the program, and the operation."""

    rule: Rule
    where: str
    text: str

    def __str__(self) -> str:
        """Returns one line with the rule's reason."""
        return f"{self.rule}: {self.text} [{self.where}] ({REASONS[self.rule]})"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the walk is: names of the enclosing programs, and whether in a loop or kernel body."""

    path: tuple[str, ...]
    in_body: bool


_CONTRACTIONS = {
    "dot_general",
    "conv_general_dilated",
    "ragged_dot",
    "ragged_dot_general",
    "scaled_matmul",
    "scaled_dot",
}
_SCATTERS = {"scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter_sub"}
_CUMULATIVE = {"cumsum", "cumprod", "cumlogsumexp"}
_SUMS = {"reduce_sum", "reduce_prod", "reduce_window_sum", "reduce_window"}
_APPROXIMATE = {"approx_top_k", "approx_max_k", "approx_min_k"}
_COLLECTIVES = {"psum", "psum2", "psum_invariant", "reduce_scatter", "unreduced_psum"}
#: Pure bookkeeping of typed keys; they draw nothing.
_KEY_BOOKKEEPING = {"random_wrap", "random_unwrap", "random_clone"}
_LOOPS = {"while", "scan"}
#: Frames that say nothing about where an operation was written.
_FOREIGN = re.compile(r"/site-packages/(?:jax|jaxlib|jaxtyping|beartype|flax)/|^<|/functools.py$")
_TEXT_LIMIT = 200


def carries_rows(shape: tuple[int, ...], rows: int | None) -> bool:
    """Returns whether a shape contains the row count, alone or merged with other axes.

    Meaningful only if no other axis of the program is a multiple of `rows`.
    """
    return rows is not None and any(size and size % rows == 0 for size in shape)


def lint_jaxpr(program: ClosedJaxpr, *, rows: int | None = None) -> list[Finding]:
    """Returns every violation of a traced program, in program order.

    A body is of fixed shape if it is that of a loop of more than one trip, or a Pallas kernel, and
    the operation has no axis made of rows.

    Args:
        program: What `jax.make_jaxpr` or `jax.jit(f).trace(...).jaxpr` returns.
        rows: Row count of the step. It must divide no other axis of the program (8 times a prime
            is a good choice). None: contractions count as fixed in every loop body, and every
            float sum outside of one is reported.
    """
    return list(dict.fromkeys(_walk(program.jaxpr, rows, _Place((), in_body=False))))


def _walk(jaxpr: Jaxpr, rows: int | None, place: _Place) -> Iterator[Finding]:
    for eqn in jaxpr.eqns:
        rule = _violated(eqn, rows, place)
        if rule is not None:
            yield Finding(rule, _where(eqn, place), _text(eqn))
        for inner in _inner_programs(eqn):
            label = eqn.params.get("name") or eqn.primitive.name
            yield from _walk(
                inner,
                rows,
                replace(
                    place,
                    path=(*place.path, str(label)),
                    in_body=place.in_body or _has_fixed_body(eqn),
                ),
            )


def _violated(eqn: JaxprEqn, rows: int | None, place: _Place) -> Rule | None:
    name = eqn.primitive.name
    if name in _CONTRACTIONS:
        is_fixed = place.in_body and not _has_rows(eqn, rows)
        return None if is_fixed else "contraction"
    if name.startswith(("random_", "rng_")) and name not in _KEY_BOOKKEEPING:
        return "random"
    if name == "sort":
        return "unstable-sort" if _lacks_tie_break(eqn) else None
    if name in _APPROXIMATE:
        return "approximate-top-k"
    if not _has_float(eqn):
        return None
    if name in _COLLECTIVES:
        return "float-collective"
    if name in _SCATTERS:
        return None if eqn.params["unique_indices"] else "scatter-add"
    if name.startswith("select_and_scatter"):
        return "select-and-scatter"
    if name in _CUMULATIVE:
        return "cumulative-sum"
    if name in _SUMS:
        is_suspect = not place.in_body if rows is None else _has_rows(eqn, rows)
        return "row-sum" if is_suspect else None
    return None


def _has_rows(eqn: JaxprEqn, rows: int | None) -> bool:
    variables = (*eqn.invars, *eqn.outvars)
    return any(carries_rows(getattr(v.aval, "shape", ()), rows) for v in variables)


def _has_float(eqn: JaxprEqn) -> bool:
    return any(_is_float(v.aval) for v in eqn.invars)


def _is_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _lacks_tie_break(eqn: JaxprEqn) -> bool:
    """Returns whether an unstable sort has float keys and no integer as its last key."""
    if eqn.params["is_stable"]:
        return False
    keys = eqn.invars[: eqn.params["num_keys"]]
    return any(_is_float(v.aval) for v in keys) and _is_float(keys[-1].aval)


def _has_fixed_body(eqn: JaxprEqn) -> bool:
    """Returns whether the inner programs run as a loop body or kernel; one trip is inlined."""
    name = eqn.primitive.name
    if name == "scan":
        return eqn.params["length"] > 1
    return name in _LOOPS or name == "pallas_call"


def _inner_programs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def _where(eqn: JaxprEqn, place: _Place) -> str:
    path = "/".join(place.path) or "top level"
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        file = frame.file_name.replace(os.sep, "/")
        if not _FOREIGN.search(file):
            return f"{path}, {'/'.join(file.split('/')[-3:])}:{frame.line_num}"
    return path


def _text(eqn: JaxprEqn) -> str:
    operands = ", ".join(str(v.aval) for v in eqn.invars)
    results = ", ".join(str(v.aval) for v in eqn.outvars)
    return f"{eqn.primitive.name}({operands}) -> {results}"[:_TEXT_LIMIT]
