"""Reported log-probabilities: raw and processed, rank, alternatives, floor."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.logprobs import FLOOR, processed_token_logprobs, raw_logprobs
from deepinfer_jax.sampling.sample import sample
from deepinfer_jax.sampling.truncate import processed_logprobs
from tests.deepinfer_jax.sampling import oracle

INF = np.inf


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("top", [0, 1, 5, 101, 1000])
def test_raw_against_float64(top):
    logits = oracle.normal(0, (9, 101))
    token = jnp.asarray(np.random.default_rng(1).integers(0, 101, 9))
    out = raw_logprobs(logits, token, top)
    want = log_softmax(logits)
    rows = np.arange(9)
    np.testing.assert_allclose(out.logprob, want[rows, token], rtol=1e-5, atol=1e-6)
    order = np.argsort(-np.asarray(logits), axis=-1, kind="stable")
    assert out.rank.tolist() == [order[r].tolist().index(token[r]) + 1 for r in rows]
    assert np.asarray(out.top_ids).tolist() == order[:, :top].tolist()
    np.testing.assert_allclose(
        out.top_logprobs, np.take_along_axis(want, order[:, :top], axis=1), rtol=1e-5, atol=1e-6
    )


def test_ties_floor_and_missing_tokens():
    logits = jnp.asarray([[1.0, 1.0, -INF], [1.0, 1.0, -INF], [0.0, -0.0, 1e-40], [1, 2, 3.0]])
    out = raw_logprobs(logits, jnp.asarray([1, 2, 2, -1]), 3)
    assert out.rank.tolist() == [2, 3, 3, 0]
    assert out.top_ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [2, 1, 0]]
    assert out.logprob[1] == FLOOR
    assert out.logprob[3] == FLOOR
    assert out.top_logprobs[0, 2] == FLOOR
    np.testing.assert_allclose(out.logprob[0], np.log(0.5), rtol=1e-6)


def test_modes_of_the_sampler():
    logits, rows = oracle.normal(2, (9, 65)), oracle.one(9, temperature=0.5, top_k=3)
    at = jnp.arange(9, dtype=jnp.int32)
    raw = sample(logits, rows, at, logprobs=5)
    processed = sample(logits, rows, at, logprobs=5, mode="processed")
    assert raw.token.tolist() == processed.token.tolist()
    want = raw_logprobs(logits, raw.token, 5)
    for got, one in zip(
        (raw.logprobs.logprob, raw.logprobs.top_logprobs),
        (want.logprob, want.top_logprobs),
        strict=True,
    ):
        assert (oracle.bits(got) == oracle.bits(one)).all()
    again = processed_token_logprobs(processed_logprobs(logits, rows), raw.token, 5)
    assert (oracle.bits(again.top_logprobs) == oracle.bits(processed.logprobs.top_logprobs)).all()
    assert (np.asarray(again.top_logprobs)[:, 3:] == FLOOR).all()
    assert (np.asarray(again.rank) <= 3).all()
    np.testing.assert_allclose(np.exp(again.top_logprobs).sum(axis=-1), 1, atol=1e-6)


def test_greedy_is_rank_one_and_processed_certain():
    logits = oracle.normal(3, (9, 65))
    rows = oracle.one(9, temperature=0.0)
    at = jnp.arange(9, dtype=jnp.int32)
    assert (sample(logits, rows, at, logprobs=0).logprobs.rank == 1).all()
    processed = sample(logits, rows, at, logprobs=2, mode="processed").logprobs
    assert (processed.logprob == 0).all()
    assert (processed.top_logprobs[:, 1] == FLOOR).all()


def test_a_nan_row_reports_the_floor():
    logits = jnp.asarray([[1.0, np.nan, 2.0]])
    out = raw_logprobs(logits, jnp.asarray([0]), 2)
    assert np.asarray(out.top_logprobs).tolist() == [[FLOOR, FLOOR]]
    assert out.logprob.tolist() == [FLOOR]
