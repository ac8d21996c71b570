"""F1 on nano: rounds of "rejection" and "block" leave the law of the first tokens what it is.

The law of three tokens after a prefix is exact: probabilities of `di.score` after the sampler's own
transform, whose top_k leaves 6 tokens at every step. Chi-square at 1 %; seeds are fixed.
"""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import chdtrc

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.model.draft import draft_blocks
from deepinfer_jax.sampling.edits import tile_rows
from deepinfer_jax.sampling.rows import row_params
from deepinfer_jax.sampling.truncate import logprobs_tile, processed_logprobs
from deepinfer_jax.speculative.verify import RULES, draft_tokens, verify
from deepinfer_jax.training.draft_calibration import corpus_prompts
from tests.e2e.forced import NANO, nano

pytestmark = [pytest.mark.accept(6), pytest.mark.slow]
PARAMS = di.SamplingParams(temperature=1, top_k=6, ignore_eos=True, detokenize=False)
LENGTH = 24  # of every prefix, so that one program scores all
TASKS = ("story", "story", "question", "extraction", "list")
LEVEL = 0.01
SCORE = jax.jit(di.score, static_argnums=1)


@cache
def prefixes() -> list[list[int]]:
    """Returns the beginnings of five prompts, a story's continued by itself."""
    found = []
    for number, task in enumerate(TASKS):
        ids = corpus_prompts(nano().tokenizer, task, split="test", seed=2, count=number + 1)[number]
        found.append((ids * LENGTH)[:LENGTH] if len(ids) < LENGTH else ids[:LENGTH])
    return found


def processed(logits, params: di.SamplingParams) -> np.ndarray:
    """Returns log p [b, v] of logits [b, v] after the sampler's transform."""
    rows = row_params([params] * len(logits), [0] * len(logits))
    return np.asarray(processed_logprobs(jnp.asarray(logits), rows))


@dataclass(frozen=True)
class Law:
    """Log-probabilities of the first three tokens after a prefix, over the ids that can occur.

    ids [n]: ascending. first [n], second [n, n], third [n, n, n]: by the tokens before, as places
    in `ids`; uniform after what cannot occur.
    """

    ids: np.ndarray
    first: np.ndarray
    second: np.ndarray
    third: np.ndarray

    @property
    def joint(self) -> np.ndarray:
        """Probabilities [n, n, n]."""
        parts = (self.first[:, None, None], self.second[..., None], self.third)
        law = np.exp(sum(part.astype(np.float64) for part in parts))
        return law / law.sum()


def support(log_p: np.ndarray) -> list[int]:
    """Returns the ids that a row leaves."""
    return np.flatnonzero(np.isfinite(log_p)).tolist()


def target_law(model, prefix: list[int], params, more: set[int] = frozenset()) -> Law:
    """Returns the law of the target; more: ids beside those of the target."""

    def row(*tokens: int) -> np.ndarray:
        ids = np.asarray([*prefix, *tokens, 0, 0][: LENGTH + 2], np.int32)
        logits = np.asarray(SCORE(model.params, model.config, ids))
        return processed(logits[LENGTH - 1 + len(tokens)][None], params)[0]

    rows = {(): row()}
    rows |= {(one,): row(one) for one in support(rows[()])}
    pairs = [(one, two) for one in support(rows[()]) for two in support(rows[one,])]
    rows |= {pair: row(*pair) for pair in pairs}
    ids = np.asarray(
        sorted({*more, *(token for log_p in rows.values() for token in support(log_p))})
    )
    return tables(ids, rows)


def tables(ids: np.ndarray, rows: dict[tuple[int, ...], np.ndarray]) -> Law:
    """Returns the rows [v] by the tokens before them, as tables over `ids`."""
    size = len(ids)
    found = [np.full((size,) * (depth + 1), -np.log(size), np.float32) for depth in range(3)]
    for tokens, log_p in rows.items():
        found[len(tokens)][tuple(np.searchsorted(ids, tokens))] = log_p[ids]
    return Law(ids, *found)


def p_value(law: Law, tokens: np.ndarray) -> float:
    """Returns the chance of a chi-square at least as large as that of tokens [n, 3], as places.

    Cells with fewer than 5 expected are one; a count in an impossible cell gives 0.
    """
    joint = law.joint
    counts = np.zeros(joint.shape, np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    wanted = joint * len(tokens)
    if counts[joint == 0].any():
        return 0.0
    small = (wanted < 5) & (joint > 0)
    cells = [*zip(counts[wanted >= 5], wanted[wanted >= 5], strict=True)]
    cells += [(counts[small].sum(), wanted[small].sum())] if wanted[small].sum() > 1 else []
    assert len(cells) > 20, "the law has too few outcomes to say anything"
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    return float(chdtrc(len(cells) - 1, statistic))


# -- through the engine ---------------------------------------------------------------------------

DRAWS = 2000


@cache
def unordered():
    """Returns nano at level "run", where these rules are allowed."""
    return di.load("nano", determinism="run")


@cache
def engine_law() -> Law:
    return target_law(unordered(), prefixes()[0], PARAMS)


@pytest.mark.parametrize(
    ("rule", "policy", "depth"),
    [
        ("rejection", "fixed", 0),
        ("rejection", "scheduled", 1),
        ("block", "fixed", 1),
        ("block", "scheduled", 0),
        ("exact", "fixed", 1),
    ],
)
def test_the_engine_keeps_the_law(rule, policy, depth):
    length = {"fixed": 5, "scheduled": None}[policy]
    engine = Engine(
        unordered(),
        replace(
            NANO,
            draft_policy=policy,
            draft_length=length,
            async_depth=depth,
            max_seqs=4,  # few, and room for their prompts: a schedule drafts
            max_len=64,
            max_tokens_per_step=4 * LENGTH,
            check=False,
        ),
    )
    # Longer than three tokens, so that the second and third come from rounds of several drafts.
    params = replace(PARAMS, max_tokens=6, verify=rule)
    requests = [engine.submit(prefixes()[0], replace(params, seed=seed)) for seed in range(DRAWS)]
    engine.drain()
    law = engine_law()
    tokens = np.asarray([request.output().token_ids[:3] for request in requests])
    places = np.searchsorted(law.ids, tokens)
    stats = engine.stats()
    accepted = sum(stats.accepted) / stats.rounds
    value = p_value(law, np.minimum(places, len(law.ids) - 1))
    print(f"{rule}, {policy}, depth {depth}: p {value:.3f}, {accepted:.2f} accepted a round")
    assert (law.ids[np.minimum(places, len(law.ids) - 1)] == tokens).all()
    assert value >= LEVEL
    assert accepted > 0.3


# -- the model's own rows, judged many times ------------------------------------------------------

MANY, PART = 300_000, 25_000
DRAFTS = 3


@partial(jax.jit, static_argnames=("config", "params"))
def forced_log_q(weights, config, state, anchor, forced, params):
    """Returns log q [s, block, v] of blocks whose first drafts are given, ids [s, 2]."""
    count = forced.shape[0]
    rules = row_params([params] * count, [0] * count)

    def choose(sequence, place, scores):
        token = forced[sequence, jnp.minimum(place, forced.shape[1] - 1)]
        return token, logprobs_tile(scores, rules.take(sequence))

    ones = jnp.ones((count,), jnp.int32)
    found = draft_blocks(
        weights, config, state, anchor * ones, (LENGTH - 2) * ones, ones, count, choose
    )
    return found.log_q


def draft_law(model, prefix: list[int], params) -> dict[tuple[int, ...], np.ndarray]:
    """Returns log q [v] by the drafts before it; the anchor is the last id of the prefix."""
    state = di.init_state(model.config, di.RuntimeConfig(max_seqs=1, max_len=64))
    position = np.arange(LENGTH - 1)
    plan = di.make_plan(model.config, prefix[:-1], position, np.ones(LENGTH - 1, np.int32))
    state, _ = di.prefill(model.params, model.config, state, plan)

    def rows(paths: list[tuple[int, int]]) -> np.ndarray:
        forced = np.zeros((36, 2), np.int32)
        forced[: len(paths)] = paths
        anchor = jnp.int32(prefix[-1])
        found = forced_log_q(model.params, model.config, state, anchor, forced, params)
        return np.asarray(found)[: len(paths)]

    first = rows([(0, 0)])[0, 0]
    ones = support(first)
    second = dict(zip(ones, rows([(one, 0) for one in ones])[:, 1], strict=True))
    pairs = [(one, two) for one in ones for two in support(second[one])]
    third = dict(zip(pairs, rows(pairs)[:, 2], strict=True))
    return {(): first, **{(one,): row for one, row in second.items()}, **third}


@partial(jax.jit, static_argnames="rule")
def judge(rule, target, drafter, key, sharper=1.0):
    """Returns what one round of every key emits: tokens [s, 4], -1 beyond the last.

    sharper: raises the q that the verification is told to this power, which is wrong.
    """
    count = key.shape[0]
    rules = jnp.full((count,), RULES.index(rule), jnp.int32)
    anchor = jnp.full((count,), LENGTH - 1, jnp.int32)
    drafts, log_q = [], []
    for number, table in enumerate(drafter):
        log_q.append(jnp.broadcast_to(table[tuple(drafts)], (count, len(table))))
        drafts.append(tile_rows(draft_tokens, log_q[-1], rules, key, anchor, anchor + 1 + number))
    log_p = [jnp.broadcast_to(target[0], log_q[0].shape)]
    log_p += [table[tuple(drafts[: depth + 1])] for depth, table in enumerate(target[1:])]
    log_p.append(log_p[-1])  # chooses a fourth token, which is not looked at
    stack = partial(jnp.stack, axis=1)
    length = jnp.full((count,), DRAFTS, jnp.int32)
    told = jax.nn.log_softmax(sharper * stack(log_q), axis=-1)
    found = verify(rule, stack(log_p), told, stack(drafts), length, key, anchor)
    return found.token


def completed(law: Law, tokens: np.ndarray, seed: int) -> np.ndarray:
    """Returns the first three tokens; what a round did not emit is drawn from the target."""
    draw = np.random.default_rng(seed)
    tokens = tokens[:, :3].copy()
    for place, table in enumerate((law.first, law.second, law.third)):
        missing = tokens[:, place] < 0
        before = tuple(tokens[missing, :place].T)
        p = np.exp(np.broadcast_to(table[before], (missing.sum(), len(law.ids))).astype(np.float64))
        edge = np.cumsum(p / p.sum(axis=1, keepdims=True), axis=1)
        drawn = (edge < draw.random((len(p), 1))).sum(axis=1)
        tokens[missing, place] = np.minimum(drawn, len(law.ids) - 1)
    return tokens


def rounds(number: int, rule: str, **wrong) -> tuple[float, float]:
    """Returns (p-value, mean tokens) of many rounds after one prefix."""
    params = replace(PARAMS, temperature=1.5)
    law, drafter = laws(number, params)
    target, drafts = ([one.first, one.second, one.third] for one in (law, drafter))
    found = []
    for start in range(0, MANY, PART):
        key = np.stack([np.full(PART, number), np.arange(start, start + PART)], axis=1)
        found.append(np.asarray(judge(rule, target, drafts, key.astype(np.uint32), **wrong)))
    tokens = np.concatenate(found)
    return p_value(law, completed(law, tokens, number)), float((tokens >= 0).sum(axis=1).mean())


@cache
def laws(number: int, params) -> tuple[Law, Law]:
    """Returns the laws of target and drafter after a prefix, over the same ids."""
    drafter = draft_law(nano(), prefixes()[number], params)
    ids = {token for log_q in drafter.values() for token in support(log_q)}
    law = target_law(nano(), prefixes()[number], params, ids)
    return law, tables(law.ids, drafter)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", range(len(TASKS)))
def test_rules_on_the_rows_of_the_model_keep_the_law(number, rule):
    value, emitted = rounds(number, rule)
    print(f"prefix {number}, {rule}: p {value:.3f}, {emitted:.2f} tokens a round")
    assert value >= LEVEL
    assert 1.05 < emitted < DRAFTS + 1


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_wrong_q_is_noticed(rule):
    assert rounds(0, rule, sharper=1.2)[0] < 1e-6
