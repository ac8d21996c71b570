"""The sampler: greedy ties, law, independence of batch and position, failures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import random
from deepinfer_jax.sampling.edits import NUMERICAL, OK, Edits, edit_logits
from deepinfer_jax.sampling.logprobs import raw_logprobs
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.rows import bias_rows, row_params
from deepinfer_jax.sampling.sample import NO_TOKEN, choose_token, sample
from deepinfer_jax.sampling.truncate import processed_logprobs, processed_probabilities
from pallas_kernels import core
from tests.deepinfer_jax.sampling import oracle

INF, NAN = np.inf, np.nan
BATCHES = (1, 2, 3, 7, 8, 9, 16, 33)


def index(size, start=40):
    return jnp.arange(start, start + size, dtype=jnp.int32)


def test_greedy_takes_the_lowest_id_of_the_highest_logits():
    logits = np.full((16, 65), -INF, np.float32)
    logits[:4, :4] = [[1, 3, 3, 2], [0, -0.0, -1, -2], [-0.0, 0, -1, -2], [-INF, -INF, -5, -INF]]
    logits[4:, 60:] = 7
    for temperature in (0.0, 1e-6, 9.9e-6):
        rows = oracle.one(16, temperature=temperature, top_k=1, top_p=0.1, min_p=1.0)
        out = sample(jnp.asarray(logits), rows, index(16))
        assert out.token.tolist() == [1, 0, 0, 2, *[60] * 12]
        assert out.status.tolist() == [OK] * 16


def test_greedy_is_argmax_in_a_mixed_batch():
    logits = oracle.normal(0, (16, 65))
    rows = oracle.mixed_rows(16)
    got = np.asarray(sample(logits, rows, index(16)).token)
    want = np.asarray(logits).argmax(axis=-1)
    assert (got[1::7] == want[1::7]).all()
    assert (got[6::7] == want[6::7]).all()  # temperature 1e-5 is not greedy but as cold
    assert (got != want).any()


def test_tokens_follow_from_the_written_rule():
    """argmax(log p - log E) with E from the counters, in float64 from the outside."""
    logits, rows = oracle.normal(1, (16, 65)), oracle.one(16, temperature=0.9, top_p=0.95)
    got = np.asarray(sample(logits, rows, index(16)).token)
    p = np.asarray(processed_probabilities(logits, rows), np.float64)
    lanes = jnp.arange(33, dtype=jnp.uint32)[None]
    y0, y1 = random.random_words(rows.key, index(16), lanes, random.TARGET)
    words = np.stack([y0, y1], axis=-1).reshape(16, -1)[:, :65].astype(np.float64)
    exponential = -np.log1p(-(words + 0.5) * 2**-32)
    with np.errstate(divide="ignore"):
        want = (np.log(p) - np.log(exponential)).argmax(axis=-1)
    assert got.tolist() == want.tolist()


def test_a_fused_sample_equals_its_pieces():
    logits, rows = oracle.normal(2, (16, 65)), oracle.mixed_rows(16)
    scores, status = edit_logits(logits, rows)
    log_p = processed_logprobs(scores, rows)
    token = choose_token(log_p, rows.key, index(16))
    out = sample(logits, rows, index(16), logprobs=3, mode="processed")
    assert out.token.tolist() == token.tolist()
    assert out.status.tolist() == status.tolist()
    want = np.take_along_axis(np.asarray(log_p), np.asarray(token)[:, None], axis=1)[:, 0]
    assert (oracle.bits(out.logprobs.logprob) == oracle.bits(want)).all()


def chi_square(counts, probabilities):
    """The statistic over its degrees of freedom in standard deviations (Wilson-Hilferty)."""
    draws = counts.sum()
    common = probabilities * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probabilities[common], probabilities[~common].sum()) * draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread)


LAWS = {
    "uniform": (np.zeros(32), {}),
    "zipf": (-np.log(np.arange(1.0, 102.0)), {}),
    "geometric": (-0.35 * np.arange(64.0), {"temperature": 0.7}),
    "truncated": (-np.log(np.arange(1.0, 102.0)), {"top_p": 0.8, "top_k": 40, "min_p": 0.03}),
    "sparse": (np.where(np.arange(65) % 13 == 0, np.arange(65) / 20, -INF), {"temperature": 1.5}),
}


@pytest.mark.parametrize("name", LAWS)
def test_law(name):
    """24,576 draws of consecutive indices and several seeds; 4 standard deviations."""
    logits, fields = LAWS[name]
    logits = jnp.asarray(logits, jnp.float32)
    draws, size = 24_576, logits.shape[0]
    seeds = np.arange(draws) // 2048
    one = oracle.one(1, **fields)
    log_p = processed_logprobs(logits[None], one)
    keys = jnp.asarray(np.stack([np.zeros(draws), 11 + seeds], axis=1), jnp.uint32)
    tokens = jax.jit(choose_token)(
        jnp.broadcast_to(log_p, (draws, size)), keys, jnp.arange(draws) % 2048 + 3
    )
    counts = np.bincount(np.asarray(tokens), minlength=size)
    p = np.asarray(processed_probabilities(logits[None], one)[0], np.float64)
    assert counts[p == 0].sum() == 0
    p /= p.sum()
    assert abs(chi_square(counts, p)) < 4
    # a control that must fail: the same draws against a slightly warmer law
    warmer = np.where(p > 0, p**0.85, 0) / np.where(p > 0, p**0.85, 0).sum()
    if name != "uniform":
        assert chi_square(counts, warmer) > 4


def test_purposes_and_seeds_give_different_draws():
    logits = jnp.zeros((64, 97))
    keys = jnp.asarray(np.stack([np.zeros(64), np.arange(64)], axis=1), jnp.uint32)
    log_p = jnp.log(jnp.full((64, 97), 1 / 97))
    target, residual, draft = (
        np.asarray(choose_token(log_p, keys, index(64), purpose))
        for purpose in (random.TARGET, random.RESIDUAL, random.DRAFT)
    )
    other = np.asarray(choose_token(log_p, keys[::-1], index(64)))
    for a, b in ((target, residual), (target, draft), (residual, draft), (target, other)):
        assert (a == b).sum() < 8
    assert logits.shape == log_p.shape


def full_edits(rows, size, seed=9):
    rng = np.random.default_rng(seed)
    ids, values = bias_rows([{int(i): float(i % 5)} for i in rng.integers(0, size, rows)], 2)
    return Edits(
        bias_ids=ids,
        bias_values=values,
        output_counts=jnp.asarray(rng.integers(0, 3, (rows, size)), jnp.int32),
        in_prompt=jnp.asarray(rng.random((rows, size)) < 0.2),
        allowed=jnp.asarray(rng.random((rows, size)) < 0.9),
        banned_ids=jnp.asarray(rng.integers(-1, size, (rows, 3)), jnp.int32),
        grammar=jnp.asarray(rng.random((rows, size)) < 0.9),
    )


def flat(out):
    return [oracle.bits(leaf) for leaf in jax.tree.leaves(out)]


def check_batches(call, tree, batches):
    """Asserts that each row's results are those of the full batch, at several positions."""
    want = flat(call(*tree))
    rows, rng = len(want[0]), np.random.default_rng(3)
    for count in batches:
        for _ in range(4):
            chosen = rng.permutation(rows)[:count]
            for a, b in zip(flat(call(*take(tree, chosen))), want, strict=True):
                assert (a == b[chosen]).all(), (count, chosen.tolist())
    return want


def test_bits_of_a_row_do_not_depend_on_the_batch():
    """Batches of 1..33 rows with all edits; NaN in the other rows changes nothing either."""
    rows, size = 33, 301
    tree = (oracle.normal(7, (rows, size)), oracle.mixed_rows(rows), index(rows))
    edits = full_edits(rows, size)

    def call(*parts):
        return sample(*parts, logprobs=4, mode="processed")

    want = check_batches(call, (*tree, edits), BATCHES)
    poisoned = tree[0].at[::2].set(NAN)
    for a, b in zip(flat(call(poisoned, *tree[1:], edits)), want, strict=True):
        assert (a[1::2] == b[1::2]).all()


def test_raw_logprobs_do_not_depend_on_the_batch():
    tree = (oracle.normal(7, (33, 512)), jnp.arange(33) * 7)
    check_batches(lambda *parts: raw_logprobs(*parts, 4), tree, (1, 7, 8, 9))


def test_the_batch_check_notices_a_row_that_knows_its_place(monkeypatch):
    exact = core.log_softmax

    def displaced(x):
        return exact(x) - jnp.arange(x.shape[0])[:, None] * np.float32(1e-6)

    tree = (oracle.normal(7, (9, 65)), oracle.one(9))
    check_batches(processed_logprobs, tree, (3,))
    monkeypatch.setattr(core, "log_softmax", displaced)
    with pytest.raises(AssertionError):
        check_batches(processed_logprobs, tree, (3,))


def take(tree, rows):
    return jax.tree.map(lambda leaf: leaf[jnp.asarray(rows)], tree)


@pytest.mark.parametrize("count", [8, 9])
def test_bits_inside_another_program_and_op_by_op(count):
    """Eager pieces, a foreign jit with producers and consumers, and a loop over single rows."""
    logits, rows, at = oracle.normal(5, (count, 301)), oracle.mixed_rows(count), index(count)
    # eager: with 8 rows the tile body runs op by op
    log_p = processed_logprobs(logits, rows)
    want = flat((log_p, choose_token(log_p, rows.key, at)))

    @jax.jit
    def foreign(logits, rows, at):
        scaled = logits * 0.5 * 2
        log_p = processed_logprobs(scaled, rows)
        return (log_p, choose_token(log_p, rows.key, at)), jnp.exp(log_p).sum()

    @jax.jit
    def single(logits, rows, at):
        alone = jax.tree.map(lambda leaf: leaf[:, None], (logits, rows, at))
        return jax.lax.map(lambda parts: sample(*parts), alone)

    for a, b in zip(flat(foreign(logits, rows, at)[0]), want, strict=True):
        assert (a == b).all()
    assert (single(logits, rows, at).token[:, 0] == want[1]).all()
    assert (sample(logits, rows, at).token == want[1]).all()


@pytest.mark.parametrize("width", [513])
def test_vocabulary_padding_changes_nothing(width):
    logits, rows, at = oracle.normal(8, (9, 301)), oracle.mixed_rows(9), index(9)
    want = sample(logits, rows, at, logprobs=3, mode="processed")
    padded = jnp.pad(logits, [(0, 0), (0, width - 301)], constant_values=7.0)
    never = jnp.arange(width) >= 301
    got = sample(padded, rows, at, never_emit=never, logprobs=3, mode="processed")
    assert got.token.tolist() == want.token.tolist()
    assert (oracle.bits(got.logprobs.logprob) == oracle.bits(want.logprobs.logprob)).all()


def test_bad_rows_are_reported_and_leave_the_others_alone():
    logits = np.array(oracle.normal(6, (16, 65)))
    rows, at = oracle.mixed_rows(16), index(16)
    want = np.asarray(sample(jnp.asarray(logits), rows, at).token)
    logits[0, 3], logits[4], logits[8, 64] = NAN, -INF, INF
    out = sample(jnp.asarray(logits), rows, at)
    bad = [0, 4, 8]
    assert np.asarray(out.status)[bad].tolist() == [NUMERICAL] * 3
    assert np.asarray(out.token)[bad].tolist() == [NO_TOKEN] * 3
    good = [1, 2, 3, 5, 6, 7]
    assert np.asarray(out.token)[good].tolist() == want[good].tolist()
    assert np.asarray(out.status)[good].tolist() == [OK] * 6


@pytest.mark.parametrize("size", [1, 7])
def test_huge_logits_odd_vocabularies_and_cold_rows(size):
    logits = np.full((3, size), -1e30, np.float32)
    logits[0, -1], logits[1, 0], logits[2] = 1e30, 3e38, np.linspace(-3e38, 3e38, size)
    for temperature in (0.0, 1e-6, 1e-5, 1.0, 50.0):
        rows = oracle.one(3, temperature=temperature, top_p=0.9, top_k=5, min_p=0.01)
        out = sample(jnp.asarray(logits), rows, index(3), logprobs=2, mode="processed")
        assert out.status.tolist() == [OK] * 3
        assert out.token.tolist() == [size - 1, 0, size - 1]
        np.testing.assert_allclose(out.logprobs.logprob, 0, atol=1e-6)


def test_a_single_survivor_always_wins():
    logits = jnp.full((16, 65), -INF).at[:, 17].set(0.0)
    for start in range(0, 256, 16):
        assert (sample(logits, oracle.one(16), index(16, start)).token == 17).all()


def test_children_equal_lone_requests():
    logits, at = jnp.zeros((16, 65)), jnp.full((16,), 5)
    seeds = [random.child_seed(7, child) for child in range(16)]
    rows = row_params([SamplingParams()] * 16, seeds)
    key = jnp.asarray(random.seed_key(7))[None].repeat(16, axis=0)
    assert (random.child_key(key, jnp.arange(16)) == rows.key).all()
    tokens = sample(logits, rows, at).token.tolist()
    for child in (0, 5):
        lone = row_params([SamplingParams()], [seeds[child]], size=16)
        assert sample(logits, lone, at).token[0] == tokens[child]
    assert len(set(tokens)) > 8


def test_no_rows():
    rows = row_params([], [])
    out = sample(jnp.zeros((0, 11)), rows, index(0), logprobs=2)
    assert out.token.shape == (0,)
    assert out.logprobs.top_ids.shape == (0, 2)
