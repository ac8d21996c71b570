"""A Markov target and drafter of a few tokens, rounds of speculation on it, and a chi-square test.

The law of the emitted tokens is known exactly, so any rule and any policy can be tested against it.
Draws are rounds of many sequences at once; sequences of one group share a step and its budget.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import chdtrc

from deepinfer_jax.sampling.edits import tile_rows
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.rows import row_params
from deepinfer_jax.sampling.truncate import processed_logprobs
from deepinfer_jax.speculative.rejection import expected_acceptance
from deepinfer_jax.speculative.schedule import synchronous_lengths, verify_lengths
from deepinfer_jax.speculative.verify import RULES, draft_tokens, verify

FIRST = 0  # the anchor of the first round
START = 7  # its position

#: From the confidences of all rounds so far [g, r, n] to the drafts verified in the last [g, r].
Policy = Callable[[list[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Toy:
    """Log-probabilities [v, v] of the next token by the last one, and the acceptance of a draft."""

    log_p: np.ndarray
    log_q: np.ndarray
    confidence: np.ndarray

    @property
    def size(self) -> int:
        return len(self.log_p)


def make_toy(p_logits, q_logits, params=None) -> Toy:
    """Returns a toy under the given sampling parameters, target and drafter alike."""
    params = params or SamplingParams()
    logits = jnp.asarray(np.stack([p_logits, q_logits]), jnp.float32)
    rows = row_params([params] * logits.shape[1], [0] * logits.shape[1])
    log_p, log_q = (processed_logprobs(side, rows) for side in logits)
    confidence = np.array(expected_acceptance(jnp.exp(log_p), jnp.exp(log_q)))
    # Exact up to rounding: 1 where target and drafter agree.
    return Toy(np.asarray(log_p), np.asarray(log_q), np.clip(confidence, 0, 1))


def six_tokens(truncated: bool = False) -> Toy:
    """Returns 6 tokens whose drafts are good after tokens 0..2 and poor after 3..5.

    A draft of 0..2 is hence likely to be followed by one that survives, and the target wants these
    tokens more than the drafter: what a policy must not learn from the drafts, it can see here.
    """
    draw = np.random.default_rng(6)
    rich, poor = np.repeat([[2.0, 1.0]], 3, axis=1), np.asarray([[1, 1, 1, 1, 1, 20.0]])
    q = np.concatenate([np.ones((3, 6)), np.repeat(poor, 3, axis=0)])
    p = np.concatenate([np.repeat(rich, 3, axis=0), np.repeat(poor[:, ::-1], 3, axis=0)])
    p, q = (np.log(side) + 0.15 * draw.standard_normal((6, 6)) for side in (p, q))
    return make_toy(p, q, SamplingParams(top_p=0.9, top_k=4, min_p=0.02) if truncated else None)


@partial(jax.jit, static_argnames=("rule", "size"))
def draft_round(log_q, confidence, rule, size, key, last, anchor, noise_anchor):
    """Returns drafts [s, n], the rows of log q they come from, and the confidence of each."""
    rules = jnp.full(last.shape, RULES.index(rule), jnp.int32)
    drafts, rows, known = [], [], []
    for number in range(1, size + 1):
        last = jnp.maximum(last, 0)  # after a row of NaN there is no draft, and none after it
        rows.append(log_q[last])
        known.append(confidence[last])
        last = tile_rows(draft_tokens, rows[-1], rules, key, noise_anchor, anchor + number)
        drafts.append(last)
    stack = partial(jnp.stack, axis=1)
    return stack(drafts), stack(rows), stack(known)


def emit(
    toy: Toy,
    rule: str,
    policy: Policy,
    *,
    draws: int,
    size: int,
    tokens: int = 3,
    group: int = 4,
    seed: int = 0,
    index_noise: bool = False,
) -> tuple[np.ndarray, float]:
    """Returns the first tokens [draws, tokens] of each sequence, and the mean accepted per round.

    Args:
        toy: target and drafter.
        rule: of verification.
        policy: how many drafts are verified.
        draws: sequences, each with a seed of its own; a multiple of `group`.
        size: drafts of a round.
        tokens: emitted by each sequence.
        group: sequences of one step.
        seed: high word of all seeds.
        index_noise: draft noise by index alone, which is wrong.
    """
    log_p, log_q = jnp.asarray(toy.log_p), jnp.asarray(toy.log_q)
    judge = jax.jit(partial(verify, rule))  # a new function: it is traced anew
    key = np.stack([np.full(draws, seed), np.arange(draws)], axis=1).astype(np.uint32)
    last, anchor = np.full(draws, FIRST, np.int32), np.full(draws, START, np.int32)
    out, count = np.full((draws, tokens + size + 1), -1, np.int32), np.zeros(draws, np.int64)
    history, accepted, rounds = [], 0, 0
    while count.min() < tokens:
        noise_anchor = 0 * anchor if index_noise else anchor
        draft, q_rows, known = draft_round(
            log_q, toy.confidence, rule, size, key, last, anchor, noise_anchor
        )
        history.append(np.asarray(known).reshape(-1, group, size))
        length = policy(history).reshape(-1).astype(np.int32)
        context = jnp.concatenate([last[:, None], jnp.maximum(draft, 0)], axis=1)
        found = judge(log_p[context], q_rows, draft, length, key, anchor)
        token, kept = np.asarray(found.token), np.asarray(found.accepted)
        assert ((kept >= 0) & (kept <= length)).all()
        assert ((token >= 0) == (np.arange(size + 1) <= kept[:, None])).all()
        for place in range(size + 1):
            is_new = (place <= kept) & (count + place < tokens)
            out[is_new, count[is_new] + place] = token[is_new, place]
        count += kept + 1
        accepted, rounds = accepted + kept.mean(), rounds + 1
        last, anchor = token[np.arange(draws), kept], anchor + kept + 1
    return out[:, :tokens], accepted / rounds


def draft_free(toy: Toy, *, draws: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Returns the tokens of the same sequences, one per step."""

    def no_drafts(history):
        return np.zeros(history[-1].shape[:2])

    return emit(toy, "exact", no_drafts, draws=draws, size=1, tokens=tokens, seed=seed)[0]


def p_value(toy: Toy, tokens: np.ndarray) -> float:
    """Returns the chance of a chi-square at least as large as that of the joint counts.

    Cells with fewer than 5 expected are one; a count in an impossible cell gives 0.
    """
    p = np.exp(toy.log_p.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    law = p[FIRST]
    for _ in range(tokens.shape[1] - 1):
        law = law[..., None] * p
    cell = np.ravel_multi_index(tokens.T, law.shape)
    counts, expected = np.bincount(cell, minlength=law.size), law.reshape(-1) * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    is_small = (expected < 5) & (expected > 0)
    pooled = [(counts[is_small].sum(), expected[is_small].sum())] if is_small.any() else []
    cells = [*zip(counts[expected >= 5], expected[expected >= 5], strict=True), *pooled]
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    return float(chdtrc(len(cells) - 1, statistic))


def fixed(length: int) -> Policy:
    """Returns the policy that verifies so many drafts."""
    return lambda history: np.full(history[-1].shape[:2], length)


def threshold(least: float) -> Policy:
    """Returns the policy that verifies drafts whose survival is high enough."""

    def lengths(history):
        return (np.cumprod(history[-1], axis=-1) >= least).sum(axis=-1)

    return lengths


def synchronous(speed: np.ndarray) -> Policy:
    """Returns Algorithm 1 on the confidences of the round itself, with its early stop."""

    def lengths(history):
        rates = np.cumprod(history[-1], axis=-1)
        return np.stack([synchronous_lengths(one, speed) for one in rates]) - 1

    return lengths


def best_totals(confidence: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """Returns the rows of each group with the most expected tokens per second, no early stop."""
    groups, sequences, drafts = confidence.shape
    rates = np.sort(np.cumprod(confidence, axis=-1).reshape(groups, -1), axis=1)[:, ::-1]
    expected = sequences + np.cumsum(np.pad(rates, ((0, 0), (1, 0))), axis=1)
    return sequences + np.argmax(expected * speed[sequences : sequences * (drafts + 1) + 1], axis=1)


def by_rank(confidence: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Returns how the device shares totals out by the survivals of the round itself."""
    return np.asarray(_shares(confidence, totals.astype(np.int32))) - 1


_shares = jax.jit(jax.vmap(verify_lengths))


def lagged(speed: np.ndarray, first: int) -> Policy:
    """Returns the product's policy: totals from two rounds ago; `first` rows in two rounds."""

    def lengths(history):
        totals = np.full(len(history[-1]), first)
        if len(history) > 2:
            totals = best_totals(history[-3], speed)
        return by_rank(history[-1], totals)

    return lengths


def anticipating(speed: np.ndarray) -> Policy:
    """Returns the wrong policy: totals from the confidences of the round itself."""
    return lambda history: by_rank(history[-1], best_totals(history[-1], speed))
