import sys; sys.path[:0]=['/work/main','/work/main/.gpu']
import mla_new, pallas_kernels.sparse_mla_decode as sm
sys.modules['pallas_kernels.sparse_mla_decode.pallas_sm90']=mla_new; sm.pallas_sm90=mla_new
"""sparse_mla_decode: the reference against the network, the Hopper body interpreted, edges."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.model.attention.core import attend as network_attend
from deepinfer_jax.numerics.ops import Ops
from pallas_kernels import _registers, core
from pallas_kernels._mosaic import run_interpreted
from pallas_kernels.errors import KernelError, KernelUnsupported
from pallas_kernels.sparse_mla_decode import gather_sm90, pallas_sm90, reference
from pallas_kernels.sparse_mla_decode.api import sparse_mla_decode
from pallas_kernels.sparse_mla_decode.arg_specs import CASES
from pallas_kernels.sparse_mla_decode.configs import DIM, TABLE, MlaConfig

INTERPRETED = [spec for spec in CASES if spec.tier == "interpret"]


def cache_of(rng, rows, row_bytes, dim):
    """Returns quantised random keys, uint8 [rows, row_bytes]."""
    keys = jnp.asarray(rng.standard_normal((rows, dim)), jnp.float32)
    return _stored(keys, row_bytes == dim + dim // 32)


@partial(jax.jit, static_argnums=1)  # op by op it is dozens of programs for every shape
def _stored(keys, is_q8):
    return jnp.concatenate(core.quantize_q8(keys) if is_q8 else core.quantize_q4n(keys), axis=1)


def ids_of(rng, tokens, ranks, rows, valid=None):
    """Returns distinct ascending ids int32 [tokens, ranks]; the first `valid` of them, then -1."""
    valid = [min(ranks, rows)] * tokens if valid is None else valid
    out = np.full((tokens, ranks), -1, np.int32)
    for token, count in enumerate(valid):
        out[token, :count] = np.sort(rng.choice(rows, count, replace=False))
    return jnp.asarray(out)


def arguments(shapes, seed=0, valid=None) -> Any:
    """Returns api arguments for shapes (q, cache, ids[, cache, ids], sink)."""
    rng = np.random.default_rng(seed)
    (tokens, heads, dim), *sets, _ = shapes
    q = jnp.asarray(3 * rng.standard_normal((tokens, heads, dim)), jnp.bfloat16)
    filled: list[Any] = []
    for (rows, row_bytes), (_, ranks) in zip(sets[::2], sets[1::2], strict=True):
        filled += [cache_of(rng, rows, row_bytes, dim), ids_of(rng, tokens, ranks, rows, valid)]
    filled += [None] * (4 - len(filled))
    return q, *filled, jnp.asarray(rng.standard_normal(heads), jnp.float32)


def interpreted(args, config=None, with_lse=False, num_sms=2):
    """Runs the Hopper body of `args` (whole blocks of ranks) under the interpreter."""
    q, window, window_ids, selected, selected_ids, sink = args
    second = () if selected is None else (selected, selected_ids)
    config = config or TABLE[528]
    run = pallas_sm90.build(config, with_lse=with_lse, interpret=True, num_sms=num_sms)
    return run_interpreted(run, q, sink, window, window_ids, *second)


def mostly_equal(found, expected):
    """At most 1 % of the values differ, each by a BF16 step of the largest value around."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert np.mean(found != expected) <= 0.01
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-8 * np.abs(expected).max())


def bits(x):
    return np.asarray(x).view(np.uint16)


def decoded(args):
    """Returns float64 keys [t, s, c] and validity [t, s] of a call's list."""
    q, *sets, _ = args
    keys, valid = [], []
    for cache, ids in zip(sets[::2], sets[1::2], strict=True):
        if cache is not None:
            keys.append(np.asarray(reference.read_rows(cache, ids, q.shape[2]), np.float64))
            valid.append(np.asarray(ids) >= 0)
    return np.concatenate(keys, axis=1), np.concatenate(valid, axis=1)


# the reference ----------------------------------------------------------------------------------

SMALL = (
    ((5, 4, 64), (50, 66), (5, 64), (40, 36), (5, 24), (4,)),
    ((3, 4, 64), (90, 66), (3, 70), (4,)),
    ((9, 2, 64), (80, 66), (9, 64), (80, 66), (9, 64), (2,)),
)


@pytest.mark.parametrize("shapes", SMALL)
def test_reference_has_the_bits_of_the_network(shapes):
    q, *sets, sink = arguments(shapes)
    sets[1] = sets[1].at[0, 3].set(-1)  # a hole in a block
    args = (q, *sets, sink)
    pairs = [(c, i) for c, i in zip(sets[::2], sets[1::2], strict=True) if c is not None]
    keys = jnp.concatenate([reference.read_rows(c, i, q.shape[2]) for c, i in pairs], axis=1)
    valid = jnp.concatenate([i >= 0 for _, i in pairs], axis=1)
    ops = Ops(fixed_order=True, rounded=True)
    expected = network_attend(ops, q.astype(jnp.float32), keys, valid, sink)
    found = jax.jit(partial(sparse_mla_decode, implementation="xla"))(*args)
    rounded = core.round_bf16(expected).astype(jnp.bfloat16)
    np.testing.assert_array_equal(bits(found), bits(rounded))


@pytest.mark.parametrize("shapes", SMALL)
def test_reference_is_near_float64(shapes):
    args = arguments(shapes, seed=1)
    q, sink = np.asarray(args[0], np.float64), np.asarray(args[-1], np.float64)
    keys, valid = decoded(args)
    scores = np.einsum("thc,tsc->ths", q, keys) * q.shape[2] ** -0.5
    weight = np.where(valid[:, None, :], np.exp(scores), 0)
    total = weight.sum(axis=-1) + np.exp(sink)
    expected = np.einsum("ths,tsc->thc", weight, keys) / total[..., None]
    size = np.einsum("ths,tsc->thc", weight, np.abs(keys)) / total[..., None]
    found, lse = sparse_mla_decode(*args, with_lse=True)
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert (error <= 2**-8 * np.abs(expected) + 2**-8 * size).all()
    np.testing.assert_allclose(np.asarray(lse), np.log(total), rtol=1e-5, atol=1e-5)


# codes in registers ------------------------------------------------------------------------------


def permute(a, b, selector):
    """Returns what the instruction prmt.b32 makes of two words."""
    parts = [a >> (8 * i) & 0xFF for i in range(4)] + [b >> (8 * i) & 0xFF for i in range(4)]
    chosen = [selector >> (4 * i) & 15 for i in range(4)]
    # bit 3 of a selector asks for eight times the byte's sign
    made = [0xFF * (parts[c & 7] >> 7) if c & 8 else parts[c] for c in chosen]
    return sum(byte << (8 * i) for i, byte in enumerate(made))


def halves(word):
    return (
        np.asarray([word & 0xFFFF, word >> 16], np.uint16)
        .view(ml_dtypes.bfloat16)
        .astype(np.float64)
    )


def register_pairs(word, recipe):
    """Returns the values of the pairs of a word, before the row's scale, as float64."""
    first, found = word << recipe.raised & 0xFFFFFFFF, []
    for selector in recipe.moves:
        moved = permute(first, word, selector) << recipe.shift
        found += list(halves(moved & recipe.mask * 0x10001) * 2.0**recipe.power)
    return np.asarray(found)


def test_register_moves_of_q8_give_every_code():
    codes = np.arange(256, dtype=np.uint8)
    expected = np.asarray(core.decode_e4m3(jnp.asarray(codes)), np.float64)
    words = codes.view("<u4").tolist()
    found = np.concatenate([register_pairs(word, _registers.Q8) for word in words])
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[finite], expected[finite])


def test_register_moves_of_q4n_give_every_code():
    packed = np.arange(256, dtype=np.uint8)
    packed = np.concatenate([packed, np.roll(packed, 1)])
    expected = np.asarray(core.decode_e2m1(core.unpack_nibbles(jnp.asarray(packed))), np.float64)
    words = packed.view("<u4").tolist()
    found = np.concatenate([register_pairs(word, _registers.Q4N) for word in words])
    np.testing.assert_array_equal(found, expected)


def test_lanes_write_their_channels_where_products_read_them():
    # a block is [2, 64, 256] in tiles of 8 x 64; a tile's row is eight pieces of 16 bytes, which
    # are exchanged by the row's number
    row, channel = np.meshgrid(np.arange(64), np.arange(512), indexing="ij")
    tile = channel // 256 * 32 + row // 8 * 4 + channel % 256 // 64
    piece = channel % 64 // 8 ^ row % 8
    expected = tile * 1024 + row % 8 * 128 + piece * 16
    lane = np.arange(32)
    for warp, of_warp in np.ndindex(8, 8):
        place, swapped = gather_sm90.lane_place(warp, lane, of_warp)
        first = 16 * lane + 8 * swapped
        np.testing.assert_array_equal(place, expected[8 * warp + of_warp, first])
        np.testing.assert_array_equal(
            place ^ 16, expected[8 * warp + of_warp, 16 * lane + 8 * (1 - swapped)]
        )
        # eight lanes at a time write all 32 banks
        banks = place.reshape(4, 8) % 128 // 16
        np.testing.assert_array_equal(np.sort(banks), np.tile(np.arange(8), (4, 1)))


# the kernel, interpreted -------------------------------------------------------------------------


@pytest.mark.parametrize("spec", INTERPRETED, ids=lambda spec: spec.name)
def test_interpreter_equals_the_reference(spec):
    args = arguments(spec.shapes)
    expected, expected_lse = sparse_mla_decode(*args, with_lse=True)
    found, lse = sparse_mla_decode(*args, with_lse=True, implementation="pallas_interpret")
    mostly_equal(found, expected)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(expected_lse), rtol=1e-5, atol=1e-5)


def test_short_lists_and_empty_rows():
    lengths = [0, 1, 63, 64, 65]
    shapes = ((5, 64, DIM), (130, 528), (5, 128), (64,))
    args = arguments(shapes, seed=3, valid=lengths)
    expected, expected_lse = sparse_mla_decode(*args, with_lse=True)
    found, lse = interpreted(args, with_lse=True)
    mostly_equal(found, expected)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(expected_lse), rtol=1e-5, atol=1e-5)
    assert not np.asarray(found[0], np.float32).any()
    np.testing.assert_array_equal(np.asarray(lse[0]), np.asarray(args[-1]))


def test_holes_and_empty_blocks_change_nothing_but_their_keys():
    shapes = ((2, 64, DIM), (70, 528), (2, 64), (200, 288), (2, 192), (64,))
    q, window, window_ids, selected, selected_ids, sink = arguments(shapes, seed=4)
    window_ids = window_ids.at[0].set(-1).at[1, 5].set(-1)
    selected_ids = selected_ids.at[:, 64:128].set(-1).at[1, 0].set(-1)
    args = (q, window, window_ids, selected, selected_ids, sink)
    found = interpreted(args)
    mostly_equal(found, sparse_mla_decode(*args))
    shorter = jnp.concatenate([selected_ids[:, :64], selected_ids[:, 128:]], axis=1)
    without = interpreted((q, window, window_ids, selected, shorter, sink))
    np.testing.assert_array_equal(bits(found), bits(without))


def test_rows_that_no_id_names_may_hold_anything():
    shapes = ((2, 64, DIM), (80, 528), (2, 64), (90, 288), (2, 64), (64,))
    q, window, window_ids, selected, selected_ids, sink = arguments(shapes, seed=5)
    window_ids = window_ids.at[0, 40:].set(-1)
    found = interpreted((q, window, window_ids, selected, selected_ids, sink))
    for poison in (0x7F, 0xFF):  # NaN codes, NaN exponents and scales
        spoilt = []
        for cache, ids in ((window, window_ids), (selected, selected_ids)):
            used = np.isin(np.arange(cache.shape[0]), np.asarray(ids))
            spoilt.append(jnp.where(jnp.asarray(used)[:, None], cache, jnp.uint8(poison)))
        again = interpreted((q, spoilt[0], window_ids, spoilt[1], selected_ids, sink))
        np.testing.assert_array_equal(bits(found), bits(again))


def test_bits_of_a_token_do_not_depend_on_the_others():
    shapes = ((5, 64, DIM), (130, 528), (5, 128), (64,))
    q, window, ids, *_, sink = arguments(shapes, seed=6, valid=[128, 7, 0, 65, 100])
    whole = interpreted((q, window, ids, None, None, sink))
    config = MlaConfig(registers=176, gather_registers=80, out_slots=2)
    order = np.asarray([3, 0, 4, 2, 1], np.int32)
    other = interpreted((q[order], window, ids[order], None, None, sink), config, num_sms=1)
    np.testing.assert_array_equal(bits(whole)[order], bits(other))
    for token in (0, 3):
        pick = slice(token, token + 1)
        alone = interpreted((q[pick], window, ids[pick], None, None, sink))
        np.testing.assert_array_equal(bits(whole)[pick], bits(alone))


def test_no_tokens():
    args = arguments(((2, 64, DIM), (70, 528), (2, 64), (64,)))
    q, window, ids, *_, sink = args
    for implementation in ("xla", "pallas_interpret", "mosaic_sm90"):
        out, lse = sparse_mla_decode(
            q[:0], window, ids[:0], None, None, sink, with_lse=True, implementation=implementation
        )
        assert (out.shape, lse.shape) == ((0, 64, DIM), (0, 64))


# refusals ----------------------------------------------------------------------------------------


def test_refuses_ids_that_name_a_row_twice_or_none():
    args = list(arguments(SMALL[0]))
    args[4] = args[4].at[2, 1].set(args[4][2, 0])
    with pytest.raises(KernelError, match=r"distinct selected_ids.* in token 2"):
        sparse_mla_decode(*args)
    args[4] = args[4].at[2, 1].set(40)
    with pytest.raises(KernelError, match="selected_ids from -1 to 39"):
        sparse_mla_decode(*args)


@pytest.mark.parametrize(
    ("place", "change", "match"),
    [
        (0, lambda q: q.astype(jnp.float32), "q bfloat16"),
        (1, lambda c: c[:, :-1], "window rows uint8"),
        (2, lambda i: i[:, :-1], "whole blocks of 64"),
        (2, lambda i: i[:-1], "window_ids int32"),
        (3, lambda c: c.astype(jnp.int8), "selected rows uint8"),
        (4, lambda i: None, "or None for both"),
        (5, lambda s: s[:-1], "sink"),
    ],
)
def test_refuses_shapes_that_do_not_fit(place, change, match):
    args = list(arguments(SMALL[0]))
    args[place] = change(args[place])
    with pytest.raises(KernelError, match=match):
        sparse_mla_decode(*args)


def test_named_implementations_run_or_raise():
    args = arguments(SMALL[0])
    with pytest.raises(KernelUnsupported, match="one of"):
        sparse_mla_decode(*args, implementation="triton")
    with pytest.raises(KernelUnsupported, match="512 channels"):
        sparse_mla_decode(*args, implementation="mosaic_sm90")
    q, window, _, *_, sink = arguments(((1, 64, DIM), (70, 528), (1, 64), (64,)))
    ids = jnp.full((1, 2112), -1, jnp.int32)
    with pytest.raises(KernelUnsupported, match="2048 ranks"):
        sparse_mla_decode(q, window, ids, None, None, sink, implementation="mosaic_sm90")


def test_configurations_fit_a_block_of_threads():
    for config in TABLE.values():
        assert config.registers + config.gather_registers <= 256
        assert config.registers % 8 == config.gather_registers % 8 == 0
        assert config.registers >= 168
