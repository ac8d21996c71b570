"""Speculation does not change the law of the tokens: chi-square at 1 %, and wrong designs fail it.

The joint law of the first three tokens of a Markov target on 6 tokens (`toy_markov`). Seeds are
fixed, so a result is the same on every run.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.speculative import verify as module
from deepinfer_jax.speculative.rejection import acceptance_probability, residual_logprobs
from deepinfer_jax.speculative.verify import RULES
from tests.deepinfer_jax.speculative import toy_markov as toys

pytestmark = pytest.mark.accept(6)
LEVEL = 0.01
FAST, FULL = 16_000, 200_000
SIZE = 5  # drafts of a round

ROWS = np.arange(4 * (SIZE + 1) + 1)  # of a step of a group of 4
SMOOTH = 1 / (1 + 0.08 * ROWS)  # steps per second
STAIRS = 1 / (1 + 0.5 * np.ceil(ROWS / 4))
#: One sequence, 4 drafts: all or none are worth it, and which of them the last confidence tells.
TRAP = 1 / np.asarray([np.inf, 1, 2, 2.7, 3.2, 3.25])
#: The same with 2 drafts.
SHORT_TRAP = 1 / np.asarray([np.inf, 1, 2, 2.25])

POLICIES = {
    "fixed 1": toys.fixed(1),
    "fixed 3": toys.fixed(3),
    "fixed 5": toys.fixed(5),
    "threshold": toys.threshold(0.4),
    "synchronous": toys.synchronous(SMOOTH),
    "lagged": toys.lagged(STAIRS, 10),
}


@pytest.fixture(scope="module")
def toy():
    """Whole and truncated, by whether it is truncated."""
    return {truncated: toys.six_tokens(truncated) for truncated in (False, True)}


def check_law(toy, rule, policy, draws):
    tokens, accepted = toys.emit(toy, rule, policy, draws=draws, size=SIZE, seed=1)
    assert toys.p_value(toy, tokens) >= LEVEL
    assert 0.2 < accepted < SIZE
    if rule == "exact":
        assert (tokens == toys.draft_free(toy, draws=draws, tokens=3, seed=1)).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("policy", "truncated"), [("threshold", True), ("lagged", False), ("synchronous", False)]
)
def test_law(toy, rule, policy, truncated):
    check_law(toy[truncated], rule, POLICIES[policy], FAST)


@pytest.mark.slow
@pytest.mark.parametrize("truncated", [False, True], ids=["whole", "truncated"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
def test_law_of_many(toy, rule, policy, truncated):
    check_law(toy[truncated], rule, POLICIES[policy], FULL)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_law_with_drafts_of_unsound_rows(toy, rule):
    """A drafter whose q is NaN after one token and has one NaN after another loses drafts only."""
    whole = toy[False]
    log_q = whole.log_q.copy()
    log_q[2], log_q[5, 3] = np.nan, np.nan
    broken = toys.Toy(whole.log_p, log_q, whole.confidence)
    tokens, accepted = toys.emit(broken, rule, toys.fixed(3), draws=FAST, size=SIZE, seed=1)
    assert toys.p_value(broken, tokens) >= LEVEL
    assert accepted > 0.2


def test_block_verification_accepts_no_fewer_drafts(toy):
    options = {"draws": FAST, "size": SIZE, "tokens": 1, "seed": 1}
    for truncated in (False, True):
        for length in (2, 4):
            accepted = {
                rule: toys.emit(toy[truncated], rule, toys.fixed(length), **options)[1]
                for rule in ("rejection", "block")
            }
            assert accepted["block"] > accepted["rejection"]


# The controls: each of these designs is wrong, and the test above says so.


def appendix_a():
    """The paper's example: a draft is verified if it is token 0, as the next confidence tells."""
    never = -50.0
    return toys.make_toy([np.log([0.7, 0.3]), [0, never]], [[0, 0], [never, 0]])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_an_anticipating_policy_is_caught(toy, rule):
    example, options = appendix_a(), {"draws": FAST, "size": 2, "group": 1, "seed": 1}
    wrong, _ = toys.emit(example, rule, toys.anticipating(SHORT_TRAP), tokens=1, **options)
    share = (wrong == 0).mean()
    assert abs(share - 0.85) < 0.01  # instead of 0.7
    assert toys.p_value(example, wrong) < LEVEL
    stopped, _ = toys.emit(example, rule, toys.synchronous(SHORT_TRAP), tokens=1, **options)
    assert toys.p_value(example, stopped) >= LEVEL
    wrong, _ = toys.emit(toy[False], rule, toys.anticipating(SHORT_TRAP), **options)
    assert toys.p_value(toy[False], wrong) < LEVEL


def test_no_policy_changes_exact_tokens(toy):
    policy = toys.anticipating(SHORT_TRAP)
    for one in (toy[False], appendix_a()):
        tokens, _ = toys.emit(one, "exact", policy, draws=FAST, size=2, group=1, seed=1)
        assert (tokens == toys.draft_free(one, draws=FAST, tokens=3, seed=1)).all()


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("draws", [32_000, pytest.param(FULL, marks=pytest.mark.slow)])
def test_draft_noise_by_index_alone_is_caught(toy, rule, draws):
    """Rounds 0 and 2 draft the same token, so the total from round 0 knows it (engine.md 3.5)."""
    p = [
        toys.p_value(
            toy[False],
            toys.emit(
                toy[False],
                rule,
                toys.lagged(TRAP, 1),
                draws=draws,
                size=4,
                group=1,
                seed=1,
                index_noise=index_noise,
            )[0],
        )
        for index_noise in (True, False)
    ]
    assert p[0] < LEVEL <= p[1]


def residual_at_another_temperature(p, q):
    warm = jnp.sqrt(p)
    return residual_logprobs(warm / warm.sum(axis=-1, keepdims=True), q)


def acceptance_by_another_row(p_token, q_token):
    return acceptance_probability(p_token, jnp.roll(q_token, 1))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("residual_logprobs", residual_at_another_temperature),
        ("acceptance_probability", acceptance_by_another_row),
    ],
)
@pytest.mark.parametrize("draws", [FAST, pytest.param(FULL, marks=pytest.mark.slow)])
def test_a_wrong_rejection_step_is_caught(toy, monkeypatch, name, wrong, draws):
    monkeypatch.setattr(module, name, wrong)
    tokens, _ = toys.emit(toy[False], "rejection", toys.fixed(3), draws=draws, size=SIZE, seed=1)
    assert toys.p_value(toy[False], tokens) < LEVEL
