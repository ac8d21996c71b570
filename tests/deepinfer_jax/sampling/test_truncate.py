"""Joint truncation against a sort, edges of every test, probabilities after it."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.truncate import (
    processed_logprobs,
    processed_probabilities,
    temperature_probabilities,
    truncation_mask,
)
from tests.deepinfer_jax.sampling import oracle

NAN, INF = np.nan, np.inf


def mask(scores, *, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0):
    scores = jnp.asarray(scores, jnp.float32)
    rows = scores.shape[0]

    def column(value, dtype=jnp.float32):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

    return np.asarray(
        truncation_mask(
            scores, column(temperature), column(top_p), column(top_k, jnp.int32), column(min_p)
        )
    )


def ids(row):
    return np.flatnonzero(row).tolist()


@pytest.mark.parametrize("size", [1, 2, 7, 33, 129, 1001])
def test_against_a_sort(size):
    rng = np.random.default_rng(size)
    rows = 40
    scores = rng.normal(size=(rows, size)).astype(np.float32) * 3
    scores[10:20] = np.round(scores[10:20])  # massive ties
    scores[20:25] = rng.integers(0, 2, (5, size))
    scores[25:30][rng.random((5, size)) < 0.5] = -INF
    scores[25:30, -1] = 0.5
    scores[30] = 0
    top_p = rng.choice([1.0, 0.999, 0.9, 0.5, 1e-6], rows).astype(np.float32)
    top_k = rng.choice([-1, 0, 1, 2, 5, size - 1, size, size + 1, 2**31 - 1], rows)
    min_p = rng.choice([0.0, 0.0, 1e-4, 0.1, 1.0], rows).astype(np.float32)
    temperature = rng.choice([1.0, 0.3, 2.0], rows).astype(np.float32)
    top_k = top_k.astype(np.int32)
    got = mask(scores, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    p = np.asarray(temperature_probabilities(jnp.asarray(scores), jnp.asarray(temperature)))
    for row in range(rows):
        want = oracle.kept(scores[row], p[row], top_p[row], top_k[row], min_p[row])
        assert ids(got[row]) == ids(want), (row, top_p[row], top_k[row], min_p[row])


def test_equal_mass_stays():
    scores = np.zeros((1, 8))  # eight times 1/8
    assert ids(mask(scores, top_p=0.5)[0]) == [0, 1, 2, 3, 4]
    assert ids(mask(scores, top_p=np.nextafter(np.float32(0.5), 0))[0]) == [0, 1, 2, 3]
    assert ids(mask(scores, top_p=0.125)[0]) == [0, 1]
    assert ids(mask(scores, top_p=1e-9)[0]) == [0]
    assert ids(mask(scores, top_p=1.0)[0]) == list(range(8))


def test_ties_at_the_border_go_to_the_lower_id():
    scores = [[1.0, 2.0, 1.0, 3.0, 1.0, 1.0]]
    assert ids(mask(scores, top_k=3)[0]) == [0, 1, 3]
    assert ids(mask(scores, top_k=4)[0]) == [0, 1, 2, 3]
    p = np.exp(scores[0]) / np.exp(scores[0]).sum()
    assert ids(mask(scores, top_p=p[3] + p[1] + p[0] / 2)[0]) == [0, 1, 3]
    assert ids(mask([[-0.0, 0.0, -0.0]], top_k=2)[0]) in ([0, 1], [0, 2], [1, 2])


def test_zeros_of_both_signs_are_equal_after_the_edits():
    from deepinfer_jax.sampling.edits import edit_logits

    scores, _ = edit_logits(jnp.asarray([[-0.0, 0.0, -0.0, -1e-40, 1e-40]]), oracle.one(1))
    assert ids(mask(scores, top_k=2)[0]) == [0, 1]
    assert (oracle.bits(scores) == 0).all()


def test_top_k_edges():
    scores = np.arange(5.0)[None]
    assert ids(mask(scores, top_k=0)[0]) == []  # the raw filter; SamplingParams maps 0 to -1
    assert ids(mask(scores, top_k=-1)[0]) == [0, 1, 2, 3, 4]
    assert ids(mask(scores, top_k=5)[0]) == [0, 1, 2, 3, 4]
    assert ids(mask(scores, top_k=6)[0]) == [0, 1, 2, 3, 4]
    assert ids(mask(scores, top_k=1)[0]) == [4]
    assert oracle.one(3, top_k=0).top_k.tolist() == [-1, -1, -1]
    assert oracle.one(1, top_k=2**40).top_k.tolist() == [2**31 - 1]


def test_min_p_edges():
    scores = np.log([[0.5, 0.25, 0.25 / 2, 0.125]])
    assert ids(mask(scores, min_p=1.0)[0]) == [0]
    assert ids(mask(scores, min_p=0.4)[0]) == [0, 1]
    assert ids(mask(scores, min_p=0.0)[0]) == [0, 1, 2, 3]
    assert ids(mask(np.zeros((1, 4)), min_p=1.0)[0]) == [0, 1, 2, 3]


def test_the_three_tests_share_one_distribution():
    """Renormalising after top_k would drop the third token at this top_p and min_p."""
    scores = np.log([[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]])
    assert ids(mask(scores, top_k=3, top_p=0.65)[0]) == [0, 1, 2]
    assert ids(mask(scores, top_k=3, top_p=0.55)[0]) == [0, 1]
    assert ids(mask(scores, top_k=2, top_p=0.65)[0]) == [0, 1]
    assert ids(mask(scores, top_k=3, min_p=0.26)[0]) == [0, 1]


def test_all_masked_rows_and_extreme_logits():
    assert ids(mask([[-INF] * 4], top_k=2)[0]) == []
    assert ids(mask([[-INF] * 4], top_p=0.5, min_p=0.5)[0]) == []
    assert ids(mask([[-INF, 3.0, -INF]], top_p=0.1)[0]) == [1]
    assert ids(mask([[1e30, -1e30, 1e30, 0.0]], top_p=0.9)[0]) == [0, 2]
    assert ids(mask([[3e38, -3e38, 0.0]], temperature=1e-5, top_k=2)[0]) == [0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.7, 1.0, 1e30])
def test_probabilities_and_logprobs_agree(temperature):
    scores = oracle.normal(3, (6, 101))
    rows = oracle.one(6, temperature=temperature, top_p=0.8, top_k=30)
    p = np.asarray(processed_probabilities(scores, rows))
    log_p = np.asarray(processed_logprobs(scores, rows))
    np.testing.assert_allclose(p.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_allclose(np.exp(log_p), p, atol=1e-6)
    assert ((p > 0) <= (log_p > -INF)).all()
    if temperature == 0:
        assert (p.argmax(axis=-1) == np.asarray(scores).argmax(axis=-1)).all()
        assert (np.sort(p, axis=-1)[:, -2:] == [0, 1]).all()


def test_probabilities_against_float64():
    scores = oracle.normal(4, (5, 501))
    rows = oracle.one(5, temperature=0.7, top_k=20)
    scaled = np.asarray(scores, np.float64) / 0.7
    cut = np.sort(scaled, axis=-1)[:, -20][:, None]
    want = np.where(scaled >= cut, np.exp(scaled - scaled.max(axis=-1, keepdims=True)), 0)
    want /= want.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(processed_probabilities(scores, rows), want, atol=1e-6)


def test_a_temperature_beyond_float32_is_uniform():
    rows = oracle.one(1, temperature=1e300)
    scores = jnp.asarray([[1.0, 2.0, -INF, 5.0]])
    np.testing.assert_allclose(
        processed_probabilities(scores, rows)[0], [1 / 3, 1 / 3, 0, 1 / 3], atol=1e-6
    )


def test_masses_of_a_large_vocabulary_may_exceed_one_in_float32():
    """top_p = 1 removes nothing, whatever the rounded masses sum to."""
    assert mask(oracle.normal(0, (2, 50_001), 0.1), top_k=2**31 - 1).all()
