"""block_scaled_matmul: the Hopper bodies under the interpreter against float64, edges, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import core
from pallas_kernels._mosaic import run_interpreted
from pallas_kernels.block_scaled_matmul import configs, launch_sm90, pallas_sm100, ring
from pallas_kernels.block_scaled_matmul.api import block_scaled_matmul, matmul_bf16, matmul_fp8
from pallas_kernels.block_scaled_matmul.arg_specs import CASES
from pallas_kernels.block_scaled_matmul.configs import DecodeTile, Tile
from pallas_kernels.block_scaled_matmul.decode_sm90 import matmul_decode
from pallas_kernels.block_scaled_matmul.pallas_sm90 import matmul_bf16 as body_bf16
from pallas_kernels.block_scaled_matmul.pallas_sm90 import matmul_fp8 as body_fp8
from pallas_kernels.errors import KernelError, KernelUnsupported

E4M3 = jnp.float8_e4m3fn


def generator(seed):
    return np.random.default_rng(seed)


def e4m3(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape) * 4, E4M3)


def bf16(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def close(out, x, w, c=2.0**-20):
    """Checks |out - x w^T| <= 2^-8 |x w^T| + c sum |x w| in float64 (kernels.md 7)."""
    exact, size = x @ w.T, np.abs(x) @ np.abs(w).T
    np.testing.assert_array_less(
        np.abs(np.asarray(out, np.float64) - exact), 2.0**-8 * np.abs(exact) + c * size + 1e-30
    )


def block32(rng, n, k):
    payload = jax.lax.bitcast_convert_type(e4m3(rng, n, k), jnp.uint8)
    scale = jnp.asarray(rng.integers(110, 130, (-(-n // 32), -(-k // 32))), jnp.uint8)
    return core.QuantArray(payload, scale, "fp8_block32")


@pytest.mark.parametrize("spec", [c for c in CASES if c.tier == "interpret"], ids=lambda c: c.name)
def test_equals_float64_on_every_interpreted_shape(spec):
    (m, k), _, (n, _), _ = spec.shapes
    rng = generator(m + n)
    w = block32(rng, n, k)
    codes, scale = core.quantize_q8(jnp.asarray(rng.standard_normal((m, k)), jnp.float32))
    call = functools.partial(block_scaled_matmul, implementation="pallas_interpret")
    out = run_interpreted(call, codes, scale, w)
    assert out.shape == (m, n)
    assert out.dtype == jnp.bfloat16
    values = core.dequantize_q8(codes, scale).astype(jnp.bfloat16)
    reference = block_scaled_matmul(values, None, w, implementation="xla")
    np.testing.assert_allclose(np.float32(out), np.float32(reference), rtol=2.0**-7, atol=1e-3)
    x = np.asarray(core.dequantize_q8(codes, scale), np.float64)
    close(out, x, np.asarray(core.dequantize(w), np.float64))


def test_edge_values_are_decoded_exactly():
    """Zeros, subnormal and largest codes, both signs of zero, far apart scales.

    Scales whose products are float32 subnormals are left out: XLA on a CPU flushes those.
    """
    rng = generator(3)
    k, n, m = 128, 64, 8
    codes = np.asarray(rng.integers(0, 127, (n, k)) | (rng.integers(0, 2, (n, k)) << 7), np.uint8)
    codes[0], codes[1, ::2], codes[2] = 0, 0x7E, 1
    scale = np.asarray([[12, 127, 120, 140], [100, 90, 127, 200]], np.uint8)
    w = core.QuantArray(jnp.asarray(codes), jnp.asarray(scale), "fp8_block32")
    # one token a channel group: every output is one group's sum
    x = np.zeros((m, k), np.float32)
    for row in range(m):
        x[row, 16 * row] = 1
    x_codes, x_scale = core.quantize_q8(jnp.asarray(x))
    out = run_interpreted(
        functools.partial(block_scaled_matmul, implementation="pallas_interpret"),
        x_codes, x_scale, w,
    )  # fmt: skip
    byte = np.repeat(np.repeat(scale, 32, 0), 32, 1).astype(np.float64)
    values = np.asarray(core.decode_e4m3(jnp.asarray(codes)), np.float64) * 2.0 ** (byte - 127)
    expected = np.asarray(x, np.float64) @ values.T
    np.testing.assert_array_equal(np.asarray(out, np.float64), expected)


@pytest.mark.parametrize(
    ("shape", "groups", "tile"),
    [
        ((128, 256, 320), 1, Tile(cols=256, depth=64, stages=2)),
        ((256, 128, 128), 1, Tile(cols=128, depth=64, stages=2, cluster=2)),
        ((72, 96, 128), 2, Tile(cols=96, depth=64, stages=2, warpgroups=1, out_slots=1)),
        ((128, 128, 128), 1, Tile(rows=128, cols=128, depth=64, stages=2, warpgroups=1)),
    ],
)
def test_bf16_body_equals_float64(shape, groups, tile):
    m, n, k = shape
    rng = generator(1)
    x, w = bf16(rng, m, groups * k), bf16(rng, groups * n, k)
    call = functools.partial(
        body_bf16, tile=tile, out_dtype=jnp.float32, groups=groups, interpret=True, num_sms=2
    )
    out = np.asarray(run_interpreted(call, x, w)).reshape(m, groups, n)
    for g in range(groups):
        a = np.asarray(x, np.float64).reshape(m, groups, k)[:, g]
        close(out[:, g], a, np.asarray(w, np.float64).reshape(groups, n, k)[g])


@pytest.mark.parametrize(
    "tile",
    [
        Tile(stages=2),
        Tile(cols=160, stages=3, unroll=3, ahead=2),
        Tile(cols=192, stages=2, cluster=2, ahead=0),
        Tile(rows=128, stages=2, ahead=0, out_slots=1),
        Tile(rows=128, warpgroups=1, stages=3, unroll=1, cluster=2, share="x"),
    ],
    ids=["plain", "two ahead, 160 columns", "cluster, 192 columns", "128 rows", "shared rows"],
)
def test_fp8_body_equals_float64(tile):
    m, n, k = 256, 512, 384
    rng = generator(2)
    x, w = e4m3(rng, m, k), e4m3(rng, n, k)
    sx = rng.uniform(0.5, 2, (3, m)).astype(np.float32)
    sw = rng.uniform(0.5, 2, (4, 3)).astype(np.float32)
    call = functools.partial(body_fp8, tile=tile, interpret=True, num_sms=2)
    out = run_interpreted(call, x, jnp.asarray(sx), w, jnp.asarray(sw.T))
    a = np.asarray(x, np.float64) * np.repeat(sx.T, 128, 1)
    b = np.asarray(w, np.float64) * np.repeat(np.repeat(sw, 128, 0)[:n], 128, 1)
    close(out, a, b)


@pytest.mark.parametrize(
    "tile",
    [
        DecodeTile(tokens=8, stages=2, blocks=2),
        DecodeTile(tokens=8, stages=2, warpgroups=1, cluster=2),
        DecodeTile(tokens=8, stages=2, warpgroups=4, depth=256),
    ],
)
def test_decode_body_shapes_give_the_same_bits(tile):
    rng = generator(4)
    x, w = bf16(rng, 16, 512), e4m3(rng, 256, 512)
    words = jnp.asarray(rng.integers(115, 128, (8, 16)).astype(np.uint8).view(np.int32).T)

    def run(t):
        return run_interpreted(
            functools.partial(matmul_decode, tile=t, interpret=True, num_sms=2), x, w, words
        )

    plain = run(DecodeTile(tokens=8, stages=3, warpgroups=1))
    np.testing.assert_array_equal(np.asarray(run(tile)), np.asarray(plain))


def test_rows_do_not_see_their_neighbours_or_padding():
    """A row alone, moved, beside NaN and infinity: equal bits."""
    rng = generator(5)
    w = block32(rng, 64, 128)
    x = jnp.asarray(rng.standard_normal((11, 128)), jnp.float32)
    call = functools.partial(block_scaled_matmul, implementation="pallas_interpret")
    codes, scale = core.quantize_q8(x)
    whole = np.asarray(run_interpreted(call, codes, scale, w))
    poisoned = np.array(x)
    poisoned[0], poisoned[2], poisoned[10] = np.nan, np.inf, 1e30
    broken = np.asarray(run_interpreted(call, *core.quantize_q8(jnp.asarray(poisoned)), w))
    kept = [1, *range(3, 10)]
    np.testing.assert_array_equal(broken[kept], whole[kept])
    alone = np.asarray(run_interpreted(call, codes[4:5], scale[4:5], w))
    np.testing.assert_array_equal(alone[0], whole[4])


def test_bf16_product_of_any_width_and_of_groups():
    rng = generator(6)
    x, w = bf16(rng, 3, 72), bf16(rng, 21, 72)
    out = run_interpreted(functools.partial(matmul_bf16, implementation="pallas_interpret"), x, w)
    assert out.dtype == jnp.float32
    close(out, np.asarray(x, np.float64), np.asarray(w, np.float64))
    x, w = bf16(rng, 5, 2, 96), bf16(rng, 2, 40, 96)
    call = functools.partial(matmul_bf16, out_dtype=jnp.bfloat16, implementation="pallas_interpret")
    out = run_interpreted(call, x, w)
    for g in range(2):
        close(out[:, g], np.asarray(x, np.float64)[:, g], np.asarray(w, np.float64)[g])


def test_fp8_form_by_its_api():
    rng = generator(7)
    x, w = e4m3(rng, 5, 256), e4m3(rng, 136, 256)
    sx = jnp.asarray(rng.uniform(0.5, 2, (5, 2)), jnp.float32)
    sw = jnp.asarray(rng.uniform(0.5, 2, (2, 2)), jnp.float32)
    call = functools.partial(matmul_fp8, implementation="pallas_interpret")
    out = run_interpreted(call, x, sx, w, sw)
    reference = matmul_fp8(x, sx, w, sw, implementation="xla")
    a = np.asarray(x, np.float64) * np.repeat(np.asarray(sx, np.float64), 128, 1)
    b = np.asarray(w, np.float64)
    b *= np.repeat(np.repeat(np.asarray(sw, np.float64), 128, 0)[:136], 128, 1)
    close(out, a, b)
    close(reference, a, b)


def test_blackwell_body_equals_float64():
    rng = generator(8)
    x, w = bf16(rng, 65, 320), bf16(rng, 72, 320)
    call = functools.partial(pallas_sm100.matmul, out_dtype=jnp.float32, interpret=True)
    close(run_interpreted(call, x, w), np.asarray(x, np.float64), np.asarray(w, np.float64))


def test_a_missing_wait_is_noticed(monkeypatch):
    """The harness finds a consumer that does not wait for its stage."""
    rng = generator(9)
    call = functools.partial(
        body_bf16,
        tile=Tile(cols=64, depth=64, stages=2, warpgroups=1),
        interpret=True,
        num_sms=1,
    )
    monkeypatch.setattr(ring.Ring, "wait", lambda self, slot: None)
    with pytest.raises(Exception, match=r"barrier|Barrier"):
        run_interpreted(call, bf16(rng, 64, 256), bf16(rng, 64, 256))


def test_no_rows_give_no_rows():
    w = block32(generator(0), 64, 64)
    codes, scale = jnp.zeros((0, 64), jnp.uint8), jnp.zeros((0, 2), jnp.uint8)
    for name in ("xla", "pallas_interpret", "mosaic_sm90", "mosaic_sm100"):
        assert block_scaled_matmul(codes, scale, w, implementation=name).shape == (0, 64)


def test_refusals_say_the_rule_and_the_remedy():
    rng = generator(0)
    w = block32(rng, 64, 64)
    codes, scale = core.quantize_q8(jnp.ones((2, 64), jnp.float32))
    with pytest.raises(KernelUnsupported, match=r"per 128.*scaled per 32.*name mosaic_sm90"):
        block_scaled_matmul(codes, scale, w, implementation="mosaic_sm90_fp8")
    wide = core.QuantArray(w.payload, jnp.zeros((1, 1), jnp.uint8), "fp8_block128")
    with pytest.raises(KernelUnsupported, match=r'fp8_block32.*fp8_block128.*name "xla"'):
        block_scaled_matmul(codes, scale, wide, implementation="mosaic_sm90")
    with pytest.raises(KernelUnsupported, match=r"has the implementations xla.*'triton'"):
        block_scaled_matmul(codes, scale, w, implementation="triton")
    with pytest.raises(KernelError, match=r"uint8 scales \[m, k / 32\]"):
        block_scaled_matmul(codes, scale[:, :1], w, implementation="xla")
    with pytest.raises(KernelError, match="needs bfloat16 operands"):
        matmul_bf16(jnp.ones((2, 8)), jnp.ones((3, 8)), implementation="xla")
    ones = jnp.ones((2, 2), jnp.float32)
    with pytest.raises(KernelUnsupported, match=r"multiple of 128, got 192"):
        matmul_fp8(
            jnp.zeros((2, 192), jnp.uint8), ones, jnp.zeros((256, 192), jnp.uint8), ones,
            implementation="mosaic_sm90_fp8",
        )  # fmt: skip


@pytest.mark.parametrize("index", [0, 1, 6, 55])
def test_copies_of_scales_begin_at_sixteen_bytes(index):
    """A rule of the GPU that neither the interpreter nor the compiler knows."""
    line, place = ring.line_of(jnp.int32(index)), ring.place_in_line(jnp.int32(index))
    assert line.start % ring.ALIGNED == 0
    assert line.start + place == index
    # a tile of 256 columns or 512 weight rows finds its scales in one line
    assert place + 512 // 32 <= line.size


@pytest.mark.parametrize(("n", "stores"), [(16, 1), (64, 1), (72, 2), (192, 3)])
def test_no_store_begins_beyond_a_result_narrower_than_its_tile(n, stores):
    """On a GPU it would land in the result's only tile; the interpreter leaves it out."""
    tile = configs.bf16_tile(n, 512, 2, False)
    assert (tile.cols, tile.store, tile.rows) == (192, 64, 64)
    x, w = (jax.ShapeDtypeStruct((rows, 192), jnp.bfloat16) for rows in (512, n))
    program = jax.make_jaxpr(lambda x, w: launch_sm90.bf16(x, w, jnp.bfloat16))(x, w)
    assert str(program).count("copy_smem_to_gmem ") == stores


def test_tiles_that_do_not_fit_are_refused():
    x, w = jnp.ones((8, 384), jnp.bfloat16), jnp.ones((64, 384), E4M3)
    words = jnp.ones((3, 4), jnp.int32)
    with pytest.raises(KernelError, match="multiple of the depth of a stage, got 384"):
        matmul_decode(x, w, words, DecodeTile(depth=256))
    with pytest.raises(KernelError, match="may be of two groups"):
        body_bf16(x, w.astype(jnp.bfloat16), Tile(depth=64, cluster=2, share="x"), groups=2)
    with pytest.raises(KernelError, match="every block of a cluster needs columns"):
        body_bf16(x, w.astype(jnp.bfloat16), Tile(cols=64, depth=64, cluster=2, share="x"))
    with pytest.raises(KernelError, match="depth of a scale"):
        body_fp8(x.astype(E4M3), jnp.ones((3, 8)), w, jnp.ones((3, 4)), Tile(depth=64))


def test_a_stage_is_no_longer_than_k_allows():
    whole, odd = configs.decode_tile(5120, 512, 16), configs.decode_tile(5120, 384, 16)
    assert (whole.depth, odd.depth) == (256, 128)
    assert odd.stages * odd.depth == whole.stages * whole.depth


def test_every_tile_of_the_table_is_chosen_by_some_shape():
    chosen = {id(configs.decode_tile(n, 512, m)) for n in (5120, 32768) for m in (1, 16, 32, 256)}
    chosen |= {
        id(configs.bf16_tile(n, m, size, False))
        for n in (1792, 4608, 5120)
        for m in (64, 4096)
        for size in (2, 4)
    }
    chosen |= {id(configs.fp8_tile(m)) for m in (64, 128, 4096)}
    assert chosen == {id(tile) for tile in configs.TABLE.values()}
