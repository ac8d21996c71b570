"""The law of the sampler under every combination of parameters, and at 129,280 ids (io.md 7.10).

The laws are NumPy's, in float64: edits, softmax at the temperature, the three tests of truncation
by a sort (`oracle.kept`), what is left divided by its sum.
"""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.edits import Edits
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.rows import bias_rows, row_params
from deepinfer_jax.sampling.sample import sample
from deepinfer_jax.sampling.truncate import truncation_mask
from tests.deepinfer_jax.sampling import oracle
from tests.deepinfer_jax.sampling.test_sample import chi_square

pytestmark = [pytest.mark.slow, pytest.mark.accept(11)]
TOY, IDS = 1_000, 129_280
CHUNK = 256
#: What edits change: ids, their bias, how often they came before, whether the prompt has them.
BIAS = {3: 2.0, 17: -100.0, 500: -1.5}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7}


def zipf(size, seed=2):
    """Log-probabilities of a long tail, in an order of their own."""
    ranks = np.random.default_rng(seed).permutation(size) + 1.0
    return -np.log(ranks).astype(np.float32)


def counts_of(size):
    """Returns (occurrences in the output, membership of the prompt), a few of each."""
    draw = np.random.default_rng(8)
    counts = np.zeros(size, np.int32)
    counts[draw.integers(0, size, 40)] = draw.integers(1, 4, 40)
    in_prompt = np.zeros(size, bool)
    in_prompt[draw.integers(0, size, 60)] = True
    return counts, in_prompt


def law(logits, fields, is_edited):
    """Returns the float64 probabilities of the tokens."""
    scores = logits.astype(np.float64)
    if is_edited:
        counts, in_prompt = counts_of(len(scores))
        for token, value in BIAS.items():
            scores[token] = -np.inf if value <= -100 else scores[token] + value
        repeated = np.where(scores > 0, scores / 1.3, scores * 1.3)
        scores = np.where((counts > 0) | in_prompt, repeated, scores)
        scores = scores - 0.4 * counts - 0.7 * (counts > 0)
    scaled = scores / fields["temperature"]
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    limits = (fields.get("top_p", 1.0), fields.get("top_k", -1), fields.get("min_p", 0.0))
    p = np.where(oracle.kept(scaled, p, *limits), p, 0)
    return p / p.sum()


def drawn(logits, fields, is_edited, draws):
    """Returns the tokens of so many rows, of several seeds and consecutive indices."""
    size, tokens = len(logits), []
    penalties = PENALTIES if is_edited else {}
    edits = None
    if is_edited:
        counts, in_prompt = (jnp.tile(one, (CHUNK, 1)) for one in counts_of(size))
        ids, values = bias_rows([BIAS] * CHUNK, len(BIAS))
        edits = Edits(bias_ids=ids, bias_values=values, output_counts=counts, in_prompt=in_prompt)
    wide = jnp.tile(jnp.asarray(logits), (CHUNK, 1))
    for first in range(0, draws, CHUNK):
        place = np.arange(first, first + CHUNK)
        params = [SamplingParams(**fields, **penalties)] * CHUNK
        rows = row_params(params, (1000 + place // 2048).tolist())
        out = sample(wide, rows, jnp.asarray(place % 2048, jnp.int32), edits)
        assert not np.asarray(out.status).any()
        tokens.append(np.asarray(out.token))
    return np.concatenate(tokens)


def check(tokens, p):
    """Asserts the law within 4 standard deviations, and that a warmer one would be noticed."""
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    assert abs(chi_square(counts, p)) < 4
    warmer = np.where(p > 0, p**0.8, 0)
    assert chi_square(counts, warmer / warmer.sum()) > 4


@pytest.mark.parametrize("is_edited", [False, True], ids=["plain", "edited"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_every_combination_has_the_law_of_numpy(temperature, is_edited):
    logits = zipf(TOY) * np.float32(1.2)
    for top_p, top_k, min_p in product((1.0, 0.8), (-1, 60), (0.0, 0.01)):
        fields = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        check(drawn(logits, fields, is_edited, 8_192), law(logits, fields, is_edited))


@pytest.mark.parametrize("is_edited", [False, True], ids=["plain", "edited"])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20_000, "min_p": 1e-4},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_the_law_at_the_published_size(fields, is_edited):
    logits = zipf(IDS)
    tokens, p = drawn(logits, fields, is_edited, 4_096), law(logits, fields, is_edited)
    check(tokens, p)
    # Most ids are too rare for a count of their own: blocks of 505 neighbours, to the last id.
    blocks = p.reshape(256, -1).sum(axis=1)
    counts = np.bincount(tokens // 505, minlength=256)
    assert abs(chi_square(counts, blocks)) < 4
    if p[-1]:
        assert tokens.max() > 0.95 * IDS


def test_tokens_do_not_depend_on_the_batch_at_the_published_size():
    logits = jnp.asarray(np.stack([zipf(IDS, seed) for seed in range(33)]))
    rows, at = oracle.mixed_rows(33), jnp.arange(33, dtype=jnp.int32) + 90
    want = sample(logits, rows, at, logprobs=3, mode="processed")
    for chosen in ([5], [32, 0], list(range(7)), list(range(8, 24))):
        place = jnp.asarray(chosen)
        got = sample(logits[place], rows.take(place), at[place], logprobs=3, mode="processed")
        assert got.token.tolist() == np.asarray(want.token)[chosen].tolist()
        found, expected = got.logprobs.logprob, np.asarray(want.logprobs.logprob)[chosen]
        np.testing.assert_array_equal(oracle.bits(found), oracle.bits(expected))


def test_equal_mass_stays_at_the_published_size():
    """65,536 equal tokens: those with half of the mass before them or less, lowest ids first."""
    scores = np.full((1, IDS), -np.inf, np.float32)
    places = np.sort(np.random.default_rng(1).permutation(IDS)[: 2**16])
    scores[0, places] = 0
    for top_p, count in ((0.5, 2**15 + 1), (np.nextafter(np.float32(0.5), 0), 2**15), (1e-6, 1)):
        columns = (jnp.ones(1), jnp.full(1, top_p), jnp.full(1, -1, jnp.int32), jnp.zeros(1))
        found = np.flatnonzero(np.asarray(truncation_mask(jnp.asarray(scores), *columns))[0])
        np.testing.assert_array_equal(found, places[:count])
