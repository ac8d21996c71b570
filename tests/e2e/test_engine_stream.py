"""Text, stop strings and deltas: what is streamed is what `generate` returns (engine.md 7.1)."""

from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from tests.e2e.lab import BASE, GREEDY, make_engine, model, run, same_floats

pytestmark = pytest.mark.accept(5)
PROMPT = np.random.default_rng(3).integers(3, 500, 12).tolist()
#: Ids of several ASCII characters, so that the text has no broken ones.
WORDS = tuple(range(260, 480))
LONG = replace(GREEDY, max_tokens=12, logprobs=0, allowed_token_ids=WORDS)


@pytest.fixture(scope="module", params=[0, 1, 2])
def llm(request):
    return di.LLM(model(), runtime=replace(BASE, async_depth=request.param))


@pytest.fixture(scope="module")
def free():
    """The greedy output without stops."""
    return run(make_engine(), PROMPT, LONG)


def streamed(llm, prompt, params) -> list[di.StreamDelta]:
    """Returns all deltas, after checking that they add up to `generate`'s outputs."""
    deltas = list(llm.stream(prompt, params))
    (whole,) = llm.generate([prompt], params, progress=False)
    for index, one in enumerate(whole.outputs):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == one.text
        assert tuple(token for delta in mine for token in delta.token_ids) == one.token_ids
        assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (
            one.finish_reason,
            one.stop_reason,
        )
        if params.logprobs is None:
            assert all(delta.logprobs is None for delta in mine)
        else:
            assert same_floats([x for delta in mine for x in delta.logprobs], one.logprobs)
    return deltas


FEATURES = (
    {},
    {"logprobs": 2},
    {"n": 3, "temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 1.0, "logprobs": 0},
    {"min_tokens": 5, "ignore_eos": False},
    {"max_tokens": 0},
    {"max_tokens": 1},
    {"detokenize": False},
    {"skip_special_tokens": False, "logit_bias": {498: 40.0}},
    {"logit_bias": {498: 40.0}},
    {"logit_bias": {130: 40.0}, "max_tokens": 5},  # half a character, again and again
    {"prompt_logprobs": 1},
)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: "+".join(feature) or "plain")
def test_deltas_add_up(llm, feature):
    streamed(llm, PROMPT, replace(GREEDY, **{"max_tokens": 8, **feature}))


def _pieces(free) -> list[str]:
    text = free.text
    return [text[start : start + size] for start in range(0, len(text) - 4, 7) for size in (1, 4)]


def test_a_stop_string_anywhere_cuts_text_ids_and_logprobs(llm, free):
    tokenizer = model().tokenizer
    for stop in _pieces(free):
        output = run_stop(llm, free, stop, included=False)
        assert output.text == free.text[: free.text.index(stop)]
        decoded = tokenizer.decode(list(output.token_ids), skip_special_tokens=True)
        assert decoded.startswith(output.text)
        shorter = tokenizer.decode(list(output.token_ids)[:-1], skip_special_tokens=True)
        assert not output.token_ids or len(shorter) < len(output.text)


def test_the_stop_string_may_be_kept(llm, free):
    for stop in _pieces(free):
        output = run_stop(llm, free, stop, included=True)
        assert output.text == free.text[: free.text.index(stop) + len(stop)]


def run_stop(llm, free, stop: str, *, included: bool) -> di.RequestOutput:
    """Returns the output with a stop string, after checking what always holds."""
    params = replace(LONG, stop=(stop,), include_stop_str_in_output=included)
    streamed(llm, PROMPT, params)
    (output,) = llm.generate([PROMPT], params, progress=False)
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    count = len(output.token_ids)
    assert output.token_ids == free.token_ids[:count]
    assert same_floats(output.logprobs, free.logprobs[:count])
    return output


def test_a_stop_in_the_last_token_wins_over_the_length(llm, free):
    tokenizer = model().tokenizer
    for most in range(2, 12):
        before = tokenizer.decode(list(free.token_ids[: most - 1]))
        text = tokenizer.decode(list(free.token_ids[:most]))
        new = text[len(before) :]
        if not new or new in before:
            continue
        params = replace(LONG, max_tokens=most, stop=(new,))
        (output,) = llm.generate([PROMPT], params, progress=False)
        assert (output.finish_reason, output.stop_reason) == ("stop", new)
        return
    pytest.fail("no place in the output can be tested")


def test_a_stop_inside_a_character_of_several_tokens(llm):
    """The bytes of "é" are two tokens: the first has no text until the second comes."""
    ids = model().tokenizer.encode("é", add_special_tokens=False).ids
    assert len(ids) == 2
    first, second = ids
    params = replace(
        LONG,
        max_tokens=6,
        allowed_token_ids=tuple(ids),
        repetition_penalty=2.0,  # halves the first one's lead after it is out
        logit_bias={first: 40.0, second: 30.0},
        stop=("é",),
    )
    deltas = streamed(llm, PROMPT, params)
    assert deltas[-1].stop_reason == "é"
    assert [token for delta in deltas for token in delta.token_ids] == []


def test_text_waits_while_it_may_begin_a_stop_string(llm, free):
    stop = free.text[3:5] + "\x00"
    deltas = streamed(llm, PROMPT, replace(LONG, stop=(stop,)))
    shown = ""
    for delta in deltas[:-1]:
        shown += delta.text
        assert not shown.endswith(stop[:-1])
    assert deltas[-1].finish_reason == "length"


def test_closing_the_iterator_aborts(llm):
    deltas = llm.stream(PROMPT, LONG)
    next(deltas)
    deltas.close()
    llm.engine.drain()
    assert llm.stats().running == 0
    assert llm.stats().counters["finished_abort"] >= 1
