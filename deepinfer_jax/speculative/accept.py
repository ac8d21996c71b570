"""Which rows of a verification step emit a token, for flattened rows of several requests."""

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

from deepinfer_jax.sampling.rows import Leaf


@struct.dataclass
class AcceptedRows:
    """Per row: its draft and all before it in the request are accepted; it emits the last token."""

    is_accepted: Leaf  # bool [t]
    is_final: Leaf  # bool [t]


def accepted_rows(
    accept: Bool[Array, " t"],
    has_draft: Bool[Array, " t"],
    request: Int[Array, " t"],
    first_row: Int[Array, " r"],
) -> AcceptedRows:
    """Returns the accepted prefix of every request and the row that ends it.

    A row is judged by the draft that follows it. The first row of a request whose draft is not
    accepted, or that has none, emits the correction or the bonus token. So every request emits
    accepted + 1 tokens, those of the rows with `is_accepted | is_final`.

    Args:
        accept: verdict of each row's own draft, without regard to the rows before.
        has_draft: false in the last row of every request.
        request: number of each row's request; rows of one request are consecutive.
        first_row: first row of each request.
    """
    is_miss = ~(accept & has_draft)
    misses = jnp.cumsum(is_miss.astype(jnp.int32))
    start = first_row[request]
    earlier = misses - is_miss  # misses before this row
    within = earlier - earlier[start]  # of the same request
    return AcceptedRows(is_accepted=(within == 0) & ~is_miss, is_final=(within == 0) & is_miss)


def emitted_tokens(rows: AcceptedRows, token: Int[Array, " t"]) -> Int[Array, " t"]:
    """Returns each row's token where it is emitted, -1 elsewhere."""
    return jnp.where(jnp.logical_or(rows.is_accepted, rows.is_final), token, -1)
