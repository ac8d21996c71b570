"""Routed experts as grouped products (kernels.md 4.6, model.md 3.11)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import core
from pallas_kernels.errors import KernelError, KernelUnsupported, require_named
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.configs import config_for
from pallas_kernels.grouped_matmul.layout import UNIT_CHANNELS, ExpertWords, prepare_experts
from pallas_kernels.grouped_matmul.plan import plan_tiles

__all__ = ["ExpertWords", "prepare_experts", "routed_experts"]

OP = "grouped_matmul"
IMPLEMENTATIONS = ("xla", "pallas_interpret", "mosaic_sm90")
#: Stacks of checkpoint weights up to this size are rearranged inside a call (tests, nano).
PREPARE_LIMIT_BYTES = 64 * 2**20
#: Persistent grid of the interpreter, where every block is a set of Python threads.
_INTERPRETER_SMS = 2


def routed_experts(
    x_codes: jax.Array,
    x_scale: jax.Array,
    w1: Any,
    w3: Any,
    w2: Any,
    offsets: jax.Array,
    row_token: jax.Array,
    row_weight: jax.Array,
    *,
    first_group: jax.Array | int = 0,
    limit: float = 10.0,
    implementation: str = "xla",
    num_sms: int = 132,
) -> jax.Array:
    """Returns the output of every (token, expert) row: bf16(Q8(h) @ W2^T), unweighted sum to come.

    ``h = bf16(silu(min(g, limit)) * clip(u, -limit, limit) * weight)`` with ``g`` and ``u`` the
    products with W1 and W3, each rounded to BF16. Bits of a row depend on the row, its expert and
    its weight alone. Rows of an expert must be contiguous, experts ascending.

    Args:
        x_codes: Q8 codes [tokens, channels], uint8 or float8_e4m3fn; channels a multiple of 32.
        x_scale: E8M0 bytes uint8 [tokens, channels / 32].
        w1: gate, MXFP4 QuantArray [groups, width, channels]; or what ``prepare_experts`` returned.
        w3: up, the same shape; None beside a prepared w1.
        w2: down, [groups, channels, width]; or prepared.
        offsets: int32 [experts + 1], the first row of each expert; rows from ``offsets[-1]`` on
            belong to none, and what comes back for them is undefined.
        row_token: int32 [rows], the token of each row.
        row_weight: float32 [rows], its routing weight.
        first_group: int scalar, may be traced: expert e uses the weights of group first_group + e.
        limit: SwiGLU clamp.
        implementation: "xla", "pallas_interpret" or "mosaic_sm90".
        num_sms: persistent grid of the kernel (132 on an H200).

    Returns:
        bfloat16 [rows, channels].

    Raises:
        KernelError: shapes or dtypes do not fit.
        KernelUnsupported: no such implementation, or weights too large to rearrange in a call.
    """
    _check(x_codes, x_scale, w1, w3, w2, offsets, row_token, row_weight)
    require_named(OP, implementation, IMPLEMENTATIONS)
    first_group = jnp.asarray(first_group, jnp.int32)
    token = jnp.clip(row_token, 0, x_codes.shape[0] - 1)
    x = core.dequantize_q8(x_codes, x_scale).astype(jnp.bfloat16)
    if implementation == "xla":
        return reference.routed_experts(
            x[token], w1, w3, w2, offsets, row_weight, first_group=first_group, limit=limit
        )
    if not isinstance(w1, ExpertWords):
        w1, w3, w2 = _prepare_in_call(w1, w3, w2, implementation)
    interpret = implementation == "pallas_interpret"
    sms = _INTERPRETER_SMS if interpret else num_sms
    return _run(x, token, w1, w2, offsets, row_weight, first_group, limit, interpret, sms)


def _run(
    x: jax.Array,
    token: jax.Array,
    gate_up: ExpertWords,
    down: ExpertWords,
    offsets: jax.Array,
    weight: jax.Array,
    first_group: jax.Array,
    limit: float,
    interpret: bool,
    num_sms: int,
) -> jax.Array:
    from pallas_kernels.grouped_matmul import pallas_sm90

    rows, experts = token.shape[0], offsets.shape[0] - 1
    first = config_for("gate_up", rows, experts, gate_up.words.shape[1])
    second = config_for("down", rows, experts, down.words.shape[1])
    n = first.tile_n
    plan = plan_tiles(offsets, rows, n)
    group = first_group + plan.expert
    # padding rows repeat row 0: whatever they hold, their results are never read
    source = jnp.maximum(plan.source, 0)
    channels = gate_up.words.shape[2] * UNIT_CHANNELS
    x = jnp.pad(x, [(0, 0), (0, channels - x.shape[1])])[token[source]]
    weight = weight.astype(jnp.float32)[source]
    run_gate_up = pallas_sm90.build(
        first, gate_up=True, limit=limit, interpret=interpret, num_sms=num_sms
    )
    run_down = pallas_sm90.build(second, gate_up=False, interpret=interpret, num_sms=num_sms)
    h = run_gate_up(x, gate_up.words, weight, group, plan.first, plan.valid, plan.count)
    own = jnp.arange(group.shape[0], dtype=jnp.int32) * n
    y = run_down(h, down.words, weight, group, own, plan.valid, plan.count)
    return y[plan.position, : down.rows]


def _prepare_in_call(w1: Any, w3: Any, w2: Any, implementation: str) -> tuple[Any, Any, Any]:
    size = sum(int(np.prod(w.payload.shape)) for w in (w1, w3, w2))
    if size > PREPARE_LIMIT_BYTES:
        raise KernelUnsupported(
            OP,
            implementation,
            f"weights above {PREPARE_LIMIT_BYTES >> 20} MiB are rearranged once, at load",
            f"checkpoint weights of {size >> 20} MiB",
            "pass what prepare_experts returns, or implementation='xla'",
        )
    return prepare_experts(w1, w3, w2)


def _check(
    codes: jax.Array,
    scale: jax.Array,
    w1: Any,
    w3: Any,
    w2: Any,
    offsets: jax.Array,
    token: jax.Array,
    weight: jax.Array,
) -> None:
    if (
        codes.ndim != 2
        or codes.shape[1] % 32
        or scale.shape
        != (
            codes.shape[0],
            codes.shape[1] // 32,
        )
    ):
        raise KernelError(
            f"{OP} needs Q8 codes [tokens, channels] and scales [tokens, channels / 32], got "
            f"{codes.shape} and {scale.shape}"
        )
    prepared = isinstance(w1, ExpertWords)
    if prepared != isinstance(w2, ExpertWords) or prepared != (w3 is None):
        raise KernelError(
            f"{OP} needs three MXFP4 QuantArrays or the result of prepare_experts, got "
            f"{type(w1).__name__}, {type(w3).__name__} and {type(w2).__name__}"
        )
    inner = (w1.rows, w1.channels) if prepared else w1.shape[-2:]
    outer = (w2.rows, w2.channels) if prepared else w2.shape[-2:]
    if inner[1] != codes.shape[1] or outer != (inner[1], inner[0]):
        raise KernelError(
            f"{OP} needs gate [width, channels] and down [channels, width] beside tokens of "
            f"{codes.shape[1]} channels, got {inner} and {outer}"
        )
    if offsets.ndim != 1 or offsets.shape[0] < 2 or token.ndim != 1 or token.shape != weight.shape:
        raise KernelError(
            f"{OP} needs offsets [experts + 1] and row_token and row_weight [rows], got "
            f"{offsets.shape}, {token.shape} and {weight.shape}"
        )
