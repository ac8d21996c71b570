"""What each kind of grammar accepts, and how what cannot be enforced is refused (io.md 2)."""

import time

import pytest

import deepinfer_jax as di
from deepinfer_jax.grammar.compiler import GrammarCompiler
from deepinfer_jax.grammar.template import compile_grammar, grammar_gate
from tests.e2e.lab import model

pytestmark = pytest.mark.accept(11)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def verdict(tokenizer, vocabulary):
    """Returns True for a whole text of a grammar, None for a beginning, False for neither."""

    def find(grammar: di.Grammar, text: str) -> bool | None:
        matcher = compile_grammar(grammar, vocabulary).matcher(grammar_gate(grammar, vocabulary))
        try:
            matcher.accept(tokenizer.encode(text, add_special_tokens=False).ids)
        except di.GrammarError:
            return False
        return matcher.can_end or None

    return find


@pytest.mark.parametrize(
    ("grammar", "whole", "begun", "wrong"),
    [
        (
            di.Grammar.json_schema(PERSON),
            ['{"name":"a"}', '{ "name": "é",\n "age": 12}'],
            ['{"name', '{"name":"a"'],
            ['{"age":1', "[", '{"name":"a"}x', '{"name":1'],
        ),
        (di.Grammar.json_schema(PERSON, whitespace="compact"), ['{"name":"a"}'], [], ['{ "name"']),
        (di.Grammar.json_object(), ['{"a": [1, null]}', "{}"], ["{"], ["[1]", "1"]),
        (di.Grammar.regex(r"^\d{2}(a|b)?$"), ["12", "12a"], ["1"], ["1a", "123", "٣٤"]),
        (di.Grammar.regex(r"^^a\$"), ["a$"], ["a"], ["a\\"]),
        (di.Grammar.regex(r"\d", regex_unicode=True), ["٣"], [], ["a"]),
        (di.Grammar.regex("a/b"), ["a/b"], ["a/"], ["ab"]),
        (di.Grammar.choice(["yes", 'no "x"\n']), ["yes", 'no "x"\n'], ["ye", "no"], ["maybe"]),
        (di.Grammar.choice(["</think>"]), [], [], ["x"]),
        (di.Grammar.ebnf('root ::= "a" [0-9]+ b?\nb ::= "x"'), ["a12", "a1x"], ["a"], ["b", "ax"]),
        (di.Grammar.ebnf('start: "x" (y)*\ny: /[0-9]/'), ["x", "x12"], [""], ["y"]),
        (di.Grammar.ebnf('start: "x" <think>'), ["x<think>"], ["x"], ["x<think>x"]),
    ],
    ids=lambda value: value.kind if isinstance(value, di.Grammar) else "",
)
def test_texts_of_a_grammar(verdict, grammar, whole, begun, wrong):
    assert [verdict(grammar, text) for text in whole] == [True] * len(whole)
    assert [verdict(grammar, text) for text in begun] == [None] * len(begun)
    assert [verdict(grammar, text) for text in wrong] == [False] * len(wrong)


def test_after_the_end_of_thinking_json_may_begin_with_line_ends(verdict):
    late = di.Grammar.json_schema({"type": "integer"}, start_after="</think>")
    assert verdict(late, "any [text</think>12") is True
    assert verdict(late, "</think>\n\n12") is True
    assert verdict(late, "12") is None, "thinking may not be the end"
    assert verdict(late, "</think>a") is False
    assert verdict(late.after(None), "\n12") is False


@pytest.mark.parametrize(
    ("schema", "messages"),
    [
        ({"properties": {"a": {"not": {}}}}, ("not", "/properties/a/not", "strict=False")),
        ({"type": "array", "uniqueItems": True}, ("uniqueItems", "at /uniqueItems")),
        ({"if": {}, "then": {}}, ("if", "/then")),
        ({"items": [{"type": "string", "format": "x1"}]}, ("x1",)),
        ({"properties": {"a": {"type": "string", "format": "x1"}}}, ("/properties/a/format",)),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf", "at /oneOf")),
        ({"$ref": "http://x.y/z"}, ("http://x.y/z", "at /$ref")),
        ({"type": "string", "pattern": "(?=a)b"}, ("look-ahead",)),
        ({"type": "wrong"}, ("Invalid type", "at /type")),
        ({"type": "integer", "minimum": 5, "maximum": 3}, ("Unsatisfiable",)),
        ({"$ref": "#"}, ("no text at all",)),
    ],
)
def test_schemas_that_cannot_be_enforced_name_keyword_and_place(vocabulary, schema, messages):
    with pytest.raises(di.GrammarError) as error:
        compile_grammar(di.Grammar.json_schema(schema), vocabulary)
    for message in messages:
        assert message in str(error.value)


def test_a_lenient_schema_says_what_it_dropped(vocabulary):
    schema = {"type": "integer", "not": {"const": 3}}
    template = compile_grammar(di.Grammar.json_schema(schema, strict=False), vocabulary)
    assert "not" in template.warnings[0]
    for own in ({"x-guidance": {"lenient": True}}, {"x-guidance": 5}):
        with pytest.raises((di.GrammarError, ValueError)):
            compile_grammar(di.Grammar.json_schema(schema | own), vocabulary)


HOSTILE = {
    "nested counts": di.Grammar.regex("(a{0,1000}){0,1000}"),
    "exponential automaton": di.Grammar.regex("[ab]*a[ab]{30}"),
    "long count": di.Grammar.regex("a{1,100000}"),
    "long tail": di.Grammar.regex(".*x.{500}"),
    "unclosed": di.Grammar.regex("a("),
    "look-ahead": di.Grammar.regex("(?=a)b"),
    "long string": di.Grammar.json_schema({"type": "string", "maxLength": 10**6}),
    "pattern": di.Grammar.json_schema({"type": "string", "pattern": "^(ab?){1,5000}$"}),
    "many items": di.Grammar.json_schema({"type": "array", "minItems": 5000, "maxItems": 10**6}),
    "large enum": di.Grammar.json_schema({"enum": [f"v{n}" for n in range(4096)]}),
    "endless": di.Grammar.ebnf("start: start"),
    "ambiguous": di.Grammar.ebnf('start: s\ns: s s | "a"'),
    "undefined": di.Grammar.ebnf("start: x"),
    "no start": di.Grammar.ebnf('x: "a"'),
    "no rule": di.Grammar.ebnf("root = 1"),
    "control": di.Grammar.ebnf("start: <[0]>"),
}
REFUSED = ("unclosed", "look-ahead", "endless", "undefined", "no start", "no rule", "control")


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_grammars_are_refused(vocabulary, name):
    grammar = HOSTILE[name]
    with pytest.raises(di.GrammarError, match=grammar.kind):
        compile_grammar(grammar, vocabulary)


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in REFUSED])
def test_large_grammars_are_compiled_within_limits(vocabulary, name):
    grammar = HOSTILE[name]
    matcher = compile_grammar(grammar, vocabulary).matcher(grammar_gate(grammar, vocabulary))
    assert matcher.can_end == (name == "nested counts")  # that one has the empty text


def test_a_compiler_makes_each_grammar_once(monkeypatch):
    compiler = GrammarCompiler(model().tokenizer, model().config, seconds=60.0)
    grammar = di.Grammar.choice(["a", "b"])
    one = compiler.start(grammar)
    assert compiler.start(di.Grammar.choice(["a", "b"])) is one
    triggered = di.Grammar(kind="choice", text=grammar.text, trigger=(5,))
    assert compiler.start(triggered) is one, "where it binds is not compiled"
    assert one.result().warnings == ()
    with pytest.raises(di.GrammarError, match="unclosed group"):
        compiler.start(di.Grammar.regex("a(")).result()
    assert (compiler.compiled, compiler.failed, compiler.stuck) == (1, 1, 0)


def test_a_stuck_grammar_fails_alone(monkeypatch):
    from threading import Event

    from deepinfer_jax.grammar import compiler as module

    release, real = Event(), module.compile_grammar

    def slow(grammar, vocabulary):
        if grammar.text == "stuck":
            release.wait()
        return real(grammar, vocabulary)

    monkeypatch.setattr(module, "compile_grammar", slow)
    compiler = GrammarCompiler(model().tokenizer, model().config, seconds=1.5)
    stuck = compiler.start(di.Grammar.regex("stuck"))
    assert compiler.start(di.Grammar.regex("fine")).result() is not None
    with pytest.raises(di.GrammarError, match=r"takes longer than 1\.5 s"):
        stuck.result()
    assert compiler.stuck == 1
    assert compiler.start(di.Grammar.regex("stuck")) is stuck, "no second thread is lost to it"
    release.set()
    stuck.future.result()
    assert compiler.stuck == 0


def test_a_failure_of_llguidance_itself_is_one_grammars(monkeypatch):
    from deepinfer_jax.grammar import compiler as module

    def broken(grammar, vocabulary):
        raise RuntimeError("oops")

    monkeypatch.setattr(module, "compile_grammar", broken)
    compiler = GrammarCompiler(model().tokenizer, model().config, seconds=60.0)
    began = time.monotonic()
    with pytest.raises(di.GrammarError, match="oops"):
        compiler.start(di.Grammar.regex("a")).result()
    assert time.monotonic() - began < 60


def test_without_a_tokenizer_there_is_no_grammar():
    compiler = GrammarCompiler(None, model().config, seconds=60.0)
    with pytest.raises(di.TokenizerError, match=r"needs tokenizer\.json"):
        compiler.start(di.Grammar.json_object())


def test_a_gate_needs_tokens_that_exist(vocabulary):
    with pytest.raises(di.GrammarError, match="'</thin>' must be an added token"):
        grammar_gate(di.Grammar.json_object(start_after="</thin>"), vocabulary)
    with pytest.raises(di.GrammarError, match="ids of the vocabulary"):
        grammar_gate(di.Grammar(kind="regex", text="a", trigger=(512,)), vocabulary)
