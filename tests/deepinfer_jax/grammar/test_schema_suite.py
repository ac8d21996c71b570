"""JSON-Schema-Test-Suite, if it is there: no verdict is worse than those of the expectation file.

`python -m tests.deepinfer_jax.grammar.test_schema_suite` writes the file anew. It names the tests
whose verdict is wrong, and why: what llguidance approximates. Refusals are no wrong verdicts, but
each must give a reason.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import deepinfer_jax as di
from deepinfer_jax.grammar.template import compile_grammar, grammar_gate
from deepinfer_jax.grammar.vocabulary import grammar_vocabulary
from tests.conftest import ROOT
from tests.e2e.lab import model

SUITE = ROOT.parent / "shared/data/json_schema_test_suite/tests/draft2020-12"
EXPECTED = Path(__file__).with_name("json_schema_suite.json")
MOST_WRONG = {"accepted": 39, "rejected": 30}

pytestmark = [
    pytest.mark.accept(11),
    pytest.mark.skipif(not SUITE.is_dir(), reason="the suite is not in ../shared/data"),
]


@cache
def verdicts() -> dict[str, Any]:
    """Returns the names of wrong verdicts by kind, refused groups with reasons, and counts."""
    tokenizer, config = model().tokenizer, model().config
    vocabulary = grammar_vocabulary(tokenizer, config)
    found: dict[str, Any] = {"accepted": [], "rejected": [], "refused": {}, "right": 0}
    for path in sorted(SUITE.rglob("*.json")):
        for group in json.loads(path.read_text()):
            name = f"{path.relative_to(SUITE)}: {group['description']}"
            try:
                grammar = di.Grammar.json_schema(json.dumps(group["schema"], ensure_ascii=False))
                template = compile_grammar(grammar, vocabulary)
            except di.GrammarError as error:
                found["refused"][name] = str(error)
                continue
            gate = grammar_gate(grammar, vocabulary)
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                matcher = template.matcher(gate)
                try:
                    matcher.accept(tokenizer.encode(text, add_special_tokens=False).ids)
                    is_valid = matcher.can_end
                except di.GrammarError:
                    is_valid = False
                if is_valid == test["valid"]:
                    found["right"] += 1
                else:
                    kind = "accepted" if is_valid else "rejected"
                    found[kind].append(f"{name}: {test['description']}")
    return found


@pytest.mark.parametrize("kind", MOST_WRONG)
def test_no_more_verdicts_are_wrong(kind):
    wrong, known = verdicts()[kind], json.loads(EXPECTED.read_text())[kind]
    assert not set(wrong) - set(known)
    assert len(wrong) <= MOST_WRONG[kind]


def test_no_more_schemas_are_refused_and_each_with_a_reason():
    refused = verdicts()["refused"]
    assert not set(refused) - set(json.loads(EXPECTED.read_text())["refused"])
    assert all("json_schema" in reason or "JSON schema" in reason for reason in refused.values())
    assert verdicts()["right"] >= json.loads(EXPECTED.read_text())["right"]


if __name__ == "__main__":
    found = verdicts()
    found["refused"] = sorted(found["refused"])
    EXPECTED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print({name: value if isinstance(value, int) else len(value) for name, value in found.items()})
