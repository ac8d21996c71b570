"""Verdicts of rows and rounds against a plain loop, their guards, and bits that stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.errors import InputError
from deepinfer_jax.sampling import random
from deepinfer_jax.sampling.sample import choose_token
from deepinfer_jax.speculative.block import block_length, block_mass, block_rows
from deepinfer_jax.speculative.schedule import synchronous_lengths
from deepinfer_jax.speculative.verify import (
    BLOCK,
    EXACT,
    REJECTION,
    RULES,
    draft_tokens,
    row_verdicts,
    verify,
)
from pallas_kernels import core
from tests.deepinfer_jax.speculative import toy_markov as toys

INF, NAN = np.inf, np.nan
TILE, VOCAB = core.ROW_TILE, 37
ROUNDS, SIZE = 24, 3  # most tests have one shape, hence one program a rule

judge = jax.jit(row_verdicts)
judge_blocks = jax.jit(block_rows)
verify_jit = jax.jit(verify, static_argnames="rule")


def log_softmax(logits):
    return np.array(core.log_softmax(jnp.asarray(logits, jnp.float32)))


def make_rounds(count=ROUNDS, size=SIZE, *, seed=0):
    """Rounds whose drafts were drawn from q: (log p, log q, draft, length, key, anchor)."""
    draw = np.random.default_rng(seed)
    logits = 1.5 * draw.standard_normal((count, size + 1, VOCAB))
    log_p = log_softmax(np.where(draw.random(logits.shape) < 0.2, -INF, logits))
    close = logits[:, :size] + 0.6 * draw.standard_normal((count, size, VOCAB))
    log_q = log_softmax(np.where(draw.random(close.shape) < 0.1, -INF, close))
    key = draw.integers(0, 2**32, (count, 2), dtype=np.uint32)
    anchor = draw.integers(1, 9000, count).astype(np.int32)
    length = draw.integers(0, size + 1, count).astype(np.int32)
    return log_p, log_q, key, anchor, length


def drafts_of(rule, log_q, key, anchor):
    count, size, _ = log_q.shape
    rules = jnp.full(TILE, RULES.index(rule))
    draft = np.zeros((count, size), np.int32)
    for row in range(count):
        for column in range(size):
            at = jnp.full(TILE, anchor[row])
            one = jnp.broadcast_to(log_q[row, column], (TILE, VOCAB))
            keys = jnp.broadcast_to(key[row], (TILE, 2))
            draft[row, column] = _draft(one, rules, keys, at, at + 1 + column)[0]
    return draft


_draft = jax.jit(draft_tokens)


def pick(log_p, key, index, purpose=random.TARGET):
    """One choice; the weights need no norm."""
    rows = jnp.asarray(log_p, jnp.float32)[None]
    return int(_pick(rows, jnp.asarray(key)[None], jnp.asarray([index]), purpose)[0])


_pick = jax.jit(choose_token, static_argnums=3)


def coin_of(key, index, number):
    return float(
        random.coins(jnp.asarray(key)[None], *(jnp.asarray([[x]]) for x in (index, number)))[0, 0]
    )


def weights(scale, p, q):
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(scale * p - q, 0))


def plain_round(rule, log_p, log_q, draft, length, key, anchor):
    """Returns the tokens of one round, as engine.md 3.8 says."""
    p, q = np.exp(np.float64(log_p)), np.exp(np.float64(log_q))
    coin = [coin_of(key, anchor + j, j) for j in range(1, length + 1)]
    if rule == "block":
        prefix = [1.0]
        for j in range(length):
            prefix.append(min(prefix[j] * p[j][draft[j]] / q[j][draft[j]], 1))
        kept = 0
        for j in range(1, length + 1):
            if j == length:
                chance = prefix[j]
            else:
                mass = np.maximum(prefix[j] * p[j] - q[j], 0).sum()
                chance = mass / (mass + 1 - prefix[j])
            kept = j if coin[j - 1] < chance else kept
        scale = prefix[kept]
    else:
        kept, scale = 0, 1.0
        for j in range(length):
            if rule == "exact":
                is_accepted = draft[j] == pick(log_p[j], key, anchor + 1 + j)
            else:
                is_accepted = coin[j] < min(1, p[j][draft[j]] / q[j][draft[j]])
            if not is_accepted:
                break
            kept += 1
    index = anchor + 1 + kept
    if rule == "exact" or kept == length:
        last = pick(log_p[kept], key, index)
    else:
        last = pick(weights(scale, p[kept], q[kept]), key, index, random.RESIDUAL)
    return [*draft[:kept].tolist(), last]


@pytest.mark.parametrize("rule", RULES)
def test_verify_against_a_loop(rule):
    log_p, log_q, key, anchor, length = make_rounds()
    draft = drafts_of(rule, log_q, key, anchor)
    found = verify_jit(rule, log_p, log_q, draft, length, key, anchor)
    token = np.asarray(found.token)
    want = [
        plain_round(rule, *(x[row] for x in (log_p, log_q, draft, length, key, anchor)))
        for row in range(len(draft))
    ]
    for row, tokens in enumerate(want):
        assert token[row].tolist() == tokens + [-1] * (SIZE + 1 - len(tokens))
    assert found.accepted.tolist() == [len(tokens) - 1 for tokens in want]
    assert {len(tokens) for tokens in want} >= {1, 2, 3}
    assert any(len(tokens) <= most for tokens, most in zip(want, length, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_a_round_does_not_depend_on_the_others(rule):
    log_p, log_q, key, anchor, length = make_rounds(seed=1)
    draft = drafts_of(rule, log_q, key, anchor)
    whole = verify_jit(rule, log_p, log_q, draft, length, key, anchor)
    order = np.random.default_rng(0).permutation(ROUNDS)
    for rows in (order, order[:1], order[3:10]):
        part = [x[rows] for x in (log_p, log_q, draft, length, key, anchor)]
        found = verify_jit(rule, *part)
        assert np.array_equal(found.token, np.asarray(whole.token)[rows])
        assert np.array_equal(found.accepted, np.asarray(whole.accepted)[rows])


def make_tile(seed):
    """Rows of mixed rules, some without a draft, each with its prefix mass."""
    draw = np.random.default_rng(seed)
    log_p, log_q, key, _, _ = make_rounds(TILE, 1, seed=seed)
    tile = {
        "log_p": log_p[:, 0],
        "log_q": log_q[:, 0],
        "draft": draw.integers(-1, VOCAB, TILE).astype(np.int32),
        "rule": draw.integers(0, 3, TILE).astype(np.int32),
        "key": key,
        "index": draw.integers(1, 9000, TILE).astype(np.int32),
        "number": draw.integers(1, 6, TILE).astype(np.int32),
    }
    token = choose_token(*(jnp.asarray(tile[name]) for name in ("log_p", "key", "index")))
    return tile | {"token": np.asarray(token)}, draw.random(TILE).astype(np.float32)


def bits_of_tile(tile, prefix):
    """Every float32 and integer that a tile's two bodies return, [t, ...]."""
    found = judge(**tile)
    active = (tile["rule"] == BLOCK) & (tile["draft"] >= 0)
    where = (tile["log_p"], tile["log_q"], prefix, active, tile["key"], tile["index"])
    block = judge_blocks(*where, found.correction)
    floats = [np.asarray(x).view(np.uint32) for x in (found.ratio, block.mass)]
    whole = [np.asarray(x) for x in (found.accept, found.correction, block.correction)]
    return np.stack([*floats, *whole], axis=1)


def test_a_row_does_not_depend_on_the_others_of_its_tile():
    """Each row alone among rows of another tile, and among rows of one rule, has the same bits."""
    tiles = [make_tile(seed) for seed in range(6)]
    rules = np.concatenate([tile["rule"] for tile, _ in tiles])
    assert set(rules) == {EXACT, REJECTION, BLOCK}
    for (tile, prefix), (mates, other) in zip(tiles, [*tiles[1:], tiles[0]], strict=True):
        whole = bits_of_tile(tile, prefix)
        for row in range(TILE):
            place = (3 * row + 1) % TILE
            for rule in (None, EXACT, REJECTION, BLOCK):
                moved = {name: x.copy() for name, x in mates.items()}
                if rule is not None:
                    moved["rule"][:] = rule
                mass = other.copy()
                for name, x in tile.items():
                    moved[name][place] = x[row]
                mass[place] = prefix[row]
                assert np.array_equal(bits_of_tile(moved, mass)[place], whole[row])


def test_exact_rows_need_no_draft_distribution():
    tile, _ = make_tile(3)
    tile["rule"][:] = EXACT
    tile["draft"][:3] = tile["token"][:3]
    alone, beside = judge(**tile | {"log_q": None}), judge(**tile)
    assert jax.tree.all(jax.tree.map(np.array_equal, alone, beside))
    assert alone.accept.tolist() == (tile["draft"] == tile["token"]).tolist()
    assert alone.correction.tolist() == tile["token"].tolist()


def test_draft_noise_is_the_target_s_or_the_round_s():
    tile, _ = make_tile(5)
    log_q, key, index = (jnp.asarray(tile[name]) for name in ("log_q", "key", "index"))
    anchor = index - tile["number"]
    shared = choose_token(log_q, key, index)
    own = choose_token(log_q, random.anchor_key(key, anchor), index, random.DRAFT)
    assert not np.array_equal(shared, own)
    for rule in (tile["rule"], *(np.full(TILE, one, np.int32) for one in range(3))):
        found = _draft(log_q, rule, key, anchor, index)
        assert np.array_equal(found, np.where(rule == EXACT, shared, own))


def test_exact_tokens_are_those_without_drafts():
    """Whatever is drafted and however many drafts are verified."""
    toy, draw = toys.six_tokens(), np.random.default_rng(0)
    plain = toys.draft_free(toy, draws=512, tokens=12)

    def lengths(history):
        return draw.integers(0, 5, history[-1].shape[:2])

    for drafter in (toy.log_q, toy.log_p, np.roll(toy.log_p, 2, axis=1)):
        other = toys.Toy(toy.log_p, drafter, toy.confidence)
        tokens, _ = toys.emit(other, "exact", lengths, draws=512, size=4, tokens=12)
        assert np.array_equal(tokens, plain)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rounds_emit_the_highest_logit(rule):
    """Whatever the keys are: one survivor, and drafters that are greedy, plain, equal or NaN."""
    log_p, log_q, key, anchor, length = make_rounds(seed=2)
    best = log_p.argmax(axis=-1).astype(np.int32)

    def greedy(at):
        return np.where(np.arange(VOCAB) == at[..., None], 0, -INF).astype(np.float32)

    draft = np.where(
        np.arange(3) < np.arange(ROUNDS)[:, None] % 4, best[:, :3], 1 + best[:, :3] % 7
    )
    draft = draft.astype(np.int32)
    agrees = np.cumprod((draft == best[:, :3]) & (np.arange(3) < length[:, None]), axis=1)
    for q in (greedy(draft), log_q, greedy(best[:, :3]), np.full_like(log_q, NAN)):
        for keys in (key, key + np.uint32(1)):
            found = verify_jit(rule, greedy(best), q, draft, length, keys, anchor)
            accepted = np.asarray(found.accepted)
            want = np.where(np.arange(4) <= accepted[:, None], best, -1)
            assert np.array_equal(found.token, want)
            if q is not log_q and not (rule != "exact" and np.isnan(q).all()):
                assert np.array_equal(accepted, agrees.sum(axis=1))


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_draft_of_an_unsound_distribution_is_rejected(rule, value):
    """One such value in the row is enough; the correction is drawn from p."""
    log_p, log_q, key, anchor, _ = make_rounds(seed=3)
    draft = drafts_of(rule, log_q, key, anchor)
    length = np.full(ROUNDS, SIZE, np.int32)
    log_q[:, 1, 5] = value
    found = verify_jit(rule, log_p, log_q, draft, length, key, anchor)
    accepted = np.asarray(found.accepted)
    assert set(accepted) == {0, 1}
    want = choose_token(*map(jnp.asarray, (log_p[:, 1], key, anchor + 2)), random.RESIDUAL)
    assert np.array_equal(found.token[accepted == 1, 1], want[accepted == 1])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_without_residual_mass_the_correction_is_drawn_from_p(rule):
    log_p, log_q, key, anchor, _ = make_rounds(seed=4)
    log_q[:, 0] = log_p[:, 0]
    draft = drafts_of(rule, log_q, key, anchor)
    length = np.ones(ROUNDS, np.int32)
    found = verify_jit(rule, log_p, log_q, draft, length, key, anchor)
    assert found.accepted.tolist() == [1] * ROUNDS
    draft[:, 0] = np.argmin(log_p[:, 0], axis=1)  # impossible under both
    assert np.isneginf(log_p[np.arange(ROUNDS), 0, draft[:, 0]]).all()
    found = verify_jit(rule, log_p, log_q, draft, length, key, anchor)
    want = choose_token(*map(jnp.asarray, (log_p[:, 0], key, anchor + 1)), random.RESIDUAL)
    assert found.accepted.tolist() == [0] * ROUNDS
    assert np.array_equal(found.token[:, 0], want)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_allows_no_token_ends_the_round(rule):
    """The drafts before it are judged as ever; none after it is emitted."""
    log_p, log_q, key, anchor, _ = make_rounds(seed=5)
    log_q[:, 0] = log_p[:, 0]  # its draft is accepted for sure
    draft, length = drafts_of(rule, log_q, key, anchor), np.full(ROUNDS, SIZE, np.int32)
    log_p[:, 1] = -INF
    found = verify_jit(rule, log_p, log_q, draft, length, key, anchor)
    assert found.accepted.tolist() == [1] * ROUNDS
    assert np.array_equal(found.token[:, 0], draft[:, 0])
    assert (found.token[:, 1:] == -1).all()


def test_a_missing_draft_ends_the_round():
    log_p, log_q, key, anchor, _ = make_rounds(seed=6)
    for rule in RULES:
        draft, length = drafts_of(rule, log_q, key, anchor), np.full(ROUNDS, SIZE, np.int32)
        draft[:, 1] = -1
        found = verify_jit(rule, log_p, log_q, draft, length, key, anchor)
        short = verify_jit(rule, log_p, log_q, draft, np.minimum(length, 1), key, anchor)
        assert np.array_equal(found.token, short.token)
        assert set(found.accepted.tolist()) == {0, 1}


def test_prefix_masses_and_lengths_by_hand():
    ratio = jnp.asarray([[0.5, 1.5, 4.0], [2.0, 0.25, 9.0]], jnp.float32)
    prefix = block_mass(ratio, jnp.asarray([3, 2]))
    assert prefix.tolist() == [[1, 0.5, 0.75, 1], [1, 1, 0.25, 0]]
    mass = jnp.asarray([[0.3, 0.5, 0.25, 1.0], [0.3, 0.0, 0.25, 0.0]], jnp.float32)
    # Chances 0.5, 0.5, 1 and 1 (P = 1 and no residual), 0.25, then no draft.
    for coins, want in (
        ([[0.6, 0.6, 0.9], [0.9, 0.9, 0.0]], [3, 1]),
        ([[0.6, 0.4, 0.9], [0.9, 0.2, 0.0]], [3, 2]),
    ):
        length = block_length(prefix, mass, jnp.asarray(coins, jnp.float32), jnp.asarray([3, 2]))
        assert length.tolist() == want
    cut = block_length(prefix, mass, jnp.full((2, 3), 0.45), jnp.asarray([1, 0]))
    assert cut.tolist() == [1, 0]


def test_rounds_without_drafts():
    log_p, log_q, key, anchor, _ = make_rounds(5, 2, seed=7)
    none, length = np.zeros((5, 0), np.int32), np.zeros(5, np.int32)
    for rule in RULES:
        found = verify_jit(rule, log_p[:, :1], log_q[:, :0], none, length, key, anchor)
        want = choose_token(*map(jnp.asarray, (log_p[:, 0], key, anchor + 1)))
        assert np.array_equal(found.token[:, 0], want)
        assert found.accepted.tolist() == [0] * 5


def test_arguments_that_cannot_be_honoured():
    log_p, log_q, key, anchor, length = make_rounds(2, 2)
    log_p, log_q = jnp.asarray(log_p), jnp.asarray(log_q)
    draft = np.zeros((2, 2), np.int32)
    rest = tuple(map(jnp.asarray, (draft, length, key, anchor)))
    with pytest.raises(InputError, match="rule must be one of"):
        verify("typical", log_p, log_q, *rest)
    with pytest.raises(InputError, match="needs log_q"):
        verify("block", log_p, None, *rest)
    with pytest.raises(InputError, match=r"n \+ 1 rows"):
        verify("exact", log_p[:, :2], None, *rest)


def test_synchronous_lengths_by_hand():
    survival = np.asarray([[0.9, 0.5, 0.1], [0.8, 0.7, 0.6]])
    # In order: 0.9, 0.8, 0.7, 0.6, 0.5, 0.1. The fourth admission is the first that costs.
    speed = np.asarray([0, 0, 1, 0.8, 0.7, 0.65, 0.5, 0.9, 0.9])
    for one in (speed, lambda rows: float(speed[rows])):
        assert synchronous_lengths(survival, one).tolist() == [2, 3]
    assert synchronous_lengths(survival, np.ones(9)).tolist() == [4, 4]
    assert synchronous_lengths(survival, np.r_[0, 0, 1, 0.5, np.ones(5)]).tolist() == [1, 1]


def test_synchronous_lengths_at_the_edges():
    ones = np.ones(9)
    assert synchronous_lengths(np.zeros((2, 3)), ones).tolist() == [1, 1]  # no gain
    assert synchronous_lengths(np.asarray([[0.5, NAN, NAN]]), ones).tolist() == [2]
    assert synchronous_lengths(np.zeros((0, 3)), ones).tolist() == []
    assert synchronous_lengths(np.zeros((2, 0)), ones).tolist() == [1, 1]
    tied = synchronous_lengths(np.full((2, 2), 0.5), np.asarray([0, 0, 1, 1, 0.5, 1, 1]))
    assert tied.tolist() == [2, 1]  # the lower request first


def test_a_synchronous_length_ignores_later_confidences():
    draw = np.random.default_rng(0)
    for _ in range(200):
        base = draw.random((3, 4))
        speed = 1 / (1 + draw.random(16).cumsum())
        row, draft = draw.integers(3), draw.integers(4)
        changed = base.copy()
        changed[row, draft:] = draw.random(4 - draft)
        found = [synchronous_lengths(x.cumprod(axis=1), speed)[row] for x in (base, changed)]
        # Draft `draft` itself has a new survival; those before it are admitted or not as ever.
        assert np.array_equal(*(np.minimum(length, draft + 1) for length in found))
