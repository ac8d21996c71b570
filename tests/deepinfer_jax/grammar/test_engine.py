"""Completions under grammars in the engine: valid, and the same at any depth and with any drafts.

The oracle is the same request alone, without drafts, cache and depth (io.md 7.6, engine.md 5.7).
"""

import json
import re
import threading
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.sequence import Phase
from deepinfer_jax.grammar import compiler as compiler_module
from deepinfer_jax.jobs.lines import params_from_json
from tests.deepinfer_jax.engine.test_static_branches import loaded
from tests.deepinfer_jax.grammar.test_template import HOSTILE, REFUSED
from tests.e2e.forced import accepted_per_round, drafting, force_drafts, mostly_right
from tests.e2e.lab import (
    BASE,
    alone,
    assert_same,
    finish,
    lone_children,
    make_engine,
    model,
    run,
)
from tests.e2e.test_engine_async import CompileCounter

pytestmark = pytest.mark.accept(11)
DRAW = np.random.default_rng(5)
PROMPTS = [DRAW.integers(3, 490, size).tolist() for size in (45, 30, 62, 50, 17, 33)]
PERSON = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 6},
        "b": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "c": {"enum": ["red", "green"]},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
NUMBER = re.compile(r"[1-9][0-9]{2,5}(\.[0-9]{1,3})?")
JSON = di.Grammar.json_schema(PERSON, whitespace="compact")
GREEDY = di.SamplingParams(temperature=0, max_tokens=60, logprobs=1, seed=0)
SAMPLED = replace(GREEDY, temperature=1.2, seed=9)
#: Every text of it can be read in more ways than there are limits for.
AMBIGUOUS = di.Grammar.ebnf("start: s\ns: s s s | s s | /[ -~]/ | /[ -~][ -~]/")
KINDS = (
    replace(SAMPLED, grammar=JSON),
    replace(GREEDY, grammar=JSON),
    replace(SAMPLED, grammar=di.Grammar.regex(NUMBER.pattern), logprobs_mode="processed"),
    replace(SAMPLED, grammar=di.Grammar.choice(["yes", "no", "perhaps"]), n=2, top_k=5),
    replace(SAMPLED, ignore_eos=True, max_tokens=30),
    replace(SAMPLED, grammar=JSON, logit_bias={5: 3.0}, presence_penalty=0.5, temperature=0.7),
)


def truth(sequence) -> list[int]:
    """Returns drafts of a sequence of `KINDS`: most are right, some of the others not allowed."""
    prompt = sequence.ids[: sequence.prompt_len].tolist()
    lone = lone_children(prompt, sequence.params)[sequence.child]
    ended = (*lone.token_ids, 1)
    return mostly_right(ended, model().config.vocab_size, sequence.seed % 1000)


def check_all(engine) -> None:
    """Runs all kinds together; each must be what it is alone."""
    requests = [engine.submit(ids, kind) for ids, kind in zip(PROMPTS, KINDS, strict=True)]
    engine.drain()
    for request, ids, kind in zip(requests, PROMPTS, KINDS, strict=True):
        for found, wanted in zip(request.output().outputs, lone_children(ids, kind), strict=True):
            assert_same(found, wanted)


def test_what_is_emitted_alone_is_valid():
    for ids, kind in zip(PROMPTS, KINDS, strict=True):
        for output in lone_children(ids, kind):
            if kind.grammar is None:
                continue
            assert (output.finish_reason, output.stop_reason) == ("stop", 1)
            assert len(output.logprobs) == len(output.token_ids)
            if kind.grammar.kind == "json_schema":
                found = json.loads(output.text)
                assert list(found) == ["a", "b", "c"]
                assert found["c"] in ("red", "green")
                assert 1 <= len(found["b"]) <= 3
                assert len(found["a"]) <= 6
            elif kind.grammar.kind == "regex":
                assert NUMBER.fullmatch(output.text)
            else:
                assert output.text in ("yes", "no", "perhaps")


@pytest.mark.parametrize("depth", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafts", ["none", "own", "forced"])
def test_depth_and_drafts_change_nothing(depth, drafts):
    # Without drafts the cache is the oracle's, and so are the programs.
    runtime = replace(BASE, async_depth=depth) if drafts == "none" else drafting(async_depth=depth)
    engine = make_engine(runtime)
    if drafts == "forced":
        force_drafts(engine, truth)
    check_all(engine)
    if drafts == "forced":
        assert accepted_per_round(engine) > 0.5
    assert engine.stats().grammar.mask_rows > 0
    assert engine.stats().in_flight == 0


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_any_number_of_drafts_changes_nothing(length):
    engine = make_engine(drafting(draft_length=length))
    force_drafts(engine, truth)
    check_all(engine)


def test_prefix_hits_change_nothing():
    engine = make_engine(drafting())
    force_drafts(engine, truth)
    check_all(engine)
    first = engine.stats()
    check_all(engine)
    stats = engine.stats()
    assert stats.cache.hits > first.cache.hits
    assert stats.grammar.compiled == 3, "each grammar once"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preemption_changes_nothing(depth):
    engine = make_engine(drafting(async_depth=depth))
    force_drafts(engine, truth)
    grammar = di.Grammar.regex("([a-z]{3} ){25,}")
    kinds = [replace(SAMPLED, grammar=grammar, max_tokens=90, seed=seed) for seed in range(4)]
    requests = [engine.submit(ids, kind) for ids, kind in zip(PROMPTS, kinds, strict=False)]
    engine.drain()
    assert engine.stats().counters["preemptions"] > 0
    for request, ids, kind in zip(requests, PROMPTS, kinds, strict=False):
        assert_same(request.output().outputs[0], alone(ids, kind))


def test_one_row_is_sampled_for_each_token_that_is_emitted():
    engine = make_engine(replace(BASE, async_depth=2))
    params = replace(SAMPLED, grammar=JSON)
    output = run(engine, PROMPTS[0], params)
    emitted = len(output.token_ids) + 1  # and the end
    stats = engine.stats()
    assert stats.grammar.mask_rows == emitted
    assert stats.rounds == emitted - 1  # the first token comes with the prompt


def test_what_a_grammar_dictates_is_not_decoded_token_by_token():
    grammar = di.Grammar.choice(["a rather long text that nobody would guess", "no"])
    params = replace(GREEDY, grammar=grammar, logit_bias={80: -50})
    wanted = alone(PROMPTS[0], params)
    assert wanted.text.startswith("a rather")
    engine = make_engine(drafting())
    assert_same(run(engine, PROMPTS[0], params), wanted)
    assert len(wanted.token_ids) > 18
    assert engine.stats().rounds <= 2 + len(wanted.token_ids) // 5
    assert accepted_per_round(engine) > 3


# -- the place where a grammar begins to bind -----------------------------------------------------

FREE = di.SamplingParams(
    temperature=1,
    seed=17,
    max_tokens=40,
    logprobs=1,
    allowed_token_ids=(1, *range(260, 480), 496, *range(3, 110)),
)


@pytest.fixture(scope="module")
def free_ids():
    """The first tokens of a completion without a grammar, no one of them twice."""
    tokens = alone(PROMPTS[0], replace(FREE, ignore_eos=True)).token_ids[:13]
    assert len(set(tokens)) == 13
    return tokens


@pytest.mark.parametrize(
    ("place", "width"), [(place, width) for width in (1, 2) for place in range(width - 1, 12)]
)
def test_a_trigger_that_ends_at_any_place_of_a_block(free_ids, place, width):
    trigger = free_ids[place + 1 - width : place + 1]
    grammar = replace(di.Grammar.regex("[0-9]{4,8}"), trigger=trigger)
    params = replace(FREE, grammar=grammar)
    wanted = alone(PROMPTS[0], params)
    assert wanted.token_ids[: place + 1] == free_ids[: place + 1]
    rest = model().tokenizer.decode(wanted.token_ids[place + 1 :])
    assert re.fullmatch("[0-9]{4,8}", rest)
    for right in (1.0, 0.8):
        engine = make_engine(drafting())
        guess = mostly_right((*wanted.token_ids, 1), 512, place, right)
        force_drafts(engine, lambda sequence, guess=guess: guess)
        assert_same(run(engine, PROMPTS[0], params), wanted)
        assert accepted_per_round(engine) > (2 if right == 1 else 0.3)


def test_a_bound_token_forces_the_trigger(free_ids):
    grammar = replace(di.Grammar.regex("[0-9]{4}"), trigger=(60, 61, 60), bound_token=free_ids[3])
    params = replace(FREE, grammar=grammar)
    wanted = alone(PROMPTS[0], params)
    assert wanted.token_ids[:7] == (*free_ids[:4], 60, 61, 60)
    assert re.fullmatch("[0-9]{4}", model().tokenizer.decode(wanted.token_ids[7:]))
    engine = make_engine(drafting(async_depth=2))
    force_drafts(engine, lambda sequence: [*wanted.token_ids, 1])
    assert_same(run(engine, PROMPTS[0], params), wanted)


def test_thinking_is_free_and_the_answer_is_not():
    think = {496: 3.5, 1: 50.0}  # the end of the text would come first, if it might
    late = di.Grammar.json_schema({"enum": [12, 345]}, start_after="</think>")
    params = replace(FREE, seed=8, grammar=late, logit_bias=think, temperature=0.8)
    output = alone(PROMPTS[0], params)
    assert output.finish_reason == "stop"
    where = output.token_ids.index(496)
    assert where > 0
    assert json.loads(model().tokenizer.decode(output.token_ids[where + 1 :])) in (12, 345)
    engine = make_engine(drafting())
    force_drafts(engine, lambda sequence: [*output.token_ids, 1])
    assert_same(run(engine, PROMPTS[0], params), output)


def test_a_text_that_is_cut_is_a_beginning(vocabulary):
    from deepinfer_jax.grammar.template import compile_grammar, grammar_gate

    output = alone(PROMPTS[0], replace(SAMPLED, grammar=JSON, max_tokens=7))
    assert output.finish_reason == "length"
    matcher = compile_grammar(JSON, vocabulary).matcher(grammar_gate(JSON, vocabulary))
    matcher.accept(output.token_ids)
    assert not matcher.can_end


# -- what ends a request --------------------------------------------------------------------------


def test_a_grammar_that_cannot_be_used_ends_its_request_alone():
    engine = make_engine()
    bad = replace(GREEDY, grammar=di.Grammar.json_schema({"properties": {"a": {"not": {}}}}))
    with pytest.raises(di.GrammarError, match="/properties/a/not"):
        engine.check(PROMPTS[0], bad)
    heard = []
    request = engine.submit(PROMPTS[0], bad, sink=heard.append)
    other = engine.submit(PROMPTS[0], KINDS[0])
    engine.drain()
    output = request.output()
    assert (output.finish_reason, output.token_ids, output.text) == ("grammar", (), "")
    assert "/properties/a/not" in output.stop_reason
    assert isinstance(request.error, di.GrammarError)
    assert [delta.finish_reason for delta in heard] == ["grammar"]
    assert_same(other.output(), alone(PROMPTS[0], KINDS[0]))
    assert engine.stats().grammar.failed == 1
    assert "deepinfer_grammar_failed_total 1" in engine.stats().prometheus()


def test_a_text_that_can_neither_go_on_nor_end():
    engine = make_engine()
    digits = replace(SAMPLED, grammar=di.Grammar.regex("[0-9]{3}x"), min_tokens=50)
    output = run(engine, PROMPTS[0], digits)
    assert (output.finish_reason, output.stop_reason) == ("grammar", None)
    assert re.fullmatch("[0-9]{3}x", output.text)
    letters = {token: -100 for token in range(3, 260) if token != 67}
    nothing = replace(SAMPLED, grammar=di.Grammar.ebnf("start: /[0-9]/ <[2]>"), logit_bias=letters)
    output = run(engine, PROMPTS[0], replace(nothing, logit_bias=None))
    assert (output.finish_reason, len(output.token_ids)) == ("grammar", 1)
    assert output.stop_reason == "the grammar allows no token here"
    assert_same(output, alone(PROMPTS[0], replace(nothing, logit_bias=None)))


def test_hostile_grammars_beside_others():
    engine = make_engine(drafting(async_depth=2))
    hot = replace(SAMPLED, max_tokens=40)
    hostile = [engine.submit([5, 6, 7], replace(hot, grammar=one)) for one in HOSTILE.values()]
    costly = replace(hot, grammar=AMBIGUOUS, max_tokens=200)
    hostile.append(engine.submit([5, 6, 7], costly))
    normal = [engine.submit(ids, kind) for ids, kind in zip(PROMPTS, KINDS, strict=True)]
    engine.drain()
    for request, ids, kind in zip(normal, PROMPTS, KINDS, strict=True):
        for found, wanted in zip(request.output().outputs, lone_children(ids, kind), strict=True):
            assert_same(found, wanted)
    for name, request in zip((*HOSTILE, "costly"), hostile, strict=True):
        output = request.output()
        refused = name in REFUSED or name == "costly"
        assert (output.finish_reason == "grammar") == refused or name == "nested counts"
        assert not refused or output.stop_reason
        assert (name == "costly") == ("Too many items" in str(output.stop_reason))


def test_what_happens_while_a_grammar_is_compiled(monkeypatch):
    release, real = threading.Event(), compiler_module.compile_grammar

    def slow(grammar, vocabulary):
        release.wait()
        return real(grammar, vocabulary)

    monkeypatch.setattr(compiler_module, "compile_grammar", slow)
    now = [0.0]
    engine = make_engine(clock=lambda: now[0])
    constrained = replace(GREEDY, grammar=JSON)
    kept, aborted, late = (
        engine.submit(PROMPTS[0], replace(constrained, deadline_s=limit))
        for limit in (None, None, 5)
    )
    free = engine.submit(PROMPTS[1], replace(GREEDY, max_tokens=4))
    finish(engine, free)
    assert {one.phase for one in kept.sequences} == {Phase.COMPILING}
    assert engine.stats().grammar.waiting == 3
    assert engine.abort(aborted.request_id)
    now[0] = 6.0
    done = engine.step()
    assert set(done) == {aborted, late}
    assert (aborted.output().finish_reason, late.output().finish_reason) == ("abort", "deadline")
    release.set()
    assert_same(finish(engine, kept), alone(PROMPTS[0], constrained))
    assert engine.stats().grammar.waiting == 0


def test_a_compilation_without_end_ends_its_request(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(compiler_module, "compile_grammar", lambda *_: release.wait())
    engine = make_engine(replace(BASE, grammar_seconds=0.2))
    request = engine.submit(PROMPTS[0], replace(GREEDY, grammar=JSON))
    output = finish(engine, request)
    assert output.finish_reason == "grammar"
    assert "longer than 0.2 s" in output.stop_reason
    assert engine.stats().grammar.stuck == 1
    release.set()


def test_a_snapshot_continues_with_its_grammar():
    params = replace(SAMPLED, grammar=JSON, logprobs=None)
    engine = make_engine()
    engine.submit(PROMPTS[0], params)
    while engine.counters["tokens"] < 9:
        engine.step()
    saved = json.loads(json.dumps(engine.snapshot()))
    other = make_engine(drafting())
    (request,) = other.restore(saved)
    assert_same(finish(other, request), alone(PROMPTS[0], params))


def test_programs_are_compiled_beforehand_if_asked():
    engine, counter = make_engine(replace(drafting(), warm_grammars=True)), CompileCounter()
    assert "compiling steps with grammars" in engine.warm_up()
    assert "compiling steps with grammars" not in make_engine(drafting()).warm_up()
    for ids, kind in zip(PROMPTS, KINDS, strict=True):
        lone_children(ids, kind)  # the oracle compiles programs of its own
    counter.is_on = True
    check_all(engine)
    counter.is_on = False
    assert counter.found == []


def test_a_record_holds_the_grammar():
    output = run(make_engine(), PROMPTS[0], KINDS[0])
    record = json.loads(output.record.to_json())
    found = params_from_json(record["request"]["params"], di.SamplingParams())
    assert found == KINDS[0]


def test_a_lenient_schema_warns_in_the_output():
    schema = {"type": "integer", "not": {"const": 3}}
    params = replace(GREEDY, grammar=di.Grammar.json_schema(schema, strict=False), max_tokens=5)
    output = run(make_engine(), PROMPTS[0], params)
    assert "not" in output.warnings[0]
    assert not alone(PROMPTS[0], KINDS[0]).warnings


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "rejection", "block"])
def test_the_form_for_a_gpu_and_all_rules(rule):
    engine = Engine(loaded("static", "float32"), replace(BASE, max_seqs=3, drafting=True))
    params = [
        replace(kind, verify=rule, logprobs=None, max_draft=most)
        for kind in KINDS[:3]
        for most in (None, 2)
    ]
    requests = [engine.submit(PROMPTS[n % 3], one) for n, one in enumerate(params)]
    engine.drain()
    for number, request in enumerate(requests):
        output = request.output()
        assert output.finish_reason == "stop"
        if request.params.grammar == JSON:
            assert list(json.loads(output.text)) == ["a", "b", "c"]
        else:
            assert NUMBER.fullmatch(output.text)
        if rule == "exact":
            wanted = alone(PROMPTS[number % 3], replace(params[number], max_draft=None))
            assert output.token_ids == wanted.token_ids
    assert sum(engine.stats().verified) > 0
