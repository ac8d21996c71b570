"""grouped_matmul: layout, work lists, the Hopper body under the interpreter, edges, refusals."""

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import core
from pallas_kernels._mosaic import run_interpreted
from pallas_kernels.errors import KernelError, KernelUnsupported
from pallas_kernels.grouped_matmul import layout, pallas_sm90, plan
from pallas_kernels.grouped_matmul.api import prepare_experts, routed_experts
from pallas_kernels.grouped_matmul.arg_specs import CASES
from pallas_kernels.grouped_matmul.configs import TABLE, GroupedConfig, config_for


def generator(seed):
    return np.random.default_rng(seed)


def experts(rng, *shape, low=117, high=124):
    payload = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    scale = rng.integers(low, high, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)
    return core.QuantArray(jnp.asarray(payload), jnp.asarray(scale), "fp4_row32")


def round_bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def oracle_hidden(x, gate_w, up_w, weight, limit):
    """Returns Q8(bf16(silu(g) * u * w)) in float64 but for the documented roundings."""
    gate = np.minimum(round_bf16(x @ gate_w.T), limit)
    up = np.clip(round_bf16(x @ up_w.T), -limit, limit)
    active = round_bf16(gate / (1 + np.exp(-gate)) * up * weight[:, None])
    return np.asarray(core.fake_q8(jnp.asarray(active, jnp.float32)), np.float64)


def mostly_equal(found, expected, step):
    """At most 1 % of the values differ, each by a rounding step of the largest value around."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert np.mean(found != expected) <= 0.01
    np.testing.assert_allclose(found, expected, rtol=step, atol=step * np.abs(expected).max())


def arguments(spec, seed=0) -> Any:
    """Returns the arguments of one ArgSpec, routed at random; one expert in three stays empty."""
    (tokens, channels), _, (count, width, _), *_, (rows,) = spec.shapes
    rng = generator(seed)
    codes, scale = core.quantize_q8(jnp.asarray(rng.standard_normal((tokens, channels))))
    weights = [experts(rng, count, *s) for s in ((width, channels),) * 2 + ((channels, width),)]
    used = np.flatnonzero(np.arange(count) % 3 != 1)
    ids = jnp.asarray(rng.choice(used, (tokens, rows // tokens)))
    groups = plan.group_rows(ids, count)
    weight = jnp.asarray(rng.uniform(0.1, 1, rows), jnp.float32)
    return codes, scale, *weights, groups.offsets, groups.order // (rows // tokens), weight


# layout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"), [(0, 129), pytest.param(117, 124, marks=pytest.mark.slow)]
)
def test_words_decode_to_the_weights(low, high):
    rng = generator(1)
    w1, w3 = (experts(rng, 2, 96, 160, low=low, high=high) for _ in range(2))
    w2 = experts(rng, 2, 160, 96, low=low, high=high)
    gate_up, nothing, down = prepare_experts(w1, w3, w2)
    assert nothing is None
    assert gate_up.words.shape == (2, 2, 2, *layout.UNIT_WORDS)
    for expert in range(2):
        found = [*layout.decode_expert(gate_up.words[expert], interleaved=True)]
        found += layout.decode_expert(down.words[expert], interleaved=False)
        for dense, w in zip(found, (w1, w3, w2), strict=True):
            rows, channels = w.shape[1:]
            expected = np.asarray(w[expert].dequantize().astype(jnp.bfloat16), np.float32)
            np.testing.assert_array_equal(np.asarray(dense[:rows, :channels], np.float32), expected)
            assert not np.asarray(dense[rows:], np.float32).any()
            assert not np.asarray(dense[:, channels:], np.float32).any()


def test_register_steps_move_the_code_bits_to_a_bfloat16():
    for steps, places in zip(layout.REGISTER_STEPS, layout.CODE_BITS, strict=True):
        for place, target in zip(places, (15, 8, 7, 6), strict=True):
            for half in (0, 16):
                word = np.uint64(1 << (place + half))
                register = 0
                for shift, mask in steps:
                    moved = int(word) << shift if shift >= 0 else int(word) >> -shift
                    register |= moved & 0xFFFFFFFF & (mask * 0x10001)
                assert register == 1 << (target + half)


def test_each_bit_of_a_word_belongs_to_one_code():
    bits = [bit for places in layout.CODE_BITS for bit in places]
    assert sorted(bits) == list(range(16))


def test_refuses_scales_that_the_decode_does_not_cover():
    rng = generator(2)
    w1, w3 = (experts(rng, 1, 64, 64, low=129, high=130) for _ in range(2))
    with pytest.raises(KernelError, match="scale byte 129"):
        prepare_experts(w1, w3, experts(rng, 1, 64, 64))


# work lists --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "tokens", "slots", "tile_n"),
    [(5, 7, 2, 16), (384, 64, 6, 16), (3, 100, 2, 32), (8, 1, 1, 16), (2, 40, 1, 16)],
)
def test_tiles_cover_every_row_of_every_expert_once(count, tokens, slots, tile_n):
    ids = generator(count).integers(-1, count + 1, (tokens, slots))
    groups = plan.group_rows(jnp.asarray(ids), count)
    flat = np.where((ids < 0) | (ids >= count), count, ids).reshape(-1)
    offsets = np.searchsorted(np.sort(flat), np.arange(count + 1))
    np.testing.assert_array_equal(groups.order, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(groups.offsets, offsets)
    tiles = plan.plan_tiles(groups.offsets, flat.size, tile_n)
    expected, used, row = [], [], 0
    for expert, (start, end) in enumerate(pairwise(offsets)):
        for first in range(start, end, tile_n):
            valid = min(tile_n, end - first)
            used.append((expert, row + first - start, valid))
            expected.append((first, valid))
        source = np.asarray(tiles.source[row : row + end - start])
        np.testing.assert_array_equal(source, np.arange(start, end))
        row += -(-(end - start) // 8) * 8
    assert (np.asarray(tiles.source) >= 0).sum() == offsets[-1]
    assert row + tile_n <= tiles.source.size
    count_used = int(tiles.count[0])
    columns = (np.asarray(a) for a in (tiles.expert, tiles.first, tiles.valid))
    found = np.stack([*columns], axis=1)
    np.testing.assert_array_equal(found[:count_used], np.asarray(used).reshape(-1, 3))
    assert not found[count_used:].any()
    # the kernel loads routing weights in pairs and token rows in blocks of eight
    assert not (found[:, 1] % 8).any()
    assert tiles.source.size % 8 == 0
    for tile, (first, valid) in enumerate(expected):
        place = tile * tile_n + np.arange(valid)
        np.testing.assert_array_equal(tiles.position[first : first + valid], place)


def test_both_products_of_a_bucket_share_their_tiles_of_tokens():
    for (product, bound), config in TABLE.items():
        other = TABLE["down" if product == "gate_up" else "gate_up", bound]
        assert config.tile_n == other.tile_n
        assert config.tile_n % 16 == 0
    assert config_for("gate_up", 1536, 384, 36).tile_n == 16
    assert config_for("down", 49152, 384, 40).tile_n == 144
    # a block of fewer warpgroups starts with more registers than the table's row asks for
    narrow = config_for("down", 8, 4, 3)
    assert (narrow.consumers, narrow.registers) == (1, 240)


# the body under the interpreter ------------------------------------------------------------------


@pytest.mark.parametrize("spec", [c for c in CASES if c.tier == "interpret"], ids=lambda c: c.name)
def test_interpreter_equals_reference_on_every_case(spec):
    args = arguments(spec)
    offsets = np.asarray(args[5])
    assert spec.name == "one row" or (np.diff(offsets) == 0).any() or spec.name == "ragged tail"
    run = partial(routed_experts, **spec.kwargs)
    found = run_interpreted(partial(run, implementation="pallas_interpret"), *args)
    expected = run(*args, implementation="xla")
    rows = int(offsets[-1])
    mostly_equal(found[:rows], expected[:rows], 2.0**-4)


COUNTS = (5, 0, 18)  # ragged, empty, more than one tile
ROWS = sum(COUNTS)


@pytest.fixture(scope="module")
def poisoned():
    """Three experts, 64 channels; rows and weights behind the last row are NaN."""
    rng = generator(3)
    shapes = ((64, 128), (64, 128), (128, 64))
    weights = [experts(rng, 3, *shape) for shape in shapes]
    x = core.fake_q8(jnp.asarray(rng.standard_normal((ROWS, 128)), jnp.float32))
    weight = jnp.asarray(rng.uniform(0.1, 1, ROWS), jnp.float32)
    offsets = jnp.asarray(np.cumsum((0, *COUNTS)), jnp.int32)
    gate_up, _, down = prepare_experts(*weights)
    return weights, x.astype(jnp.bfloat16), weight, offsets, gate_up.words, down.words


def hidden(poisoned, config, limit=10.0, poison=jnp.nan):
    """Returns the sorted rows of the gate+up kernel, and its output and tiles as they are."""
    _, x, weight, offsets, words, _ = poisoned
    tiles = plan.plan_tiles(offsets, ROWS, config.tile_n)
    real = tiles.source >= 0
    x = jnp.where(real[:, None], x[tiles.source], jnp.asarray(poison, x.dtype))
    weight = jnp.where(real, weight[tiles.source], poison)
    fn = pallas_sm90.build(config, gate_up=True, limit=limit, interpret=True, num_sms=1)
    out = run_interpreted(fn, x, words, weight, tiles.expert, tiles.first, tiles.valid, tiles.count)
    return out[tiles.position], out, tiles


def test_kernels_equal_float64_with_nan_in_the_padding(poisoned):
    weights, x, weight, _, _, down = poisoned
    config = GroupedConfig(16, consumers=1, stages=2)
    rows, out, tiles = hidden(poisoned, config, limit=1.5)
    gate_w, up_w, down_w = (np.asarray(w.dequantize(), np.float64) for w in weights)
    expert = np.repeat(np.arange(3), COUNTS)
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    expected = [
        oracle_hidden(x[r : r + 1], gate_w[e], up_w[e], weight[r : r + 1], 1.5)
        for r, e in enumerate(expert)
    ]
    mostly_equal(rows[:, :64], np.concatenate(expected), 2.0**-3)
    fn = pallas_sm90.build(config, gate_up=False, interpret=True, num_sms=1)
    own = jnp.arange(tiles.expert.shape[0], dtype=jnp.int32) * 16
    y = run_interpreted(fn, out, down, jnp.zeros(1), tiles.expert, own, tiles.valid, tiles.count)
    h = np.asarray(rows, np.float64)[:, :64]
    exact = np.stack([h[r] @ down_w[e].T for r, e in enumerate(expert)])
    size = np.stack([np.abs(h[r]) @ np.abs(down_w[e]).T for r, e in enumerate(expert)])
    error = np.abs(np.asarray(y[tiles.position], np.float64) - exact)
    np.testing.assert_array_less(error, 2.0**-8 * np.abs(exact) + 2.0**-20 * size + 1e-30)


@pytest.mark.parametrize("config", [GroupedConfig(32, 2, 2), GroupedConfig(16, 1, 3)], ids=str)
def test_bits_do_not_depend_on_tiles_or_padding(poisoned, config):
    expected, *_ = hidden(poisoned, GroupedConfig(16, consumers=1, stages=2))
    found, *_ = hidden(poisoned, config, poison=1e30)
    np.testing.assert_array_equal(
        np.asarray(found).view(np.uint16), np.asarray(expected).view(np.uint16)
    )


# the api -----------------------------------------------------------------------------------------


def test_prepared_weights_and_a_group_offset_give_the_same():
    spec = next(c for c in CASES if c.name == "empty groups")
    codes, scale, w1, w3, w2, *rest = arguments(spec)
    plain = routed_experts(codes, scale, w1, w3, w2, *rest)
    stacked = prepare_experts(
        *(jax.tree.map(lambda a: jnp.concatenate([a, a]), w) for w in (w1, w3, w2))
    )
    prepared = routed_experts(codes, scale, *stacked, *rest, first_group=jnp.int32(6))
    np.testing.assert_array_equal(np.asarray(plain, np.float32), np.asarray(prepared, np.float32))


def test_refuses_checkpoint_weights_too_large_to_rearrange_in_a_call():
    spec = next(c for c in CASES if c.tier == "real")
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in zip(spec.shapes, spec.dtypes, strict=True)]

    def call(codes, scale, p1, p3, p2, *rest):
        weights = []
        for payload in (p1, p3, p2):
            groups, rows, last = payload.shape
            scales = jnp.zeros((groups, rows, last // 16), jnp.uint8)
            weights.append(core.QuantArray(payload, scales, "fp4_row32"))
        return routed_experts(codes, scale, *weights, *rest, implementation="mosaic_sm90")

    with pytest.raises(KernelUnsupported, match="prepare_experts"):
        jax.eval_shape(call, *shapes)


def test_refuses_an_unknown_implementation_and_shapes_that_do_not_fit():
    args = arguments(next(c for c in CASES if c.name == "one row"))
    with pytest.raises(KernelUnsupported, match="cutlass"):
        routed_experts(*args, implementation="cutlass")
    with pytest.raises(KernelError, match="scales"):
        routed_experts(args[0], args[1][:, :1], *args[2:])
    with pytest.raises(KernelError, match="row_weight"):
        routed_experts(*(*args[:-1], args[-1][:0]))
