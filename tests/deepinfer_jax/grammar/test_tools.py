"""Tool calls as a grammar: what the model writes is what the chat parser reads (io.md 1.4, 2.8)."""

import llguidance
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.chat.session import read_chat
from deepinfer_jax.grammar.masks import fill_masks
from deepinfer_jax.grammar.template import compile_grammar, grammar_gate
from deepinfer_jax.grammar.tools import MARKER
from tests.e2e.forced import drafting
from tests.e2e.lab import BASE, alone, assert_same, make_engine, model, run

pytestmark = pytest.mark.accept(11)
TOOLS = [
    {
        "name": "get_weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its name"},
                "unit": {"enum": ["celsius", "kelvin"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "where": {"$ref": "#/$defs/place"},
            },
            "required": ["city", "days"],
            "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        },
    },
    {"name": "ping", "parameters": {"type": "object", "properties": {}}},
]


def call(name: str, **parameters: tuple[bool, str]) -> str:
    """Returns a call as the model writes it; parameters: (whether it is a text, its body)."""
    body = "".join(
        f'<{MARKER} parameter name="{key}" string="{str(is_text).lower()}">{text}'
        f"</{MARKER} parameter>\n"
        for key, (is_text, text) in parameters.items()
    )
    return f'<{MARKER} invoke name="{name}">\n{body}</{MARKER} invoke>\n'


WEATHER = call("get_weather", city=(True, 'São </div> "P"\nx'), days=(False, "2"))
WHOLE = call(
    "get_weather",
    city=(True, ""),
    unit=(True, "kelvin"),
    days=(False, "14"),
    where=(False, '{"x": 1}'),
)
END = f"</{MARKER} calls>"
OPEN = f"<{MARKER} calls>\n"


def verdict(vocabulary, text: str, tools=TOOLS, **options) -> bool | None:
    """Returns True for a whole text, None for a beginning, False for neither; token by token."""
    grammar = di.Grammar.tool_calls(tools, **options)
    matcher = compile_grammar(grammar, vocabulary).matcher(grammar_gate(grammar, vocabulary))
    try:
        matcher.accept(model().tokenizer.encode(text, add_special_tokens=False).ids)
    except di.GrammarError:
        return False
    return matcher.can_end or None


@pytest.mark.parametrize("text", [WEATHER, WHOLE, call("ping"), WEATHER + call("ping") + WHOLE])
def test_calls(vocabulary, text):
    assert verdict(vocabulary, text + END, begin="opened") is True
    assert verdict(vocabulary, text, begin="opened") is None
    assert verdict(vocabulary, f"Let me look.\n\n{OPEN}{text}{END}", begin="auto") is True
    assert verdict(vocabulary, OPEN + text + END, begin="auto") is True
    assert verdict(vocabulary, f"\n\n{OPEN}{text}{END}", begin="required") is True


@pytest.mark.parametrize(
    "text",
    [
        END,
        call("pong"),
        call("get_weather", days=(False, "2")),
        call("get_weather", city=(True, "a"), days=(False, "15")),
        call("get_weather", city=(True, "a"), days=(True, "2")),
        call("get_weather", city=(True, "a"), unit=(True, "miles"), days=(False, "2")),
        call("get_weather", city=(True, "a"), days=(False, "2"), where=(False, '{"x": "1"}')),
        call("get_weather", days=(False, "2"), city=(True, "a")),
        "text " + call("ping"),
    ],
)
def test_what_is_no_call(vocabulary, text):
    assert verdict(vocabulary, text + END, begin="opened") is False


def test_text_alone_and_nothing_behind_the_calls(vocabulary):
    assert verdict(vocabulary, "just < text, </div> and more", begin="auto") is True
    assert verdict(vocabulary, f"a {OPEN}", begin="auto") is None
    assert verdict(vocabulary, f"{OPEN}{call('ping')}{END} more", begin="auto") is False


def test_only_the_token_itself_spells_the_marker(vocabulary):
    tokenizer, grammar = model().tokenizer, di.Grammar.tool_calls(TOOLS, begin="opened")
    marker, slash = tokenizer.token_to_id(MARKER), tokenizer.token_to_id("/")
    matcher = compile_grammar(grammar, vocabulary).matcher(grammar_gate(grammar, vocabulary))
    matcher.accept(tokenizer.encode(call("ping") + "<", add_special_tokens=False).ids)
    row = fill_masks(llguidance.LLExecutor(1), vocabulary.width, [(0, matcher)]).words[0]
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits)) == {slash, marker}
    matcher = compile_grammar(grammar, vocabulary).matcher(grammar_gate(grammar, vocabulary))
    begun = call("get_weather", city=(True, "a"), days=(False, "2"), where=(False, '{"a'))
    begun = begun[: begun.index('{"a') + 3] + "<"
    matcher.accept(tokenizer.encode(begun, add_special_tokens=False).ids)
    row = fill_masks(llguidance.LLExecutor(1), vocabulary.width, [(0, matcher)]).words[0]
    assert not row[marker // 32] >> (marker % 32) & 1, "no tag inside of JSON"
    bar = tokenizer.encode(MARKER[0], add_special_tokens=False).ids[0]
    assert row[bar // 32] >> (bar % 32) & 1, "but any text"


def test_required_calls_come_at_once_and_single_ones_once(vocabulary):
    for text in ("hi", OPEN + call("ping") + END, f"x\n\n{OPEN}"):
        assert verdict(vocabulary, text, begin="required") is False
    twice = call("ping") * 2
    for begin, lead in (("opened", ""), ("required", "\n\n" + OPEN), ("auto", OPEN)):
        assert verdict(vocabulary, lead + twice + END, begin=begin) is True
        assert verdict(vocabulary, lead + twice + END, begin=begin, is_single=True) is False
        whole = lead + call("ping") + END
        assert verdict(vocabulary, whole, begin=begin, is_single=True) is True


def tool(schema, **more):
    """Returns a tool with one parameter."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]} | more
    return {"name": "t", "parameters": parameters}


CODE = {"type": "string", "pattern": "^[A-Z]{2}$"}


@pytest.mark.parametrize(
    ("schema", "legal", "illegal"),
    [
        (CODE, (False, '"AB"'), (False, '"Ab"')),
        (CODE, (False, '"AB"'), (True, "AB")),
        ({"type": "string", "minLength": 2}, (False, '"ab"'), (False, '"a"')),
        ({"enum": ["a", MARKER]}, (False, '"a"'), (False, '"b"')),
        ({"enum": ["", "b"]}, (False, '""'), (True, "b")),
        ({"type": ["string", "null"]}, (False, "null"), (True, "a")),
        ({"anyOf": [{"type": "integer"}, {"const": "x"}]}, (False, "7"), (False, '"y"')),
        ({"type": "array", "items": {"enum": [1, 2]}}, (False, "[1, 2]"), (False, "[3]")),
        ({"type": "integer"}, (False, "7"), (False, " " * 41 + "7")),
    ],
)
def test_parameters_that_only_json_can_be_held_to(vocabulary, schema, legal, illegal):
    tools = [tool(schema)]
    assert verdict(vocabulary, call("t", a=legal) + END, tools, begin="opened") is True
    assert verdict(vocabulary, call("t", a=illegal) + END, tools, begin="opened") is False


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (tool(5), "/properties/a: must be an object"),
        (tool({"type": "array", "uniqueItems": True}), "uniqueItems.*tool 't', /properties/a"),
        (tool({"type": "string"}, minProperties=1), "tool 't': minProperties cannot be enforced"),
        (tool({"type": "string"}, required=["b"]), "required names 'b'"),
        (tool({"type": "string"}, anyOf=[{}]), "anyOf cannot be enforced"),
    ],
)
def test_only_what_is_strict_must_be_enforced(vocabulary, bad, message):
    with pytest.raises(di.GrammarError, match=message):
        compile_grammar(di.Grammar.tool_calls([bad], begin="opened"), vocabulary)
    free = [bad | {"strict": False}]
    texts = call("t", a=(True, "x")), call("t", a=(False, "[1, 1]"))
    assert True in [verdict(vocabulary, text + END, free, begin="opened") for text in texts]
    assert verdict(vocabulary, call("u") + END, free, begin="opened") is False


def test_a_parameter_that_cannot_be_written_is_refused(vocabulary):
    bad = {"name": "t", "parameters": {"type": "object", "properties": {'"': {}}}, "strict": False}
    with pytest.raises(di.GrammarError, match="no quotes"):
        compile_grammar(di.Grammar.tool_calls([bad], begin="opened"), vocabulary)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "takes 1"),
        ([{"name": "a b", "parameters": {}}], "letters, digits"),
        ([{"name": "a"}], "needs parameters"),
        ([{"name": "a", "parameters": {"enum": list(range(5000))}}], "/enum has 5000"),
        ([{"name": "a", "parameters": {}, "strict": 1}], "True or False, got 1"),
    ],
)
def test_tools_that_are_none(tools, message):
    with pytest.raises(di.GrammarError, match=message):
        di.Grammar.tool_calls(tools, begin="opened")


def test_a_begin_that_is_none():
    with pytest.raises(di.GrammarError, match="begin is one of"):
        di.Grammar(kind="tool_calls", text='{"begin": "never", "tools": [{}]}')


def test_the_parser_reads_what_was_generated():
    encoder = di.LLM(model(), runtime=BASE).chat_encoder
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    prompt = encoder.prepare(
        [{"role": "user", "content": "x"}], thinking=False, tools=tools, tool_choice="required"
    )
    ids = list(prompt.token_ids)[-60:]
    grammar = di.Grammar.tool_calls(TOOLS, begin="opened")
    engine, calls = make_engine(drafting()), 0
    # Random weights would never end the body of a text, nor the calls.
    tags = [model().tokenizer.token_to_id(text) for text in (MARKER, "<", "/")]
    for seed in range(4):
        params = di.SamplingParams(
            temperature=1,
            seed=seed,
            max_tokens=150,
            grammar=grammar,
            logit_bias=dict.fromkeys(tags, 20.0),
        )
        output = alone(ids, params)
        assert_same(run(engine, ids, params), output)
        if output.finish_reason == "stop":
            message = read_chat(encoder, prompt, (), output).message
            calls += len(message.tool_calls)
            for found in message.tool_calls:
                assert found.problem is None
                assert found.name in ("get_weather", "ping")
    assert calls > 0
