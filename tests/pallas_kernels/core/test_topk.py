"""Top-k in a total order, and candidate blocks: ties, NaN, -inf, empty and short cases."""

import jax
import numpy as np
import pytest

from pallas_kernels import core
from tests.pallas_kernels.core.fixture import load_fixture

INF, NAN = np.inf, np.nan


def _f32(rows: list[list[float]]) -> np.ndarray:
    return np.array(rows, np.float32)


def _reference(row: np.ndarray, k: int) -> list[int]:
    keys = np.where(np.isnan(row), -INF, row) + 0.0
    return sorted(range(len(row)), key=lambda i: (-keys[i], i))[:k]


def test_equal_scores_take_the_lower_index_first() -> None:
    rng = np.random.default_rng(0)
    scores = rng.choice([-1.0, -0.0, 0.0, 2.0, -INF, NAN, INF], (40, 60)).astype(np.float32)
    _, indices = jax.jit(lambda s: core.top_k(s, 17))(scores)
    assert indices.dtype == np.int32
    assert np.asarray(indices).tolist() == [_reference(row, 17) for row in scores]


def test_values_are_canonical() -> None:
    values, indices = core.top_k(_f32([[-0.0, 0.0, NAN, 1e-40, 1.0]]), 5)
    assert indices.tolist() == [[4, 0, 1, 3, 2]]
    assert np.asarray(values).tolist() == [[1, 0, 0, 0, -INF]]
    assert not np.signbit(np.asarray(values)[0, 1:4]).any()


def test_top_k_of_nothing_and_too_much() -> None:
    assert core.top_k(np.zeros((3, 4), np.float32), 0)[1].shape == (3, 0)
    assert core.top_k(np.zeros((0, 4), np.float32), 2)[1].shape == (0, 2)
    with pytest.raises(core.KernelError, match="k=5"):
        core.top_k(np.zeros((3, 4), np.float32), 5)


def test_selected_indices_ascend_and_end_in_minus_one() -> None:
    scores = _f32([[3, 1, 2, 2], [-INF, 5, NAN, -INF], [-INF] * 4, [NAN] * 4])
    got = core.select_topk(scores, 3)
    assert got.dtype == np.int32
    assert got.tolist() == [[0, 2, 3], [1, -1, -1], [-1] * 3, [-1] * 3]
    assert core.select_topk(scores, 6).tolist()[0] == [0, 1, 2, 3, -1, -1]
    assert core.select_topk(scores[:, :0], 2).tolist() == [[-1, -1]] * 4
    assert core.select_topk(scores[:0], 2).shape == (0, 2)


def _blocks(scores: np.ndarray, length: int, size: int, keep: int) -> list[bool]:
    """Selection of one row, block by block, straight from model.md 3.9."""
    count = -(-len(scores) // size)
    seen = [b for b in range(count) if b * size < length]
    best = {b: float(max(scores[b * size : min((b + 1) * size, length)])) for b in seen}
    if seen:
        best[seen[-1]] = INF
    kept = sorted(seen, key=lambda b: (-best[b], b))[:keep]
    return [b in kept for b in range(count)]


@pytest.mark.parametrize(("n", "size", "keep"), [(30, 8, 2), (32, 8, 9), (7, 8, 1), (33, 4, 3)])
def test_blocks_follow_the_definition(n: int, size: int, keep: int) -> None:
    rng = np.random.default_rng(n)
    scores = np.round(rng.standard_normal((n + 1, n)), 1).astype(np.float32)
    length = np.arange(n + 1, dtype=np.int32)
    hidden = np.where(np.arange(n) < length[:, None], scores, NAN).astype(np.float32)
    got = jax.jit(lambda s, v: core.select_blocks(s, v, size, keep))(hidden, length)
    want = [_blocks(row, int(seen), size, keep) for row, seen in zip(scores, length, strict=True)]
    assert np.asarray(got).tolist() == want
    assert not np.asarray(got)[0].any()


def test_visible_blocks_of_minus_infinity_count_as_visible() -> None:
    scores = _f32([[-INF, -INF, -INF, -INF, 1, 1, NAN, NAN]])
    assert core.select_blocks(scores, np.array([6]), 2, 4).tolist() == [[True, True, True, False]]
    assert core.select_blocks(scores, np.array([6]), 2, 2).tolist() == [[True, False, True, False]]
    top = _f32([[INF, INF, 0, 0, INF, INF, -5, -5]])
    assert core.select_blocks(top, np.array([8]), 2, 2).tolist() == [[True, False, False, True]]


def test_expanded_blocks_are_positions() -> None:
    mask = np.array([[True, False, True]])
    assert core.expand_blocks(mask, 3, 8).tolist() == [[True] * 3 + [False] * 3 + [True] * 2]


@pytest.mark.parametrize("case", ["a", "b", "c", "d"])
def test_candidate_fixture_agrees(case: str) -> None:
    # the ledger of compressor_indexer belongs to the model's tests; this only reads its cand.*
    take = load_fixture("compressor_indexer").take
    score, length = take(f"cand.{case}.score"), take(f"cand.{case}.len").astype(np.int32)
    size, keep = int(take(f"cand.{case}.block_size")), int(take(f"cand.{case}.topk_blocks"))
    blocks = core.select_blocks(score, length, size, keep)
    positions = np.asarray(core.expand_blocks(blocks, size, score.shape[1]))
    assert np.array_equal(positions, take(f"cand.{case}.mask").astype(bool))


def test_tie_fixture_agrees() -> None:
    take = load_fixture("compressor_indexer").take
    got = core.select_topk(take("ties.score"), 4)
    assert np.array_equal(got, take("ties.top4_lowest_index_first"))
