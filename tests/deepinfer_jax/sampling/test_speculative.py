"""Acceptance, residual, survival and verification lengths beyond the golden cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import random
from deepinfer_jax.sampling.sample import choose_token
from deepinfer_jax.speculative.accept import accepted_rows, emitted_tokens
from deepinfer_jax.speculative.confidence import calibrated_confidence, survival
from deepinfer_jax.speculative.rejection import (
    acceptance_probability,
    accepted_length,
    expected_acceptance,
    residual_logprobs,
    residual_probabilities,
)
from deepinfer_jax.speculative.schedule import gather_confidence, verify_lengths

NAN, INF = np.nan, np.inf


def test_acceptance_guards():
    p = jnp.asarray([0.5, 0.5, 0.0, 1e-9, 0.5, 0.5, 0.5])
    q = jnp.asarray([0.25, 1.0, 0.5, 0.0, NAN, INF, 0.0])
    got = acceptance_probability(p, q).tolist()
    np.testing.assert_allclose(got, [1, 0.5, 0, 0.1, 0, 0, 1], atol=1e-6)


def test_residual_guards():
    p = jnp.asarray([[0.5, 0.25, 0.25]] * 4)
    q = jnp.asarray([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [NAN, 0.5, 0.5], [0.5, 0.25, INF]])
    got = np.asarray(residual_probabilities(p, q))
    assert got.tolist() == [[1, 0, 0], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]
    assert np.asarray(residual_logprobs(p, q))[0].tolist() == [0, -INF, -INF]
    np.testing.assert_allclose(expected_acceptance(p[:2], q[:2]), [0.75, 1.0])


@pytest.mark.parametrize(
    ("uniforms", "draft_len", "want"),
    [
        ((0.1, 0.1, 0.1), 3, 3),
        ((0.1, 0.1, 0.1), 2, 2),
        ((0.1, 0.1, 0.1), 0, 0),
        ((0.1, 0.5, 0.1), 3, 1),  # u = a rejects
        ((0.9, 0.1, 0.1), 3, 0),
    ],
)
def test_accepted_length(uniforms, draft_len, want):
    accept = jnp.full((1, 3), 0.5)
    got = accepted_length(accept, jnp.asarray([uniforms], jnp.float32), jnp.asarray([draft_len]))
    assert got.tolist() == [want]


def test_law_of_accept_or_residual_is_the_target():
    """One draft, 24,576 rounds: coins, draft and residual noise are separate streams."""
    draws, p, q = 24_576, np.asarray([0.7, 0.2, 0.1]), np.asarray([0.2, 0.3, 0.5])
    p, q = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (draws, 3)) for x in (p, q))
    key = jnp.broadcast_to(jnp.asarray(random.seed_key(5)), (draws, 2))
    index = jnp.arange(draws)
    drafts = choose_token(jnp.log(q), random.anchor_key(key, index), index + 1, random.DRAFT)
    accept = acceptance_probability(
        *(jnp.take_along_axis(x, drafts[:, None], axis=1)[:, 0] for x in (p, q))
    )
    coins = random.coins(key, (index + 1)[:, None], jnp.ones((draws, 1), jnp.int32))
    other = choose_token(residual_logprobs(p, q), key, index + 1, random.RESIDUAL)
    tokens = np.asarray(jnp.where(coins[:, 0] < accept, drafts, other))
    counts = np.bincount(tokens, minlength=3)
    expected = np.asarray(p[0], np.float64) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom, 0.1 %
    share = float((coins[:, 0] < accept).mean())
    assert abs(share - float(expected_acceptance(p[:1], q[:1])[0])) < 0.013


def test_accepted_rows_against_a_loop():
    rng, judge = np.random.default_rng(0), jax.jit(accepted_rows)
    for _ in range(20):
        lengths = 1 + rng.multinomial(15, np.full(5, 0.2))  # one shape: 20 rows, 5 requests
        request = np.repeat(np.arange(len(lengths)), lengths)
        first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        accept = rng.random(len(request)) < 0.7
        has_draft = np.ones(len(request), bool)
        has_draft[np.cumsum(lengths) - 1] = False
        got = judge(*map(jnp.asarray, (accept, has_draft, request, first)))
        accepted, final = np.zeros(len(request), bool), np.zeros(len(request), bool)
        for start, length in zip(first, lengths, strict=True):
            row = start
            while row < start + length - 1 and accept[row]:
                accepted[row] = True
                row += 1
            final[row] = True
        assert np.asarray(got.is_accepted).tolist() == accepted.tolist()
        assert np.asarray(got.is_final).tolist() == final.tolist()
        tokens = np.asarray(emitted_tokens(got, jnp.arange(len(request))))
        assert (tokens >= 0).sum() == accepted.sum() + len(lengths)


def test_survival_and_clamped_confidence():
    got = survival(jnp.asarray([[0.5, 0.5, NAN, 1.0], [1.0, 1.0, 1.0, 0.25]]))
    assert got.tolist() == [[0.5, 0.25, 0, 0], [1, 1, 1, 0.25]]
    assert survival(jnp.zeros((2, 0))).shape == (2, 0)
    cold = calibrated_confidence(jnp.asarray([[-5.0, 5.0]]), jnp.asarray([1e-3, 1e-3]))
    assert cold[0, 0] > 0
    assert cold[0, 1] == 1


def sort_oracle(confidence, total):
    requests, drafts = confidence.shape
    key = np.cumprod(np.nan_to_num(confidence), axis=1, dtype=np.float32).ravel()
    order = np.argsort(-key, kind="stable")[: total - requests]
    return 1 + np.bincount(order // drafts, minlength=requests)


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "ones", "nan"])
def test_verify_lengths_against_a_sort(kind):
    rng = np.random.default_rng(len(kind))
    for requests in (1, 5):
        confidence = rng.random((requests, 5)).astype(np.float32)
        if kind == "ties":
            confidence = np.round(confidence)
        if kind in ("zeros", "ones"):
            confidence[:] = kind == "ones"
        if kind == "nan":
            confidence[0, 2] = NAN
        for total in range(requests, requests * 6 + 1):
            got = verify_lengths(jnp.asarray(confidence), jnp.int32(total))
            assert got.tolist() == sort_oracle(confidence, total).tolist()


def test_the_length_of_a_prefix_ignores_later_confidences():
    rng = np.random.default_rng(2)
    base = rng.random((4, 5)).astype(np.float32)
    for row in range(4):
        for draft in range(5):
            changed = base.copy()
            changed[row, draft:] = rng.random(5 - draft)
            for total in (5, 9, 14, 20):
                a = verify_lengths(jnp.asarray(base), jnp.int32(total))[row]
                b = verify_lengths(jnp.asarray(changed), jnp.int32(total))[row]
                assert (a > draft) == (b > draft)


def test_a_fresh_request_has_no_confidence():
    known = jnp.ones((2, 3))
    got = gather_confidence(known, jnp.asarray([-1, 1, 0, 5]))
    assert got[0].tolist() == [0, 0, 0]
    assert got[1].tolist() == [1, 1, 1]
