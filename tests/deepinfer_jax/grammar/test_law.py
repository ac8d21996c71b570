"""The law under a grammar is the law without it, renormalised over what the grammar allows (H2).

A toy of 64 tokens: letters and digits, pairs of them, and the end.
"""

import itertools

import jax.numpy as jnp
import llguidance
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.grammar.masks import fill_masks
from deepinfer_jax.grammar.template import compile_grammar, grammar_gate
from deepinfer_jax.grammar.vocabulary import Vocabulary
from deepinfer_jax.sampling.edits import Edits, unpack_bitmask
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.rows import row_params
from deepinfer_jax.sampling.sample import sample
from tests.deepinfer_jax.sampling.test_sample import chi_square

pytestmark = pytest.mark.accept(11)
END, SIZE, DRAWS, BATCH = 0, 64, 50_000, 1000
SINGLES = list("abcdefghij0123456789 .,:")
TOKENS = [
    "<end>",
    *SINGLES,
    *itertools.islice(map("".join, itertools.product(SINGLES, repeat=2)), 39),
]


class ToyTokenizer:
    """What llguidance needs of a tokenizer."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id, self.special_token_ids = END, None, [END]
        self.tokens = [text.encode() for text in TOKENS]

    def __call__(self, text):
        return [TOKENS.index(chr(byte)) for byte in bytes(text, "utf-8")]


@pytest.fixture(scope="module")
def toy() -> Vocabulary:
    """The toy as grammars see it."""
    wrapper = llguidance.TokenizerWrapper(ToyTokenizer())
    inner = llguidance.LLTokenizer(wrapper, n_vocab=SIZE)
    allowed = np.full(2, -1, np.int32)
    return Vocabulary(inner=inner, end=END, allowed=allowed, added={"<end>": END})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("begun", ["", "a", "ab1"])
def test_the_law_is_the_renormalised_one(toy, begun, temperature):
    compiled = compile_grammar(di.Grammar.regex("[a-c]*[0-9]{1,2}"), toy)
    matcher = compiled.matcher(grammar_gate(di.Grammar.json_object(), toy))
    matcher.accept([TOKENS.index(one) for one in begun])
    mask = fill_masks(llguidance.LLExecutor(1), toy.width, [(0, matcher)]).words
    allowed = unpack_bitmask(jnp.asarray(mask), SIZE)
    logits = np.random.default_rng(1).normal(size=SIZE).astype(np.float32) * 1.5
    rows = row_params([SamplingParams(temperature=temperature)] * BATCH, range(BATCH))
    counts = np.zeros(SIZE, np.int64)
    table = jnp.broadcast_to(jnp.asarray(logits), (BATCH, SIZE))
    edits = Edits(grammar=jnp.broadcast_to(allowed, (BATCH, SIZE)))
    for index in range(DRAWS // BATCH):
        found = sample(table, rows, jnp.full(BATCH, index, jnp.int32), edits)
        counts += np.bincount(np.asarray(found.token), minlength=SIZE)
    law = np.where(np.asarray(allowed)[0], np.exp(logits / temperature), 0)
    assert counts[law == 0].sum() == 0
    assert abs(chi_square(counts, law / law.sum())) < 4
    warmer = np.where(law > 0, law**0.9, 0)
    assert chi_square(counts, warmer / warmer.sum()) > 4, "it tells laws apart"
