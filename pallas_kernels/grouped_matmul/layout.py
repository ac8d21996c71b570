"""The load-time layout of MXFP4 expert weights, and what a unit of it decodes to.

A unit covers 128 weight rows x 128 channels in 17 rows of 128 int32 words (8,704 bytes, one
contiguous block in memory): 16 rows of codes, then one row of scales. It is cut so that every
thread of a warpgroup reads the eight E2M1 codes of its share of one 64 x 16 wgmma operand as one
word, and turns the word into four packed pairs of bfloat16 with eleven integer operations and four
multiplies (kernels.md 1.4):

- codes: ``words[(2 * block + half) * 4 ...]``, four rows = 128 threads x 4 words. ``block`` counts
  64-row blocks, ``half`` 64-channel halves; word j of a thread covers channels 16 j to 16 j + 15.
- In a word both 16-bit halves are alike: the low half holds the even channel. Register i takes
  sign, and magnitude bits 2, 1, 0, from the bits ``CODE_BITS[i]`` of each half. Registers 0 to 2
  need one shift and one mask, because their four bits lie as in a bfloat16.
- scales: ``words[16, r]`` holds, lowest byte first, the four exponents of row r as ``S + 126``:
  the bfloat16 exponent of ``2^(S - 1)``, into which the decode's 2^126 is folded.

Gate and up rows are interleaved in blocks of 64, so that a unit holds 64 gate rows (block 0) and
the matching 64 up rows (block 1), and one warpgroup has both factors of a product.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from pallas_kernels.core import QuantArray, unpack_nibbles
from pallas_kernels.core.codes import as_bytes, decode_e2m1, scale_by_e8m0
from pallas_kernels.errors import KernelError

UNIT_ROWS = 128
UNIT_CHANNELS = 128
UNIT_WORDS = (17, 128)
BLOCK_ROWS = 64
HALF_CHANNELS = 64
SCALE_ROW = 16
#: Largest E8M0 byte whose factor 2^(S - 1) is a finite bfloat16.
MAX_SCALE = 128
SCALE_OFFSET = 126

#: (sign, magnitude bit 2, bit 1, bit 0) of each register's code, as bits of a 16-bit half word.
CODE_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
#: What turns a word into register i, a bfloat16 code (sign bit 15, magnitude bits 8 to 6) in both
#: halves: the OR of ``(word << shift) & mask``, a negative shift to the right.
REGISTER_STEPS = (
    ((0, 0x81C0),),
    ((3, 0x81C0),),
    ((6, 0x81C0),),
    ((1, 0x8000), (-5, 0x0100), (-4, 0x00C0)),
)


def _split_words(codes: jax.Array) -> jax.Array:
    """Returns int32 words [16, 128] of the uint8 codes [128, 128] of one unit."""
    # row = block 64, warp 16, r8 8, lane row; channel = half 64, j 16, k8 8, lane pair 2, p
    parts = codes.astype(jnp.uint32).reshape(2, 4, 2, 8, 2, 4, 2, 4, 2)
    # -> block, half, warp, lane row, lane pair, j, k8, r8, p
    parts = parts.transpose(0, 4, 1, 3, 7, 5, 6, 2, 8)
    registers = parts.reshape(16, 128, 4, 2)
    word = jnp.zeros((16, 128), jnp.uint32)
    for i, (sign, *magnitude) in enumerate(CODE_BITS):
        for p in range(2):
            code = registers[:, :, i, p]
            word |= (code >> 3) << (sign + 16 * p)
            for bit, place in zip((2, 1, 0), magnitude, strict=True):
                word |= ((code >> bit) & 1) << (place + 16 * p)
    return lax.bitcast_convert_type(word, jnp.int32)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words"],
    meta_fields=["rows", "channels", "interleaved"],
)
@dataclasses.dataclass(frozen=True)
class ExpertWords:
    """MXFP4 weights of a stack of experts in the kernel layout.

    Attributes:
        words: int32 [..., units, steps, 17, 128]; rows and channels are padded with zeros to whole
            units and to an even number of units and steps.
        rows: logical rows of one expert (of gate and up each, if interleaved).
        channels: logical channels.
        interleaved: whether a unit holds 64 gate and 64 up rows rather than 128 rows.
    """

    words: Any
    rows: int
    channels: int
    interleaved: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights as they are stored: stacks, rows, channels."""
        return (*self.words.shape[:-4], self.rows, self.channels)


def _pad(codes: jax.Array, rows: int, last: int) -> jax.Array:
    return jnp.pad(codes, [(0, rows - codes.shape[0]), (0, last - codes.shape[1])])


def _round_up(size: int) -> int:
    return -(-size // UNIT_CHANNELS) * UNIT_CHANNELS


def _prepare_expert(payload: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns int32 [units, steps, 17, 128] of bytes [n, k / 2] and scales [n, k / 32]."""
    rows, channels = payload.shape[0], 2 * payload.shape[1]
    codes = unpack_nibbles(payload)
    units, steps = rows // UNIT_ROWS, channels // UNIT_CHANNELS
    tiles = codes.reshape(units, UNIT_ROWS, steps, UNIT_CHANNELS).swapaxes(1, 2)
    words = jax.vmap(jax.vmap(_split_words))(tiles)
    exponents = (scale.astype(jnp.uint32) + SCALE_OFFSET).reshape(units, UNIT_ROWS, steps, 4)
    shifted = exponents << np.arange(0, 32, 8, dtype=np.uint32)
    row = (shifted[..., 0] | shifted[..., 1] | shifted[..., 2] | shifted[..., 3]).swapaxes(1, 2)
    return jnp.concatenate([words, lax.bitcast_convert_type(row, jnp.int32)[:, :, None]], axis=2)


def _interleave(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns rows [2 n, k] in alternating blocks of 64 gate rows and 64 up rows."""
    blocks = [a.reshape(-1, 1, BLOCK_ROWS, a.shape[-1]) for a in (gate, up)]
    return jnp.concatenate(blocks, axis=1).reshape(-1, gate.shape[-1])


@jax.jit
def _prepare_stack(*parts: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the words of a stack from one (payload, scale) pair, or two to interleave."""
    lead = parts[0][0].shape[:-2]
    rows, channels = parts[0][0].shape[-2], 2 * parts[0][0].shape[-1]
    whole_rows, whole = _round_up(rows), _round_up(channels)

    def one(expert: tuple[tuple[jax.Array, jax.Array], ...]) -> jax.Array:
        payloads = [_pad(as_bytes(p), whole_rows, whole // 2) for p, _ in expert]
        scales = [_pad(as_bytes(s), whole_rows, whole // 32) for _, s in expert]
        if len(expert) == 2:
            return _prepare_expert(_interleave(*payloads), _interleave(*scales))
        return _prepare_expert(payloads[0], scales[0])

    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[-2:]), parts)
    words = lax.map(one, flat)  # one expert at a time: its codes as bytes are twice its weights
    return words.reshape(*lead, *words.shape[1:])


def _check(name: str, w: QuantArray) -> None:
    if w.format != "fp4_row32" or w.ndim < 3 or w.shape[-1] % 32:
        raise KernelError(
            f"{name} must be MXFP4 experts (fp4_row32, [..., experts, rows, channels], channels a "
            f"multiple of 32), got {w.format} of shape {w.shape}"
        )
    if isinstance(w.scale, jax.Array) and not isinstance(w.scale, Tracer):
        largest = int(jnp.max(as_bytes(w.scale)))
        if largest > MAX_SCALE:
            raise KernelError(
                f"{name} holds scale byte {largest}, and the register decode covers bytes up to "
                f"{MAX_SCALE} (2^{MAX_SCALE - 127}): use implementation='xla'"
            )


def prepare_experts(
    w1: QuantArray, w3: QuantArray, w2: QuantArray
) -> tuple[ExpertWords, None, ExpertWords]:
    """Returns a stack of experts in the kernel layout; called once, at load.

    Args:
        w1: gate, MXFP4, logical shape [..., experts, width, channels].
        w3: up, the same shape.
        w2: down, [..., experts, channels, width].

    Returns:
        (gate and up interleaved, None, down), in the places of w1, w3 and w2.

    Raises:
        KernelError: another format, shapes that do not fit, or a scale above 2^1 (checked where
            the arrays are concrete).
    """
    for name, w in (("w1", w1), ("w3", w3), ("w2", w2)):
        _check(name, w)
    *lead, width, channels = w1.shape
    if w3.shape != w1.shape or w2.shape != (*lead, channels, width):
        raise KernelError(
            f"experts need w1 and w3 [..., width, channels] and w2 [..., channels, width], got "
            f"{w1.shape}, {w3.shape} and {w2.shape}"
        )
    gate_up = _prepare_stack((w1.payload, w1.scale), (w3.payload, w3.scale))
    down = _prepare_stack((w2.payload, w2.scale))
    return (
        ExpertWords(gate_up, width, channels, True),
        None,
        ExpertWords(down, channels, width, False),
    )


def decode_block(unit: jax.Array, block: int, half: int) -> jax.Array:
    """Returns the bfloat16 weights [64, 64] of one block and half of a unit int32 [17, 128].

    Plain jnp: what the interpreter and the tests compare the register decode with.
    """
    first = (2 * block + half) * 4
    word = lax.bitcast_convert_type(unit[first : first + 4], jnp.uint32)
    pairs = []
    for sign, *magnitude in CODE_BITS:
        for p in range(2):
            code = ((word >> (sign + 16 * p)) & 1) << 3
            for bit, place in zip((2, 1, 0), magnitude, strict=True):
                code |= ((word >> (place + 16 * p)) & 1) << bit
            pairs.append(code)
    # [warp 4, lane row 8, lane pair 4, j 4, k8 2, r8 2, p 2]
    codes = jnp.stack(pairs, axis=-1).reshape(4, 8, 4, 4, 2, 2, 2)
    codes = codes.transpose(0, 5, 1, 3, 4, 2, 6).reshape(BLOCK_ROWS, 64)
    values = decode_e2m1(codes)
    first = block * BLOCK_ROWS
    scales = lax.bitcast_convert_type(unit[SCALE_ROW, first : first + BLOCK_ROWS], jnp.uint32)
    parts = []
    for group in range(2):
        byte = (((scales >> (8 * (2 * half + group))) & 0xFF) - SCALE_OFFSET).astype(jnp.uint8)
        parts.append(scale_by_e8m0(values[:, 32 * group : 32 * group + 32], byte[:, None]))
    return jnp.concatenate(parts, axis=1).astype(jnp.bfloat16)


def decode_unit(unit: jax.Array) -> jax.Array:
    """Returns the bfloat16 weights [128, 128] of a unit int32 [17, 128]."""
    rows = [
        jnp.concatenate([decode_block(unit, block, half) for half in range(2)], axis=1)
        for block in range(2)
    ]
    return jnp.concatenate(rows, axis=0)


def decode_expert(words: jax.Array, interleaved: bool) -> tuple[jax.Array, ...]:
    """Returns one expert's padded bfloat16 weights: (gate, up) if interleaved, else (weights,).

    Args:
        words: int32 [units, steps, 17, 128].
        interleaved: see ExpertWords.
    """
    units, steps = words.shape[:2]
    tiles = jax.vmap(jax.vmap(decode_unit))(words)
    dense = tiles.swapaxes(1, 2).reshape(units, 2, BLOCK_ROWS, steps * UNIT_CHANNELS)
    if interleaved:
        return tuple(dense[:, i].reshape(units * BLOCK_ROWS, -1) for i in range(2))
    return (dense.reshape(units * UNIT_ROWS, -1),)
