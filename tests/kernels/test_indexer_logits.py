"""indexer_logits: the Hopper body under the interpreter has the reference's bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.config.model import ExecutionConfig
from deepinfer_jax.config.presets import preset
from deepinfer_jax.model.attention.indexer import score_block
from deepinfer_jax.numerics.ops import ops_for
from pallas_kernels import core
from pallas_kernels._mosaic import run_interpreted
from pallas_kernels.errors import KernelError, KernelUnsupported
from pallas_kernels.indexer_logits import decode_sm90, launch_sm90
from pallas_kernels.indexer_logits.api import indexer_logits
from pallas_kernels.indexer_logits.arg_specs import CASES, compile_cases, make
from pallas_kernels.indexer_logits.configs import IndexerConfig
from tests.kernels.test_lowering import kernel_names, lower_for_h200

SPECS = {spec.name: spec for spec in CASES}


def interpreted(*arguments):
    """Returns the kernel's scores as bits; a data race in it is an error."""
    return bits(
        run_interpreted(lambda *a: launch_sm90.indexer_logits(*a, interpret=True), *arguments)
    )


def bits(x):
    return np.asarray(x).view(np.uint16)


def exact(query_codes, query_scale, weight, key_codes, key_scale, pages, length):
    """Returns the scores in float64 with the documented roundings only."""

    def bf16(x):
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)

    query = np.asarray(core.dequantize_q4m(query_codes, query_scale), np.float64)
    keys = np.asarray(core.dequantize_q4m(key_codes, key_scale), np.float64)
    shared, weight = query.shape[0] // pages.shape[0], np.asarray(weight, np.float64)
    out = np.full((query.shape[0], pages.shape[1] * keys.shape[1]), -np.inf)
    for row, seen in enumerate(np.asarray(length)):
        own = keys[np.asarray(pages)[row // shared]].reshape(-1, keys.shape[2])[:seen]
        terms = bf16(np.maximum(bf16(own @ query[row].T), 0) * weight[row])
        total = np.zeros(len(own), np.float32)
        for head in range(terms.shape[1]):
            total += terms[:, head].astype(np.float32)
        out[row, :seen] = total
    return bf16(out)


@pytest.mark.parametrize("spec", [c for c in CASES if c.tier == "interpret"], ids=lambda c: c.name)
def test_interpreter_has_the_bits_of_the_reference(spec):
    arguments = make(spec, 0)
    found = interpreted(*arguments)
    np.testing.assert_array_equal(found, bits(indexer_logits(*arguments)))


@pytest.mark.parametrize("name", ["one row each", "three rows share"])
def test_reference_is_the_definition(name):
    arguments = make(SPECS[name], 1)
    found = indexer_logits(*arguments)
    np.testing.assert_array_equal(np.asarray(found, np.float64), exact(*arguments))


def test_reference_scores_as_the_network_does():
    config = preset("deepseek-v4.1-flash")
    query, query_scale, _, keys, scale, pages, length = make(SPECS["eight rows share"], 9)
    weight = jax.random.normal(jax.random.key(10), query.shape[:2]).astype(jnp.bfloat16)
    read = core.dequantize_q4m(keys[pages[0]], scale[pages[0]]).reshape(1, -1, 128)
    scores = score_block(
        ops_for(ExecutionConfig(numerics="checkpoint", determinism="batch")),
        config,
        core.dequantize_q4m(query, query_scale),
        weight.astype(jnp.float32),
        jnp.broadcast_to(read, (len(length), *read.shape[1:])),
    )
    scaled = (weight * jnp.bfloat16(2.0**-6)).astype(jnp.bfloat16)
    found = indexer_logits(query, query_scale, scaled, keys, scale, pages, length)
    visible = np.arange(read.shape[1]) < np.asarray(length)[:, None]
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), np.where(visible, np.asarray(scores), -np.inf)
    )


@pytest.mark.parametrize("name", ["one row each", "three rows share"])
def test_lengths_and_what_lies_behind_them(name):
    query, query_scale, weight, keys, scale, pages, length = make(SPECS[name], 2)
    size = pages.shape[1] * keys.shape[1]
    edges = [0, 1, 63, 64, 65, size]
    length = jnp.asarray(edges[: len(length)] if name == "three rows share" else [0, 1, 129])
    length = length.astype(jnp.int32)
    expected = bits(indexer_logits(query, query_scale, weight, keys, scale, pages, length))
    # poison every key that no row sees: the exponent of a NaN, and pages behind the last
    seen = jnp.max(length.reshape(pages.shape[0], -1), axis=1)
    place = jnp.arange(size).reshape(pages.shape[1], -1)
    behind = place[None] >= seen[:, None, None]
    poisoned = scale.at[pages].set(jnp.where(behind[..., None], 255, scale[pages]))
    found = interpreted(query, query_scale, weight, keys, poisoned, pages, length)
    np.testing.assert_array_equal(found, expected)
    assert (found[0] == 0xFF80).all()
    assert (found[1, 1:] == 0xFF80).all()
    assert found[1, 0] != 0xFF80


@pytest.mark.parametrize("name", ["one row each", "three rows share"])
def test_programs_of_other_sizes_have_the_same_bits(name, monkeypatch):
    small = IndexerConfig(keys=128, warpgroups=1)
    monkeypatch.setattr(launch_sm90, "TABLE", {"one row": small, "rows": small})
    arguments = make(SPECS[name], 11)  # two programs for each list of pages
    np.testing.assert_array_equal(interpreted(*arguments), bits(indexer_logits(*arguments)))


def test_a_nan_scale_spoils_its_own_key_only():
    arguments = list(make(SPECS["one row"], 3))
    expected = np.asarray(indexer_logits(*arguments), np.float32)
    page = int(arguments[5][0, 0])
    arguments[4] = arguments[4].at[page, 5, 2].set(255)
    found = interpreted(*arguments).view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.isnan(found[0, 5])
    keep = np.arange(found.shape[1]) != 5
    np.testing.assert_array_equal(found[:, keep], expected[:, keep])


def test_extreme_exponents_are_exact():
    query, query_scale, weight, keys, scale, pages, length = make(SPECS["three rows share"], 4)
    scale = scale.at[:, ::2].set(2).at[:, 1::2].set(150)
    query_scale = jnp.full_like(query_scale, 150)
    arguments = (query, query_scale, weight, keys, scale, pages, length)
    np.testing.assert_array_equal(interpreted(*arguments), bits(indexer_logits(*arguments)))


def test_a_row_has_the_same_bits_alone_and_in_company():
    query, query_scale, weight, keys, scale, pages, length = make(SPECS["three rows share"], 5)
    together = interpreted(query, query_scale, weight, keys, scale, pages, length)
    for row in (0, 4):
        one, tile = slice(row, row + 1), slice(row // 3, row // 3 + 1)
        alone = interpreted(
            query[one], query_scale[one], weight[one], keys, scale, pages[tile], length[one]
        )
        np.testing.assert_array_equal(alone[0], together[row])


def test_heads_are_added_in_ascending_order():
    query, query_scale, weight, keys, scale, pages, length = make(SPECS["one row"], 6)
    # the first two heads cancel exactly; in any other order they swallow what lies between them
    query, query_scale = (
        query.at[:, 1].set(query[:, 0]),
        query_scale.at[:, 1].set(query_scale[:, 0]),
    )
    weight = weight.at[:, 0].set(2.0**20).at[:, 1].set(-(2.0**20))
    arguments = (keys, scale, pages, length)
    forward = interpreted(query, query_scale, weight, *arguments)
    backward = interpreted(query[:, ::-1], query_scale[:, ::-1], weight[:, ::-1], *arguments)
    reference = indexer_logits(query[:, ::-1], query_scale[:, ::-1], weight[:, ::-1], *arguments)
    np.testing.assert_array_equal(backward, bits(reference))
    assert (forward != backward).any()  # else the case would not tell one order from another


def owners(layout, shape):
    """Returns the flat indices [warp, lane, register, element] of a tiled register layout."""
    layout = layout.to_mgpu()
    x = np.arange(np.prod(shape)).reshape(shape)
    for sizes in layout.tiling.tiles:
        lead, tail = x.shape[: -len(sizes)], x.shape[-len(sizes) :]
        split = [part for a, b in zip(tail, sizes, strict=True) for part in (a // b, b)]
        first = len(lead)
        outer = [first + 2 * i for i in range(len(sizes))]
        x = x.reshape(*lead, *split)
        x = x.transpose(*range(first), *outer, *(axis + 1 for axis in outer))
    axes = [axis % x.ndim for axis in (*layout.warp_dims, *layout.lane_dims, layout.vector_dim)]
    others = [axis for axis in range(x.ndim) if axis not in axes]
    return x.transpose(*axes[:-1], *others, axes[-1]).reshape(4, 32, -1, layout.vector_length)


def test_a_thread_holds_what_the_decoder_takes_it_to_hold():
    warp, lane, r = np.ix_(range(4), range(32), range(2))
    row, quarter = 16 * warp + 8 * r + lane // 4, lane % 4
    codes = owners(decode_sm90.CODES, (64, 64))
    np.testing.assert_array_equal(codes[..., 0], 64 * row + 16 * quarter)
    np.testing.assert_array_equal(np.diff(codes), 1)
    scales = owners(decode_sm90.SCALES, (64, 4))
    np.testing.assert_array_equal(scales[..., 0], 4 * row + quarter)
    key = 64 * (lane // 2 % 2) + 16 * warp + 8 * (lane % 2) + lane // 4
    keys = owners(decode_sm90.PER_KEY, (128,))
    np.testing.assert_array_equal(keys[..., 0], key[..., :1].squeeze(2)[..., None])
    # column 8 p + 2 q + e of the operand is channel 32 q + 8 (p // 4) + 4 e + p % 4
    order = np.asarray(decode_sm90.key_order(jnp.arange(128)))
    p, q, e = np.ix_(range(16), range(4), range(2))
    np.testing.assert_array_equal(order.reshape(16, 4, 2), 32 * q + 8 * (p // 4) + 4 * e + p % 4)


def test_both_forms_lower_for_a_gpu():
    cases = compile_cases("sm_90")
    assert compile_cases("sm_100") == []
    forms = {kind: [c for c in cases if c[0].startswith(kind)] for kind in ("t=1 ", "t=6 ")}
    for kind, [(_, fn, shapes)] in forms.items():
        [name] = kernel_names(lower_for_h200(fn, *shapes))
        assert name == f"indexer_logits_{'row' if kind == 't=1 ' else 'rows'}_sm90"


def test_nothing_to_score():
    query, query_scale, weight, keys, scale, pages, length = make(SPECS["one row"], 7)
    for implementation in ("xla", "pallas_interpret"):
        found = indexer_logits(
            query,
            query_scale,
            weight,
            keys,
            scale,
            pages[:, :0],
            jnp.zeros_like(length),
            implementation=implementation,
        )
        assert found.shape == (1, 0)


def test_refusals():
    arguments = make(SPECS["one row"], 8)
    query, query_scale, weight, keys, scale, pages, length = arguments
    with pytest.raises(KernelUnsupported, match="name one of them"):
        indexer_logits(*arguments, implementation="x")
    short = (query, query_scale, weight, keys[:, :8], scale[:, :8], pages, length)
    with pytest.raises(KernelUnsupported, match="pages of a multiple of 64"):
        indexer_logits(*short, implementation="mosaic_sm90")
    query9, scale9, weight9, length9 = (
        jnp.repeat(x, 9, axis=0) for x in (query, query_scale, weight, length)
    )
    with pytest.raises(KernelError, match="repeat a list"):
        indexer_logits(query9, scale9, weight9, keys, scale, pages, length9)
    wide = weight.astype(jnp.float32)
    with pytest.raises(KernelError, match="bfloat16 weight"):
        indexer_logits(query, query_scale, wide, keys, scale, pages, length)
    with pytest.raises(KernelError, match="key bytes"):
        indexer_logits(query, query_scale, weight, keys, scale[:, :4], pages, length)
