"""select_topk and select_blocks: the Triton body, interpreted, chooses what core chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import core
from pallas_kernels.errors import KernelError, KernelUnsupported
from pallas_kernels.select_topk import pallas_triton
from pallas_kernels.select_topk.api import select_blocks, select_topk
from pallas_kernels.select_topk.arg_specs import CASES, compile_cases
from pallas_kernels.select_topk.configs import SelectConfig
from tests.kernels.test_lowering import kernel_names, lower_for_h200

INTERPRET = "pallas_interpret"
#: Programs so small that short rows are split, merged, and read in several chunks.
SMALL = SelectConfig(most=32, chunk=16, tile=16, part=8, lanes=8)
SPECIAL = np.array([-np.inf, np.nan, np.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38], np.float32)


def mixed(rows, size, seed=0, dtype=jnp.bfloat16):
    """Returns scores full of ties, with NaN, infinities, zeros of both signs and subnormals."""
    rng = np.random.default_rng(seed)
    scores = np.round(rng.standard_normal((rows, size)) * 2).astype(np.float32)
    special = rng.choice(SPECIAL, scores.shape)
    return jnp.asarray(np.where(rng.random(scores.shape) < 0.3, special, scores)).astype(dtype)


def judge(scores, k, length=None):
    if length is not None:
        scores = jnp.where(jnp.arange(scores.shape[1]) < length[:, None], scores, -jnp.inf)
    return np.asarray(core.select_topk(scores, k))


def by_sorting(row, k):
    """Returns the selection of one row by sorting it in numpy."""
    row = np.asarray(row, np.float32)
    key = np.where(np.isnan(row), -np.inf, np.where(np.abs(row) < 2.0**-126, 0.0, row))
    order = sorted(np.flatnonzero(key > -np.inf), key=lambda i: (-key[i], i))[:k]
    return [*sorted(order), *[-1] * (k - len(order))]


@pytest.mark.parametrize("spec", [c for c in CASES if c.tier == "interpret"], ids=lambda c: c.name)
def test_chooses_what_core_chooses(spec):
    scores = mixed(*spec.shapes[0], dtype=spec.dtypes[0])
    found = select_topk(scores, **spec.kwargs, implementation=INTERPRET)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, judge(scores, **spec.kwargs))
    assert np.asarray(found).tolist() == [by_sorting(row, **spec.kwargs) for row in scores]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (15, jnp.float32),
        (16, jnp.bfloat16),
        (17, jnp.float32),
        (33, jnp.bfloat16),
        (100, jnp.bfloat16),
        (100, jnp.float32),
    ],
)
def test_split_and_chunked_rows_choose_the_same(size, dtype):
    scores = mixed(4, size, seed=size, dtype=dtype)
    run = pallas_triton.build(SMALL, interpret=True)
    count = jnp.asarray([size, size - 1, 1, size // 2], jnp.int32)
    for k in (4, 20, size + 2):  # 4 and less split a row; 20 does not fit a tile
        found = jax.jit(run.topk, static_argnums=2)(scores, count, k)
        np.testing.assert_array_equal(found, judge(scores, k, count))


#: Rows whose k-th largest is found at once, never exactly, at an end of the range, or far below.
EDGES = {
    "equal largest in every group": np.tile(np.arange(8.0), 8),
    "one above the others": np.where(np.arange(64) == 37, 2.0, 1.0),
    "one below the others": np.where(np.arange(64) == 37, 1.0, 2.0),
    "infinities of both signs": np.where(np.arange(64) % 3 == 0, np.inf, -np.inf),
    "infinities beside zeros": np.where(np.arange(64) % 3 == 0, np.inf, 0.0),
    "largest together at the end": np.exp2(np.arange(64.0) - 32),
    "largest together at the start": -np.exp2(np.arange(64.0) - 32),
    "few that may be chosen": np.where(np.arange(64) % 9 == 0, -3e38, -np.inf),
    "neighbouring numbers": 1.0 + (np.arange(64) * 37 % 64) / 64,
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("k", [1, 2, 21, 32, 33, 63])
def test_edges_of_the_range_that_is_halved(k, dtype):
    scores = jnp.asarray(np.stack(list(EDGES.values()))).astype(dtype)
    expected = [by_sorting(row, k) for row in np.asarray(scores.astype(jnp.float32))]
    for length in (64, 63, 40, k):
        count = jnp.full((len(EDGES),), length, jnp.int32)
        shorter = judge(scores, k, count).tolist()
        assert length != 64 or shorter == expected
        for config in (SelectConfig(), SMALL):
            run = pallas_triton.build(config, interpret=True)
            assert run.topk(scores, count, k).tolist() == shorter, (length, config)
        kept = pallas_triton.build(SelectConfig(), interpret=True).blocks(scores, count, k)
        np.testing.assert_array_equal(kept, core.select_blocks(scores, count, 1, k))


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, -np.inf, np.nan])
def test_constant_rows_take_the_lowest_indices(value):
    scores = jnp.full((2, 100), value, jnp.bfloat16)
    expected = [-1] * 5 if np.isnan(value) or value == -np.inf else [0, 1, 2, 3, 4]
    for run in (SMALL, SelectConfig()):
        found = pallas_triton.build(run, interpret=True).topk(
            scores, jnp.asarray([100, 3], jnp.int32), 5
        )
        assert found.tolist()[0] == expected
        assert found.tolist()[1] == [*expected[:3], -1, -1]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_keys_have_the_order_of_core(dtype):
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 2**16, (8, 512)).astype(np.uint16)
    if dtype == jnp.float32:
        patterns = patterns.astype(np.uint32) << 16 | rng.integers(0, 2**16, (8, 512))
        patterns = patterns.astype(np.uint32)
    scores = jax.lax.bitcast_convert_type(jnp.asarray(patterns), dtype)
    for k in (1, 200):
        found = select_topk(scores, k, implementation=INTERPRET)
        np.testing.assert_array_equal(found, judge(scores, k))


def test_lengths_hide_what_lies_behind_them():
    scores = mixed(5, 64, seed=3)
    length = jnp.asarray([0, 1, 63, 64, 70], jnp.int32)
    hidden = jnp.where(jnp.arange(64) < length[:, None], scores, jnp.inf)
    for implementation in ("xla", INTERPRET):
        found = select_topk(hidden, 8, length=length, implementation=implementation)
        np.testing.assert_array_equal(found, judge(scores, 8, length))
    assert found.tolist()[0] == [-1] * 8


def test_a_row_does_not_depend_on_the_others():
    scores = mixed(3, 65, seed=4)
    found = select_topk(scores, 9, implementation=INTERPRET)
    for row in range(3):
        alone = select_topk(scores[row : row + 1], 9, implementation=INTERPRET)
        np.testing.assert_array_equal(alone[0], found[row])


def test_nothing_to_choose_from():
    scores = jnp.zeros((2, 3), jnp.bfloat16)
    for implementation in ("xla", INTERPRET):
        assert select_topk(scores[:0], 4, implementation=implementation).shape == (0, 4)
        assert select_topk(scores, 0, implementation=implementation).shape == (2, 0)
        empty = select_topk(scores[:, :0], 2, implementation=implementation)
        assert empty.tolist() == [[-1, -1]] * 2
        length = jnp.zeros((2,), jnp.int32)
        none = select_blocks(scores, length, 2, 1, implementation=implementation)
        assert none.tolist() == [[False, False]] * 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("size", "block", "keep"), [(30, 8, 2), (64, 8, 3), (7, 8, 1), (33, 3, 50)]
)
def test_blocks_are_those_of_core(size, block, keep, dtype):
    length = jnp.arange(size + 1, dtype=jnp.int32)
    scores = mixed(size + 1, size, seed=size, dtype=dtype)
    # finite extremes, so that infinities tie with them where they should
    scores = scores.at[::3, ::5].set(jnp.finfo(dtype).max).at[1::3, ::5].set(jnp.finfo(dtype).min)
    found = select_blocks(scores, length, block, keep, implementation=INTERPRET)
    assert found.dtype == bool
    np.testing.assert_array_equal(found, core.select_blocks(scores, length, block, keep))


def test_blocks_read_in_several_chunks_are_the_same():
    maxima = mixed(4, 100, seed=7)
    count = jnp.asarray([100, 99, 33, 0], jnp.int32)
    for k in (7, 64):
        small = pallas_triton.build(SMALL, interpret=True).blocks(maxima, count, k)
        whole = pallas_triton.build(SelectConfig(), interpret=True).blocks(maxima, count, k)
        np.testing.assert_array_equal(small, whole)
        np.testing.assert_array_equal(small, core.select_blocks(maxima, count, 1, k))


# jax 0.11.2 says so of every Pallas-Triton kernel (kernels.md 1.7)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_every_case_lowers_for_a_gpu():
    cases = compile_cases("sm_90")
    assert compile_cases("gfx942") == []
    for label, fn, shapes in cases:
        names = kernel_names(lower_for_h200(fn, *shapes))
        wanted = {"select_topk_blocks"} if label.startswith("blocks") else {"select_topk_topk"}
        merged = "n=131072" in label and "k=16384" not in label
        assert set(names) == (wanted | {"select_topk_merge"} if merged else wanted), label


def test_refusals():
    scores = jnp.zeros((2, 8), jnp.bfloat16)
    with pytest.raises(KernelUnsupported, match="name one of them"):
        select_topk(scores, 2, implementation="mosaic_sm90")
    with pytest.raises(KernelUnsupported, match="float16"):
        select_topk(scores.astype(jnp.float16), 2, implementation="triton")
    with pytest.raises(KernelError, match="k >= 0"):
        select_topk(scores, -1)
    with pytest.raises(KernelError, match="length"):
        select_topk(scores, 2, length=jnp.zeros((3,), jnp.int32))
    with pytest.raises(KernelError, match="block_size"):
        select_blocks(scores, jnp.zeros((2,), jnp.int32), 0, 1)
