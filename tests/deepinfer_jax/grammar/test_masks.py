"""Masks along drafts are those of a matcher that took the tokens one by one (io.md 2.6, 7)."""

import random
from functools import cache

import jax.numpy as jnp
import llguidance
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine.layout import PlanLayout
from deepinfer_jax.engine.masked import mask_sizes, mask_table, padded, table_rows
from deepinfer_jax.grammar.masks import MaskRows, fill_masks
from deepinfer_jax.grammar.template import compile_grammar, grammar_gate
from deepinfer_jax.sampling.edits import Edits, edit_logits, unpack_bitmask
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.rows import row_params

pytestmark = pytest.mark.accept(11)
END, SIZE = 1, 512
GRAMMARS = (
    di.Grammar.json_schema(
        {
            "type": "object",
            "properties": {
                "a": {"type": "string", "maxLength": 4},
                "b": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
            },
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
    di.Grammar.regex("(ab?)*c|x{2,9}"),
    di.Grammar.json_object(whitespace="compact", start_after="</think>"),
    di.Grammar(kind="regex", text="[ab]{3,}", trigger=(40, 40, 41), bound_token=42),
)
EXECUTOR = llguidance.LLExecutor(2)


def allowed(row: np.ndarray) -> set[int]:
    """Returns the ids of a mask row."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.fixture(scope="module")
def template(vocabulary):
    """Returns (template, gate) of a grammar, compiled once."""

    @cache
    def find(grammar):
        return compile_grammar(grammar, vocabulary), grammar_gate(grammar, vocabulary)

    return find


def walk(vocabulary, template, grammar, seed: int, steps: int) -> int:
    """Walks at random: drafts of which some are right, one committed token or a few, ends.

    Returns how many rows were compared with those of a fresh matcher.
    """
    rng = random.Random(seed)
    compiled, gate = template(grammar)
    matcher, taken, compared = compiled.matcher(gate), [], 0

    def row(tokens: list[int]) -> set[int] | None:
        """Returns what may follow; None where nothing can, or the text has ended."""
        if END in tokens:
            return None
        fresh = compiled.matcher(gate)
        try:
            fresh.accept(tokens)
        except di.GrammarError:
            return None
        return allowed(fill_masks(EXECUTOR, vocabulary.width, [(0, fresh)]).words[0])

    for _ in range(steps):
        drafts: list[int] = []
        for _ in range(rng.randrange(6)):
            likely = row(taken + drafts) or {5}
            drafts.append(rng.choice(sorted(likely)) if rng.random() < 0.8 else rng.randrange(SIZE))
        matcher.drafts = tuple(drafts)
        found = fill_masks(EXECUTOR, vocabulary.width, [(3, matcher)])
        assert found.place.tolist() == list(range(3, 4 + len(drafts)))
        legal = 0
        while True:
            wanted = row(taken + drafts[:legal])
            assert wanted is not None
            assert allowed(found.words[legal]) == wanted
            compared += 1
            if legal == len(drafts) or drafts[legal] not in wanted or drafts[legal] == END:
                break
            legal += 1
        if not wanted:
            assert found.dead == (() if legal else (matcher,))
        # What verification accepts is any beginning of the legal drafts, and one token more.
        kept = drafts[: rng.randint(0, legal)]
        choices = sorted((row(taken + kept) or set()) - {END})
        if not choices or len(taken) > 60:
            matcher, taken = compiled.matcher(gate), []
            continue
        kept.append(rng.choice(choices))
        matcher.accept(kept)
        taken += kept
        assert matcher.can_end == (END in (row(taken) or ()))
    return compared


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_random_walks(vocabulary, template, grammar):
    assert walk(vocabulary, template, grammar, seed=0, steps=60) > 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_long_random_walks(vocabulary, template, grammar, seed):
    assert walk(vocabulary, template, grammar, seed=seed + 1, steps=2000) > 3000


@pytest.mark.parametrize("head", ['{"a":"x","b":[1 ', '{"a":"x","b":[1 \n ', '{"a":"x","b":[1'])
def test_drafts_leave_nothing_behind(vocabulary, template, tokenizer, head):
    """llguidance 1.9.1 stays in the wrong state if it makes masks behind them and rolls back."""
    compiled, gate = template(GRAMMARS[0])
    ids = tokenizer.encode(head, add_special_tokens=False).ids
    drafts, tokens = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in ("]\n", ",\n")
    )
    matcher, fresh = compiled.matcher(gate), compiled.matcher(gate)
    matcher.accept(ids)
    matcher.drafts = tuple(drafts)
    fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)])
    matcher.accept(tokens)
    matcher.drafts = ()
    fresh.accept([*ids, *tokens])
    rows = [fill_masks(EXECUTOR, vocabulary.width, [(0, one)]).words for one in (matcher, fresh)]
    np.testing.assert_array_equal(*rows)


def test_a_draft_of_the_end_is_not_fed_and_can_be_taken_back(vocabulary, template, tokenizer):
    compiled, gate = template(di.Grammar.choice(["ab"]))
    matcher = compiled.matcher(gate)
    (first, *_) = ids = tokenizer.encode("ab", add_special_tokens=False).ids
    matcher.drafts = (*ids, END, END, first)
    rows = fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)]).words
    assert allowed(rows[len(ids)]) == {END}, "behind the whole text only the end"
    assert len(allowed(rows[-1])) > 400, "behind the end anything, since nobody gets there"
    matcher.drafts = ()
    again = fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)]).words
    np.testing.assert_array_equal(again[0], rows[0])


def test_many_matchers_are_filled_as_each_alone(vocabulary, template, tokenizer):
    matchers = []
    for place in range(24):
        matcher = template(GRAMMARS[place % 4])[0].matcher(template(GRAMMARS[place % 4])[1])
        matcher.drafts = tuple(tokenizer.encode('{"a":', add_special_tokens=False).ids[: place % 5])
        matchers.append(matcher)
    found = fill_masks(EXECUTOR, vocabulary.width, [(6 * n, one) for n, one in enumerate(matchers)])
    start = 0
    for place, matcher in enumerate(matchers):
        alone = fill_masks(EXECUTOR, vocabulary.width, [(6 * place, matcher)])
        stop = start + len(alone.words)
        np.testing.assert_array_equal(found.words[start:stop], alone.words)
        np.testing.assert_array_equal(found.place[start:stop], alone.place)
        start = stop
    assert start == len(found.words)


def test_free_text_ends_only_where_it_may(vocabulary, template):
    late, triggered = GRAMMARS[2], GRAMMARS[3]
    for grammar, may_end in ((late, False), (triggered, True)):
        compiled, gate = template(grammar)
        matcher = compiled.matcher(gate)
        row = allowed(fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)]).words[0])
        assert (END in row) == may_end == matcher.can_end
        assert len(row) == SIZE - (not may_end)
    matcher.accept([42])
    assert not matcher.can_end
    for token in triggered.trigger:
        assert allowed(fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)]).words[0]) == {token}
        matcher.accept([token])
    assert END not in allowed(fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)]).words[0])


def test_control_tokens_are_never_allowed(vocabulary, template):
    compiled, gate = template(di.Grammar.ebnf('start: "a" | <[2]> | <[502]> | <[511]> | <think>'))
    row = allowed(fill_masks(EXECUTOR, vocabulary.width, [(0, compiled.matcher(gate))]).words[0])
    assert 495 in row, "a token that the grammar names"
    assert not row & {0, 2, 502, 511}


class Failing:
    """A matcher of llguidance that breaks at some token, as if it had become too costly."""

    def __init__(self, inner, token) -> None:
        self.inner, self.token, self.is_broken = inner, token, False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def deep_copy(self):
        return Failing(self.inner.deep_copy(), self.token)

    def is_error(self):
        return self.is_broken

    def get_error(self):
        return "too costly"

    def consume_tokens(self, tokens):
        self.is_broken |= self.token in tokens
        return not self.is_broken and self.inner.consume_tokens(tokens)

    def try_consume_tokens(self, tokens):
        self.is_broken |= self.token in tokens
        return self.inner.try_consume_tokens(tokens)


def test_a_draft_that_breaks_the_matcher_does_not_end_the_completion(vocabulary, tokenizer):
    from dataclasses import replace

    grammar = di.Grammar.regex("a[bc]*")
    whole = compile_grammar(grammar, vocabulary)
    a, b, c = (tokenizer.token_to_id(text) for text in "abc")
    broken = replace(whole, _first=Failing(whole.fork(), c))
    gate = grammar_gate(grammar, vocabulary)
    matcher, sound = broken.matcher(gate), whole.matcher(gate)
    for one in (matcher, sound):
        one.accept([a])
        one.drafts = (b, c, b)
    words = np.full((4, vocabulary.width), -1, np.int32)
    rows = matcher.fill_free(words)
    assert rows is not None
    assert rows.first == 0
    matcher.refill(rows, words)
    wanted = fill_masks(EXECUTOR, vocabulary.width, [(0, sound)]).words
    np.testing.assert_array_equal(words[:2], wanted[:2])
    assert not words[2:].any(), "the rows behind it allow nothing"
    assert matcher.error == "too costly"
    matcher.accept([b, b])
    with pytest.raises(di.GrammarError, match="cannot take"):
        matcher.accept([c])


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_device_masks_are_those_of_numpy(rows):
    rng = np.random.default_rng(rows)
    size = 32 * 40 - 5  # the last word is not full
    bits = rng.random((rows, 32 * 40)) < 0.3
    bits[:, size:] = False
    bits[0], bits[-1, : size - 1] = True, False
    bits[-1, size - 1] = True  # one bit, in the last word
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    found = np.asarray(unpack_bitmask(jnp.asarray(words), size))
    np.testing.assert_array_equal(found, bits[:, :size])
    logits = rng.normal(size=(rows, size)).astype(np.float32)
    params = row_params([SamplingParams(temperature=1)] * rows, [1] * rows)
    edited, status = edit_logits(jnp.asarray(logits), params, Edits(grammar=jnp.asarray(found)))
    np.testing.assert_array_equal(edited, np.where(bits[:, :size], logits, -np.inf))
    assert not np.asarray(status).any()


def test_rows_without_a_mask_allow_everything():
    layout = PlanLayout(rows=64, slots=5, deltas=8, stop_ids=2, drafts=5)
    assert mask_sizes(layout) == [8, 32]
    words = np.arange(9 * 4, dtype=np.int32).reshape(9, 4)
    forced = np.arange(9 * 5, dtype=np.int32).reshape(9, 5)
    place = np.array([0, 1, 2, 12, 13, 24, 25, 26, 29], np.int32)
    sent = padded(layout, MaskRows(words=words, place=place, forced=forced, dead=()))
    assert [len(one) for one in sent] == [32, 32, 32]
    table = mask_table(*map(jnp.asarray, sent), rows=table_rows(layout))
    for found, values in ((table.words, words), (table.forced, forced)):
        wanted = np.full((30, values.shape[1]), -1, np.int32)
        wanted[place] = values
        np.testing.assert_array_equal(found, wanted)


def test_what_a_grammar_dictates_is_found(vocabulary, template, tokenizer):
    compiled, gate = template(di.Grammar.choice(["abc def", "abd"]))
    matcher = compiled.matcher(gate)
    ids = tokenizer.encode("abc def", add_special_tokens=False).ids
    matcher.drafts = tuple(ids[:3])
    found = fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)], 4)
    for row, ids_after in enumerate(found.forced.tolist()):
        allowed_ids = allowed(found.words[row])
        real = [token for token in ids_after if token >= 0]
        assert not real or len(allowed_ids) == 1
        if not real:
            continue
        # They are accepted one after the other, behind the only token of their row.
        other = compiled.matcher(gate)
        other.accept([*ids[:row], *allowed_ids, *real])
    assert found.forced[-1].tolist() != [-1] * 4
    matcher.drafts = ()
    assert fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)]).forced.shape == (1, 0)
