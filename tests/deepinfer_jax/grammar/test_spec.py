"""`Grammar` says what it accepts before anything is compiled (io.md 2.4, engine.md 1.1)."""

import json
from dataclasses import asdict

import pytest

import deepinfer_jax as di
from deepinfer_jax.grammar.spec import MAX_BYTES, MAX_ENUM, MAX_NESTING

pytestmark = pytest.mark.accept(11)


def nested(depth: int) -> dict:
    """Returns a schema of lists in lists."""
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: di.Grammar(kind="xml", text="x"), "is one of"),
        (lambda: di.Grammar.regex(""), "must not be empty"),
        (lambda: di.Grammar(kind="regex", text=5), "needs a text"),
        (lambda: di.Grammar.regex("\ud800"), "valid Unicode"),
        (lambda: di.Grammar.regex("a" * (MAX_BYTES["regex"] + 1)), "8192 bytes"),
        (lambda: di.Grammar.regex("(" * (MAX_NESTING + 1)), "nest 64 deep"),
        (lambda: di.Grammar.ebnf(""), "must not be empty"),
        (lambda: di.Grammar.ebnf("start: " + "(" * 70), "nest 64 deep"),
        (lambda: di.Grammar.json_schema("{"), "must be JSON text"),
        (lambda: di.Grammar.json_schema("[]"), "must be an object"),
        (lambda: di.Grammar.json_schema({"a": float("nan")}), "must be JSON values"),
        (lambda: di.Grammar.json_schema({"a": {1}}), "must be JSON values"),
        (lambda: di.Grammar.json_schema(nested(500)), "64 levels deep, /items/items"),
        (lambda: di.Grammar.json_schema("[" * 100_000), "JSON text"),
        (
            lambda: di.Grammar.json_schema({"properties": {"a": {"enum": list(range(5000))}}}),
            "/properties/a/enum has 5000",
        ),
        (lambda: di.Grammar.json_schema({"description": "x" * 300_000}), "262144 bytes"),
        (lambda: di.Grammar(kind="json_object", text="{}", whitespace="none"), "whitespace is"),
        (lambda: di.Grammar(kind="json_object", text="{}", strict=1), "strict must be"),
        (lambda: di.Grammar.json_object(start_after=""), "start_after must spell"),
        (lambda: di.Grammar.choice([]), "list of 1"),
        (lambda: di.Grammar.choice("ab"), "list of 1"),
        (lambda: di.Grammar.choice(["a"] * (MAX_ENUM + 1)), "list of 1"),
        (lambda: di.Grammar.choice(["a", ""]), "not empty, got ''"),
        (lambda: di.Grammar(kind="choice", text="[1]"), "got 1"),
        (lambda: di.Grammar(kind="choice", text='"ab"'), "list of 1"),
        (lambda: di.Grammar(kind="json_object", text="[]"), "has the text"),
        (lambda: di.Grammar.so_args({"schema_type": "json"}), "needs schema"),
        (lambda: di.Grammar.so_args({"schema_type": ["json"], "schema": "{}"}), "needs schema"),
        (lambda: di.Grammar.so_args({"schema_type": "xml", "schema": "x"}), "needs schema"),
        (
            lambda: di.Grammar.so_args({"schema_type": "regex", "schema": "a", "trigger": [1]}),
            "'trigger' as well",
        ),
        (
            lambda: di.Grammar.so_args(
                {"schema_type": "regex", "schema": "a", "trigger_token_ids": [-1]}
            ),
            "are token ids",
        ),
        (
            lambda: di.Grammar.so_args(
                {"schema_type": "regex", "schema": "a", "bound_token_id": 3}
            ),
            "needs trigger_token_ids",
        ),
        (
            lambda: di.Grammar(kind="regex", text="a", trigger=(3,), start_after="</think>"),
            "give one",
        ),
        (lambda: di.Grammar.from_fields({"kind": "regex"}), "kind and text at least"),
        (lambda: di.Grammar.from_fields({"kind": "regex", "text": "a", "x": 1}), "has the fields"),
        (lambda: di.SamplingParams(grammar="x"), "must be None or a deepinfer_jax.Grammar"),
        (
            lambda: di.SamplingParams(grammar=di.Grammar.json_object(), ignore_eos=True),
            "exclude each other",
        ),
    ],
)
def test_what_is_refused_and_why(make, message):
    with pytest.raises(di.InputError, match=message):
        make()


@pytest.mark.parametrize(
    "grammar",
    [
        di.Grammar.json_schema({"b": 1, "a": [2]}, whitespace="compact", strict=False),
        di.Grammar.json_object(start_after="</think>"),
        di.Grammar.regex("a|b", regex_unicode=True),
        di.Grammar.ebnf('start: "é"'),
        di.Grammar.choice(["yes", "no"]),
        di.Grammar.so_args(
            {
                "schema_type": "json",
                "schema": {"type": "integer"},
                "trigger_token_ids": [4, 5],
                "bound_token_id": 6,
            }
        ),
        di.Grammar.so_args({"schema_type": "ebnf", "schema": 'root ::= "a"'}),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_grammar_survives_json_and_serves_as_a_key(grammar):
    found = di.Grammar.from_fields(json.loads(json.dumps(asdict(grammar))))
    assert found == grammar
    assert hash(found) == hash(grammar)
    params = di.SamplingParams(grammar=grammar)
    assert params.grammar is grammar


def test_the_order_of_properties_is_kept():
    assert di.Grammar.json_schema({"b": 1, "a": [2]}).text == '{"b":1,"a":[2]}'
    assert di.Grammar.json_schema(' {"b": 1}').text == ' {"b": 1}'
