"""Operators through the bridge against pallas_kernels.core.

The double stands in for the device: this checks our packing, scale layout, attributes and strides,
not an Ascend.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import native_ascend
from native_ascend import attention, ops
from pallas_kernels import core

pytestmark = pytest.mark.accept(13)

RNG = np.random.default_rng(7)


def normal(*shape: int, dtype=jnp.bfloat16):
    return jnp.asarray(RNG.standard_normal(shape, np.float32)).astype(dtype)


def paired(scale, k):
    """E8M0 bytes [.., k / 32] as CANN has them, [.., ceil(k / 64), 2]."""
    missing = -scale.shape[-1] % 2
    padded = jnp.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, missing)])
    shaped = padded.reshape(ops.mx_scale_shape((*scale.shape[:-1], k)))
    return jax.lax.bitcast_convert_type(shaped, jnp.float8_e8m0fnu)


def as_bytes(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 192), (1, 5120)])
def test_q8_codes_and_scales_are_those_of_the_reference(double, shape):
    x = normal(*shape)
    codes, scales = ops.mx_quant(x)
    expected, scale = core.quantize_q8(x)
    assert np.array_equal(as_bytes(codes), as_bytes(expected))
    assert np.array_equal(as_bytes(scales), as_bytes(paired(scale, shape[-1])))


@pytest.mark.parametrize("shape", [(3, 64), (2, 4, 128)])
def test_q4m_codes_and_scales_are_those_of_the_reference(double, shape):
    x = normal(*shape)
    codes, scales = ops.mx_quant(x, "float4_e2m1fn")
    expected, scale = core.quantize_q4m(x)
    assert np.array_equal(as_bytes(codes), as_bytes(expected))
    assert np.array_equal(as_bytes(scales), as_bytes(paired(scale, shape[-1])))


@pytest.mark.parametrize(
    ("m", "n", "k"), [(3, 32, 64), (2, 64, 1280), (2, 32, 2304), (1, 32, 5120), (1, 32, 6144)]
)
def test_quantised_product(double, m, n, k):
    x, w = normal(m, k), normal(n, k)
    (xc, xs), (wc, ws) = core.quantize_q8(x), core.quantize_q8(w)
    e4m3 = jnp.float8_e4m3fn
    xc, wc = (jax.lax.bitcast_convert_type(jnp.asarray(c), e4m3) for c in (xc, wc))
    found = ops.quant_matmul(xc, paired(xs, k), wc, paired(ws, k)).astype(jnp.float32)
    expected = core.contract(core.fake_q8(x), core.fake_q8(w))
    assert float(jnp.abs(found - expected).max()) <= 4e-3 * float(jnp.abs(expected).max())


def test_products_of_plain_matrices(double):
    x, w = normal(3, 96, dtype=jnp.float32), normal(40, 96, dtype=jnp.float32)
    np.testing.assert_allclose(ops.matmul(x, w.T), core.contract(x, w), rtol=2e-5, atol=1e-5)
    for k in (64, 4096):  # the second is wo_a's
        g, v = normal(2, 3, k), normal(2, 32, k)
        found = ops.batch_matmul(g, jnp.swapaxes(v, 1, 2)).astype(jnp.float32)
        expected = jnp.swapaxes(core.contract_grouped(jnp.swapaxes(g, 0, 1), v), 0, 1)
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"groupSize": 32}, "groupSize of MX is 4295032864"),
        ({"scaleAlg": 0}, "E4M3 with scaleAlg 1"),
    ],
)
def test_attributes_arrive_as_documented_and_others_are_refused(double, monkeypatch, change, text):
    """The double compares what it receives: right values pass in the tests above."""
    assert ops.MX_GROUPS == 4295032864
    plain = ops.PlanBuilder.call

    def changed(self, name, /, **arguments):
        plain(self, name, **(arguments | {k: v for k, v in change.items() if k in arguments}))

    monkeypatch.setattr(ops.PlanBuilder, "call", changed)
    scales = paired(jnp.full((2, 2), 127, "uint8"), 64)
    codes = jnp.ones((2, 64), jnp.float8_e4m3fn)
    product = lambda: ops.quant_matmul(codes, scales, codes, scales)  # noqa: E731
    run = (lambda: ops.mx_quant(normal(2, 64))) if "scaleAlg" in change else product
    with pytest.raises(native_ascend.AscendError, match=text):
        run()


def test_rms_norm(double):
    x, gamma = normal(4, 192), normal(192)
    found, rstd = ops.rms_norm(x, gamma, 1e-20)
    expected = core.rms_norm(x, gamma, 1e-20)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(rstd[:, 0], core.rms_scale(x, 1e-20), rtol=1e-6)


def test_swiglu_clamps_weighs_and_quantises(double):
    x, weight = normal(5, 256) * 8, normal(5, dtype=jnp.float32)
    codes, scales = ops.swiglu_quant(x, weight, 10.0)
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=1)
    active = jax.nn.silu(jnp.minimum(gate, 10)) * jnp.clip(up, -10, 10) * weight[:, None]
    expected = core.fake_q8(core.round_bf16(active))
    bytes_ = as_bytes(scales).reshape(5, -1)[:, :4]
    found = core.dequantize_q8(jnp.asarray(as_bytes(codes)), jnp.asarray(bytes_))
    np.testing.assert_allclose(found, expected, rtol=0.07, atol=1e-5)


def test_grouped_product_reads_fractal_nz_and_counts(double):
    e, n, k, counts = 4, 32, 128, np.asarray([2, 0, 3, 1], np.int64)
    x, w = normal(6, k), normal(e, n, k)
    xc, xs = core.quantize_q8(x)
    wc, ws = core.quantize_q4m(w)
    with jax.enable_x64(True):
        found = ops.grouped_matmul(
            jax.lax.bitcast_convert_type(jnp.asarray(xc), jnp.float8_e4m3fn),
            paired(xs, k),
            wc,
            paired(ws, k),
            jnp.asarray(counts),
        ).astype(jnp.float32)
    group = np.repeat(np.arange(e), counts)
    values = core.dequantize_q4m(wc, ws)
    expected = jnp.einsum("mk,mnk->mn", core.fake_q8(x), values[group], precision="highest")
    assert float(jnp.abs(found - expected).max()) <= 4e-3 * float(jnp.abs(expected).max())


def test_gating_takes_the_lower_id_at_a_tie_and_weighs_without_the_bias(double):
    logits = normal(6, 16, dtype=jnp.float32).at[0].set(0.5)
    bias = normal(16, dtype=jnp.float32).at[:].set(0.0).at[3].set(0.25)
    weights, ids = ops.gating_topk(logits, bias, 2, 1.5)
    scores = jnp.sqrt(jax.nn.softplus(logits))
    _, expected = core.top_k(scores + bias, 2)
    assert np.array_equal(ids, expected)
    assert ids[0].tolist() == [3, 0]
    chosen = jnp.take_along_axis(scores, expected, axis=1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(axis=1, keepdims=True) * 1.5, rtol=1e-5)


def reference_attention(q, keys, sinks):
    scores = jnp.einsum("hc,sc->hs", q, keys, precision="highest") * q.shape[-1] ** -0.5
    top = jnp.maximum(scores.max(axis=1), sinks)
    p = jnp.exp(scores - top[:, None])
    return (p @ keys) / (p.sum(axis=1) + jnp.exp(sinks - top))[:, None]


@pytest.mark.parametrize("ratio", [None, 1, 2])
def test_sparse_attention_at_the_real_head_size(double, ratio):
    tokens, new, heads, dim, window, page = 9, 3, 4, 512, 4, 4
    q, rows = normal(new, heads, dim), normal(4, page, 1, dim)
    sinks = normal(heads, dtype=jnp.float32)
    i32 = lambda *v: jnp.asarray(v, jnp.int32)  # noqa: E731
    table = i32(2, 0, 3)[None]
    selected, chosen = None, [[], [], []]
    if ratio:
        chosen = [[0, 2], [1], [2, 0]]
        indices = np.full((new, 1, 3), -1, np.int32)
        for t, picked in enumerate(chosen):
            indices[t, 0, : len(picked)] = picked
        more = normal(3, page, 1, dim)
        selected = (more, jnp.asarray(indices), i32(1, 2, 0)[None], i32(tokens % ratio), ratio)
    found = attention.sparse_attention(
        q, rows, i32(0, new), i32(tokens), table, sinks, window, selected
    ).astype(jnp.float32)
    flat = rows[jnp.asarray([2, 0, 3])].reshape(-1, dim).astype(jnp.float32)
    for t in range(new):
        position = tokens - new + t
        keys = flat[max(0, position - window + 1) : position + 1]
        if ratio:
            other = more[jnp.asarray([1, 2, 0])].reshape(-1, dim).astype(jnp.float32)
            keys = jnp.concatenate([keys, other[jnp.asarray(chosen[t])]])
        expected = reference_attention(q[t].astype(jnp.float32), keys, sinks)
        np.testing.assert_allclose(found[t], expected, rtol=3e-2, atol=1e-2)


def test_all_codes_of_packed_fp4_round_trip(double):
    packed = jnp.arange(256, dtype=jnp.uint8)
    values = core.decode_e2m1(core.unpack_nibbles(packed)).reshape(8, 64)
    codes, _ = ops.mx_quant((values * 4).astype(jnp.bfloat16), "float4_e2m1fn")
    # every group holds a 6, so its scale is 4 and the codes come back, negative zero as well
    assert np.array_equal(as_bytes(codes).reshape(-1), np.arange(256, dtype=np.uint8))


def test_four_bit_arrays_do_not_cross_the_boundary(double):
    with pytest.raises(native_ascend.AscendError, match="4-bit arrays do not cross"):
        ops.matmul(jnp.zeros((2, 2), jnp.float4_e2m1fn), jnp.zeros((2, 2), jnp.float4_e2m1fn))


def test_shapes_are_refused_before_the_call(double):
    with pytest.raises(native_ascend.AscendUnsupported, match=r"\[m, k\] and \[k, n\]"):
        ops.matmul(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(native_ascend.AscendUnsupported, match="whole groups of 32"):
        ops.mx_quant(jnp.ones((2, 40), jnp.bfloat16))


def test_the_double_refuses_what_the_documentation_excludes(double):
    with pytest.raises(native_ascend.AscendError, match=r"head dimension 512 \(9.1\)") as failure:
        attention.sparse_attention(
            normal(1, 2, 64),
            normal(1, 4, 1, 64),
            jnp.asarray([0, 1], jnp.int32),
            jnp.asarray([1], jnp.int32),
            jnp.zeros((1, 1), jnp.int32),
            jnp.zeros(2),
            4,
        )
    assert failure.value.code == 161002
    assert failure.value.status == "INVALID_ARGUMENT"
    assert failure.value.is_double
