"""Attention over window and selected cache rows by named implementation (kernels.md 4.1, 4.2)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.errors import KernelError, KernelUnsupported, require_named
from pallas_kernels.sparse_mla_decode import reference
from pallas_kernels.sparse_mla_decode.configs import DIM, HEADS, TABLE
from pallas_kernels.sparse_mla_decode.reference import BLOCK

OP = "sparse_mla_decode"
IMPLEMENTATIONS = ("xla", "pallas_interpret", "mosaic_sm90")
#: Most ranks of a set that the Hopper kernel covers.
KERNEL_RANKS = 2048
#: Persistent grid of the interpreter, where every block is a set of Python threads.
_INTERPRETER_SMS = 2


def sparse_mla_decode(
    q: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    selected: jax.Array | None,
    selected_ids: jax.Array | None,
    sink: jax.Array,
    *,
    with_lse: bool = False,
    implementation: str = "xla",
    num_sms: int = 132,
) -> Any:
    """Returns attention of every head over its token's key list; keys are the values too.

    The list of a token is its window ranks, then its selected ranks, then -1 up to a multiple of
    64; it is folded in blocks of 64 ranks with probabilities in BF16 (model.md 3.6 and 9.4). Bits
    of a token depend on its query and its list alone: decode, verification and prefill are calls
    with fewer or more tokens. A token without keys gives zeros.

    Args:
        q: bfloat16 [t, h, c]; t may be 0.
        window: uint8 [rows, c + c / 32], Q8 rows (model.md 4.1). Rows that no id names may hold
            anything. Rows named must be finite: kernels read the NaN codes of the formats as 480.
        window_ids: int32 [t, w], rows of `window`, -1 for none. w is a multiple of 64 if there is
            a second set.
        selected: uint8 [rows, c / 2 + c / 16] (Q4n) or [rows, c + c / 32] (Q8); None for none.
        selected_ids: int32 [t, s], rows of `selected`, -1 for none. Distinct, as window_ids.
        sink: float32 [h], a logit without a key that joins each head's denominator.
        with_lse: return the log-sum-exp too, the sink included.
        implementation: "xla", "pallas_interpret" or "mosaic_sm90".
        num_sms: persistent grid of the kernel (132 on an H200).

    Returns:
        bfloat16 [t, h, c]; with_lse: (that, float32 [t, h]).

    Raises:
        KernelError: shapes or dtypes do not fit, or (where they are concrete) ids name a row twice
            or a row that does not exist.
        KernelUnsupported: no such implementation, or a shape that it does not cover.
    """
    _check(q, window, window_ids, selected, selected_ids, sink)
    require_named(OP, implementation, IMPLEMENTATIONS)
    if q.shape[0] == 0:
        out, lse = jnp.zeros(q.shape, jnp.bfloat16), jnp.zeros(q.shape[:2], jnp.float32)
        return (out, lse) if with_lse else out
    if implementation == "xla":
        found = reference.attend(q, window, window_ids, selected, selected_ids, sink)
        return found if with_lse else found[0]
    _check_kernel(q, window_ids, selected_ids, implementation)
    from pallas_kernels.sparse_mla_decode import pallas_sm90

    interpret = implementation == "pallas_interpret"
    run = pallas_sm90.build(
        TABLE[0 if selected is None else selected.shape[1]],
        with_lse=with_lse,
        interpret=interpret,
        num_sms=_INTERPRETER_SMS if interpret else num_sms,
    )
    second = () if selected is None else (selected, _whole_blocks(selected_ids))
    return run(q, sink, window, _whole_blocks(window_ids), *second)


def _whole_blocks(ids: Any) -> jax.Array:
    """Returns ids with -1 behind them up to whole blocks of ranks."""
    missing = -ids.shape[1] % BLOCK
    return jnp.pad(ids, ((0, 0), (0, missing)), constant_values=-1) if missing else ids


def _check(
    q: jax.Array,
    window: jax.Array,
    window_ids: jax.Array,
    selected: jax.Array | None,
    selected_ids: jax.Array | None,
    sink: jax.Array,
) -> None:
    if q.ndim != 3 or q.dtype != jnp.bfloat16 or q.shape[2] % 32 or sink.shape != q.shape[1:2]:
        raise KernelError(
            f"{OP} needs q bfloat16 [t, h, c] with c a multiple of 32 and sink [h], got "
            f"{q.dtype} {q.shape} and {sink.shape}"
        )
    if (selected is None) != (selected_ids is None):
        raise KernelError(f"{OP} needs selected rows and their ids, or None for both")
    tokens, _, dim = q.shape
    q8, q4n = dim + dim // 32, dim // 2 + dim // 16
    _check_set("window", window, window_ids, tokens, (q8,))
    if selected is not None and selected_ids is not None:
        _check_set("selected", selected, selected_ids, tokens, (q4n, q8))
        if window_ids.shape[1] % BLOCK:
            raise KernelError(
                f"{OP} needs window_ids of whole blocks of {BLOCK} ranks before a second set, got "
                f"{window_ids.shape}: a list is padded at its end only"
            )


def _check_set(
    name: str, cache: jax.Array, ids: jax.Array, tokens: int, row_bytes: tuple[int, ...]
) -> None:
    if cache.ndim != 2 or cache.dtype != jnp.uint8 or cache.shape[1] not in row_bytes:
        raise KernelError(
            f"{OP} needs {name} rows uint8 [rows, n] with n one of {row_bytes}, got {cache.dtype} "
            f"{cache.shape}"
        )
    if ids.ndim != 2 or ids.dtype != jnp.int32 or ids.shape[0] != tokens:
        raise KernelError(
            f"{OP} needs {name}_ids int32 [{tokens}, ranks], got {ids.dtype} {ids.shape}"
        )
    if isinstance(ids, Tracer):
        return
    ordered = np.sort(np.asarray(ids), axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, place = np.argwhere(twice)[0]
        raise KernelError(
            f"{OP} needs distinct {name}_ids, got row {ordered[token, place]} twice in token "
            f"{token}: a key counts once"
        )
    if ordered.size and not -1 <= ordered.min() <= ordered.max() < cache.shape[0]:
        raise KernelError(
            f"{OP} needs {name}_ids from -1 to {cache.shape[0] - 1}, got {ordered.min()} to "
            f"{ordered.max()}"
        )


def _check_kernel(
    q: jax.Array, window_ids: jax.Array, selected_ids: jax.Array | None, implementation: str
) -> None:
    ranks = [ids.shape[1] for ids in (window_ids, selected_ids) if ids is not None]
    if q.shape[2] != DIM or q.shape[1] % HEADS or not q.shape[1]:
        raise KernelUnsupported(
            OP,
            implementation,
            f"it takes {DIM} channels and a multiple of {HEADS} heads",
            f"q {q.shape}",
            "use implementation='xla'",
        )
    if max(ranks) > KERNEL_RANKS or min(ranks) < 1:
        raise KernelUnsupported(
            OP,
            implementation,
            f"a set has 1 to {KERNEL_RANKS} ranks",
            f"{ranks}",
            "use implementation='xla'",
        )
