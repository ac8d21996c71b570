"""Malformed bodies: 4xx with a reason, never 5xx (H6)."""

import json
import random

import pytest

from deepinfer_jax.serve import fields

from .conftest import USER

ROUTES = {
    "/v1/chat/completions": (fields.CHAT, {"messages": [USER], "max_tokens": 1}),
    "/v1/responses": (fields.RESPONSES, {"input": "hi", "max_output_tokens": 1}),
    "/v1/messages": (fields.MESSAGES, {"messages": [USER], "max_tokens": 1}),
    "/v1/completions": (fields.COMPLETIONS, {"prompt": "hi", "max_tokens": 1}),
}
JUNK = [
    True, False, 0, -1, 1, 3.5, -0.0, 1e308, 10**30, 2**64, "", "x", "\u0000", "\U0001f600" * 3, [],
    [[]], [0], [None], [{}], {}, {"a": {"b": []}}, {"type": 5}, {"type": "x"}, [{"type": []}],
    ["x", 5], [-1], "a" * 2000,
]  # fmt: skip
BAD_TURNS = [
    5, "x", None, [], {}, {"role": 5}, {"role": "user"}, {"role": "boss", "content": "x"},
    {"content": "x"}, {"role": "user", "content": 5}, {"role": "user", "content": {}},
    {"role": "user", "content": [5]}, {"role": "user", "content": [{}]},
    {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": [{"type": "x"}]},
]  # fmt: skip
#: Names that say what their values are somewhere below, so that junk may be legal there.
LOOSE = {"cache_control", "cache_salt", "metadata", "user", "model", "guided_json", "json_schema"}


def wrong_field(rng, rules, body):
    """A field that exists, with something it cannot hold."""
    name = rng.choice([n for n in rules if n not in LOOSE])
    rule = rules[name]
    if rule is fields.ANY:
        return body | {name: {"a": [rng.choice(JUNK)]}}
    bad = [one for one in JUNK if not rule.is_legal(one)]
    return body | {name: rng.choice(bad)} if bad else body | {name + "_": 1}


def unknown_field(rng, rules, body):
    return body | {rng.choice(["foo", "temprature", "Model", "", "\u00e9", "x" * 300]): 1}


def missing(rng, rules, body):
    left = {k: v for k, v in body.items() if "max" in k}
    keep = rng.choice([{}, {"model": "nano"}])
    return left | keep if "model" in body else left


def wrong_model(rng, rules, body):
    return body | {"model": rng.choice(["gpt", "", "nano ", "\u0000", "n" * 5000, 5, [], {}])}


def bad_turn(rng, rules, body):
    name = next(name for name in ("messages", "input", "prompt") if name in rules)
    turn = rng.choice(BAD_TURNS)
    if name == "prompt":
        turn = rng.choice([True, {}, [True], [[]], [{}], ["x", 5], [-1], [10**9], [[5, "x"]], []])
        return body | {name: turn}
    return body | {name: rng.choice([[turn], [USER, turn]])}


def broken_text(rng, rules, body):
    text = json.dumps(body).encode()
    cut = rng.randrange(1, len(text))
    return rng.choice([
        text[:cut], text + b"}", text[:cut] + b"\xff" + text[cut:], b"\x00" * cut, b"",
        text.replace(b'"hi"', b"NaN"), text.replace(b'"hi"', b'"\\ud800"'),
        b'{"a":' * 300 + b"1" + b"}" * 300, b"null", b'"x"', b"[" * 5000,
    ])  # fmt: skip


MUTATIONS = (wrong_field, wrong_field, unknown_field, missing, wrong_model, bad_turn, broken_text)


def anything(rng, rules, body):
    """Junk anywhere, which may turn out to be legal."""
    found = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(list(rules))
        if "max" not in name and name not in ("n", "min_tokens", "ignore_eos"):
            found[name] = rng.choice(JUNK)
    turns = found.get("messages")
    if isinstance(turns, list) and rng.random() < 0.5:
        turns.append(rng.choice(BAD_TURNS))
    return found


def fuzz(with_config, count, mutations, seed):
    rng = random.Random(seed)

    async def main(client, service):
        statuses = []
        for number in range(count):
            path = rng.choice(list(ROUTES))
            rules, body = ROUTES[path]
            body = rng.choice(mutations)(rng, rules, {"model": "nano"} | body)
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=raw, headers=headers)
            statuses.append(answer.status_code)
            assert answer.status_code < 500, (number, path, raw[:500], answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"], (number, path, raw[:500])
                assert len(answer.content) < 5000
            else:
                assert mutations == (anything,), (number, path, raw[:500])
        assert not service.live
        return statuses

    return with_config(main)


def test_malformed_bodies_are_refused_with_a_reason(with_config):
    assert set(fuzz(with_config, 300, MUTATIONS, 0)) <= {400, 404}


def test_junk_anywhere_never_breaks_the_server(with_config):
    assert len(fuzz(with_config, 150, (anything,), 1)) == 150


@pytest.mark.slow
@pytest.mark.accept(11)
def test_five_thousand_malformed_bodies_are_refused(with_config):
    assert set(fuzz(with_config, 5000, MUTATIONS, 2)) <= {400, 404}


@pytest.mark.slow
@pytest.mark.accept(11)
def test_junk_anywhere_never_breaks_the_server_in_a_long_run(with_config):
    assert len(fuzz(with_config, 5000, (anything,), 3)) == 5000
