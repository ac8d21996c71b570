"""Grammars at the 129,280 ids of the published tokenizer (io.md 7, gates 3, 6, 7, 8 and 9)."""

import json
import random
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.chat.session import prepare_answer
from deepinfer_jax.grammar.masks import fill_masks
from deepinfer_jax.grammar.template import compile_grammar, grammar_gate
from deepinfer_jax.sampling.edits import unpack_bitmask
from tests.e2e import published

from .test_masks import END, EXECUTOR, GRAMMARS
from .test_schemas import judge
from .test_tools import END as CALLS_END
from .test_tools import OPEN, TOOLS, WEATHER, WHOLE, call

pytestmark = pytest.mark.accept(11)
WIDTH = 4040
THINK_END, DSML = 128_822, 128_825


@pytest.fixture(scope="module")
def vocabulary():
    return published.vocabulary()


@pytest.fixture(scope="module")
def template(vocabulary):
    return cache(lambda one: (compile_grammar(one, vocabulary), grammar_gate(one, vocabulary)))


def ids_of(text):
    return published.tokenizer().encode(text, add_special_tokens=False).ids


def allowed(row):
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def test_a_row_has_as_many_words_as_ids_need(vocabulary, template):
    assert vocabulary.width == WIDTH
    compiled, gate = template(di.Grammar.json_object())
    found = fill_masks(EXECUTOR, WIDTH, [(0, compiled.matcher(gate))])
    assert found.words.shape == (1, WIDTH)
    assert not (allowed(found.words[0]) >= 128_000).any()


def walk(vocabulary, template, grammar, seed, steps):
    """As `test_masks.walk`, in arrays: rows along drafts are those of a fresh matcher."""
    rng = random.Random(seed)
    compiled, gate = template(grammar)
    matcher, taken, compared = compiled.matcher(gate), [], 0

    def fresh(tokens):
        one = compiled.matcher(gate)
        try:
            one.accept(tokens)
        except di.GrammarError:
            return None
        return fill_masks(EXECUTOR, vocabulary.width, [(0, one)]).words[0]

    for _ in range(steps):
        rows, drafts = [fresh(taken)], []
        for _ in range(rng.randrange(6)):
            choices = [] if rows[-1] is None else allowed(rows[-1])
            likely = len(choices) and rng.random() < 0.8
            drafts.append(int(rng.choice(choices)) if likely else rng.randrange(published.IDS))
            # Behind the end, and behind what is no part of the text, nothing is looked at.
            is_legal = rows[-1] is not None and drafts[-1] in choices and drafts[-1] != END
            rows.append(fresh([*taken, *drafts]) if is_legal else None)
        matcher.drafts = tuple(drafts)
        found = fill_masks(EXECUTOR, vocabulary.width, [(0, matcher)]).words
        legal = next((n for n, row in enumerate(rows) if row is None), len(rows))
        for one, other in zip(found, rows[:legal], strict=False):
            np.testing.assert_array_equal(one, other)
            compared += 1
        kept = rng.randrange(legal)
        choices = allowed(rows[kept])
        choices = choices[choices != END]
        if not len(choices) or len(taken) > 40:
            matcher, taken = compiled.matcher(gate), []
            continue
        new = [*drafts[:kept], int(rng.choice(choices))]
        matcher.accept(new)
        taken += new
    return compared


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_random_walks(vocabulary, template, grammar):
    assert walk(vocabulary, template, grammar, seed=0, steps=60) > 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_a_hundred_thousand_steps_at_random(vocabulary, template, grammar, seed):
    assert walk(vocabulary, template, grammar, seed=seed + 1, steps=6_250) > 6_250


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_device_masks_are_those_of_numpy(rows):
    rng = np.random.default_rng(rows)
    bits = rng.random((rows, published.IDS)) < 0.3
    bits[0], bits[-1] = True, False
    bits[-1, -1] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    assert words.shape == (rows, WIDTH)
    found = np.asarray(unpack_bitmask(jnp.asarray(words), published.IDS))
    np.testing.assert_array_equal(found, bits)
    for shards in (2, 4, 8):
        parts = np.split(words, shards, axis=1)
        each = [unpack_bitmask(jnp.asarray(one), published.IDS // shards) for one in parts]
        np.testing.assert_array_equal(np.concatenate(each, axis=1), bits)


@pytest.mark.parametrize(
    ("options", "prefix", "thinks"),
    [
        ({}, None, True),
        ({"reasoning_effort": "max"}, None, True),
        ({"thinking": False}, None, False),
        ({"thinking": False}, {"content": "It is "}, False),
        ({}, {"content": "It is "}, False),
        ({}, {"content": "", "reasoning_content": "hm"}, True),
    ],
)
def test_reasoning_is_free_and_the_answer_is_not(vocabulary, options, prefix, thinks):
    messages = [{"role": "user", "content": "hi"}]
    if prefix is not None:
        messages.append({"role": "assistant", "prefix": True} | prefix)
    params = di.SamplingParams(grammar=di.Grammar.json_object())
    _, asked = prepare_answer(published.encoder(), messages, params, options)
    assert asked.grammar is not None
    gate = grammar_gate(asked.grammar, vocabulary)
    matcher = compile_grammar(asked.grammar, vocabulary).matcher(gate)

    def row():
        return allowed(fill_masks(EXECUTOR, WIDTH, [(0, matcher)]).words[0])

    if thinks:
        assert len(row()) == published.IDS - 1, "all but the end"
        matcher.accept(ids_of('why { "a" ]</think>')[:-1])
        assert len(row()) == published.IDS - 1
        matcher.accept([THINK_END])
    assert len(row()) < 1000
    assert THINK_END not in row()
    matcher.accept(ids_of('{"a": [1, "北京 🎉"]}'))
    assert matcher.can_end


@pytest.mark.parametrize("begin", ["opened", "required", "auto"])
def test_calls_of_tools(vocabulary, begin):
    grammar = di.Grammar.tool_calls(TOOLS, begin=begin)
    compiled = compile_grammar(grammar, vocabulary)
    lead = {"opened": "", "required": "\n\n" + OPEN, "auto": "Let me look 北京 🎉.\n\n" + OPEN}
    for text in (WEATHER, WHOLE + call("ping")):
        matcher = compiled.matcher(grammar_gate(grammar, vocabulary))
        tokens = ids_of(lead[begin] + text + CALLS_END)
        assert tokens.count(DSML) == (lead[begin] + text + CALLS_END).count("\uff5cDSML\uff5c")
        for token in tokens:
            words = fill_masks(EXECUTOR, WIDTH, [(0, matcher)]).words[0]
            assert words[token // 32] >> (token % 32) & 1
            matcher.accept([token])
        assert matcher.can_end
    matcher = compiled.matcher(grammar_gate(grammar, vocabulary))
    with pytest.raises(di.GrammarError):
        matcher.accept(ids_of(lead[begin] + call("pong") + CALLS_END))


@pytest.mark.slow
def test_schemas_at_random_weights():
    runtime = di.RuntimeConfig(
        max_seqs=16, max_len=640, max_tokens_per_step=128, block_tokens=32, drafting=True
    )
    engine = di.Engine(published.model(), runtime)
    ended = judge(engine, [1], range(300, 348), temperature=1.5, max_tokens=500)
    assert ended.total() == 48
    assert ended["stop"] >= 40


@pytest.mark.slow
def test_drafts_change_nothing():
    params = di.SamplingParams(
        temperature=1.0, seed=3, max_tokens=60, logprobs=0,
        grammar=di.Grammar.json_schema(json.dumps({
            "type": "object", "required": ["name", "n"], "additionalProperties": False,
            "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 22]}},
        }), whitespace="compact"),
    )  # fmt: skip
    found = []
    for drafting in (False, True):
        runtime = di.RuntimeConfig(
            max_seqs=4, max_len=256, max_tokens_per_step=64, block_tokens=32, drafting=drafting
        )
        engine = di.Engine(published.model(), runtime)
        requests = [engine.submit([0, 9 + n, 100_000], params) for n in range(4)]
        engine.drain()
        found.append([request.output() for request in requests])
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.finish_reason == "stop"
        assert json.loads(one.text)["n"] in (1, 22)
