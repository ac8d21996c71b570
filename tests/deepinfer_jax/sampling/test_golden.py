"""Golden files sampling and runtime_refs (filters, confidence, schedule, accepted prefix)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.truncate import temperature_probabilities, truncation_mask
from deepinfer_jax.speculative.accept import accepted_rows, emitted_tokens
from deepinfer_jax.speculative.confidence import calibrated_confidence, confidence_logit
from deepinfer_jax.speculative.rejection import (
    acceptance_probability,
    accepted_length,
    residual_probabilities,
)
from deepinfer_jax.speculative.schedule import gather_confidence, verify_lengths
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite

TOLERANCE = 1e-6
TEMPERATURES = ("t0.0", "t0.6", "t1.0", "t1.7")


def check_temperature(fixture: Fixture, name: str) -> None:
    """Probabilities, acceptance, residual within 1e-6; the accepted length exactly."""
    temperature = fixture.input(f"{name}.temperature")
    draft_ids = fixture.input(f"{name}.draft_ids").astype(np.int32)[:, None]
    draws = len(draft_ids)
    probabilities = {}
    for side in ("target", "draft"):
        logits = fixture.input(f"{name}.{side}_logits")
        rows = jnp.full(logits.shape[:1], temperature)
        probabilities[side] = temperature_probabilities(jnp.asarray(logits), rows)
        key = f"{name}.{side}_probs"
        compare.absolute(key, probabilities[side], fixture.take(key), TOLERANCE)
    p, q = probabilities["target"][:draws], probabilities["draft"]
    accept = acceptance_probability(
        jnp.take_along_axis(p, draft_ids, axis=1)[:, 0],
        jnp.take_along_axis(q, draft_ids, axis=1)[:, 0],
    )
    key = f"{name}.accept_prob"
    compare.absolute(key, accept, fixture.take(key), TOLERANCE)
    residual = jax.jit(residual_probabilities)(p, q)
    key = f"{name}.residual_probs"
    compare.absolute(key, residual, fixture.take(key), TOLERANCE)
    uniforms = jnp.asarray(fixture.input(f"{name}.uniforms"))
    length = accepted_length(accept[None], uniforms[None], jnp.asarray([draws]))
    key = f"{name}.n_accepted"
    compare.exact(key, length[0], fixture.take(key))


def check_filter(fixture: Fixture) -> None:
    """DeepInfer's top-p and top-k filter is our joint rule without min_p, top_k 0 included."""
    logits, top_p, top_k = (
        jnp.asarray(fixture.input(f"filter.{name}")) for name in ("logits", "top_p", "top_k")
    )
    ones, zeros = jnp.ones_like(top_p), jnp.zeros_like(top_p)
    got = truncation_mask(logits, ones, top_p, top_k, zeros)
    compare.exact("filter.kept", np.asarray(got, np.uint8), fixture.take("filter.kept"))


def check_confidence(fixture: Fixture) -> None:
    """Sigmoid of the projected logit over three temperatures, 1e-6 relative and absolute."""
    hidden, markov, weight = (
        jnp.asarray(fixture.value(f"confidence.{name}")) for name in ("hidden", "markov", "weight")
    )
    logit = confidence_logit(hidden, markov, weight.T)
    for temperature in (0.001, 0.85, 1.0):
        got = calibrated_confidence(logit[:, None], jnp.full((1,), temperature))[:, 0]
        key = f"confidence.temp{temperature}"
        want = fixture.take(key)
        compare.absolute(key, got, want, TOLERANCE)
        assert (np.asarray(got) > 0).all()


def check_schedule(fixture: Fixture) -> None:
    """Rows of every request for four totals; request 1 is fresh."""
    rows = fixture.input("schedule.remap").astype(np.int32)
    known = jnp.asarray(fixture.input("schedule.confidence"))
    confidence = gather_confidence(known, jnp.asarray(rows))
    for total in (5, 9, 14, 30):
        key = f"schedule.total{total}"
        got = verify_lengths(confidence, jnp.int32(total))
        compare.exact(key, got, fixture.take(key))
        assert int(got.sum()) == total


def check_accept(fixture: Fixture) -> None:
    """Accepted prefix and final row; the tokens of those rows are the candidates, unchanged.

    `draft_ids` are the drafts for the next round: nothing in this bookkeeping reads them.
    """
    fixture.input("accept.draft_ids")
    raw, is_verify = (fixture.input(f"accept.{n}").astype(bool) for n in ("raw", "is_verify"))
    request, first = (fixture.input(f"accept.{n}") for n in ("row_to_req", "first_row"))
    got = jax.jit(accepted_rows)(*map(jnp.asarray, (raw, is_verify, request, first)))
    for key, value in (("effective", got.is_accepted), ("is_final", got.is_final)):
        compare.exact(key, np.asarray(value, np.uint8), fixture.take(f"accept.{key}"))
    candidates = jnp.asarray(fixture.input("accept.candidate_ids"))
    emitted = np.asarray(emitted_tokens(got, candidates))
    want = np.where(emitted >= 0, fixture.take("accept.tokens"), -1)
    compare.exact("accept.tokens", emitted, want)


SAMPLING = Suite(
    "modules/sampling",
    {name: lambda fixture, name=name: check_temperature(fixture, name) for name in TEMPERATURES},
)
#: Keys and remainder of runtime_refs are counted in tests/golden/test_runtime_refs.py.
RUNTIME_CASES = {
    "filter": check_filter,
    "confidence": check_confidence,
    "schedule": check_schedule,
    "accept": check_accept,
}
RUNTIME_REFS = Suite("modules/runtime_refs", RUNTIME_CASES)


@pytest.mark.accept(3)
@pytest.mark.parametrize("name", SAMPLING.cases)
def test_sampling(name):
    SAMPLING.run(name)


@pytest.mark.accept(3)
@pytest.mark.parametrize("name", RUNTIME_REFS.cases)
def test_runtime_refs(name):
    RUNTIME_REFS.run(name)


@pytest.mark.accept(3)
def test_coverage(record_property):
    SAMPLING.report(record_property)
