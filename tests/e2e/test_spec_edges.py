"""F3: what ends a request inside an accepted block cuts it as without drafts (engine.md 7.3).

The drafts are the true continuation, so after the first token a round emits six: tokens 1 to 6,
7 to 12 and so on. An ending is put at every place of the first two rounds.
"""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.results import RoundResults
from deepinfer_jax.engine.slots import RUNNING
from deepinfer_jax.engine.stats import DraftCounts
from tests.e2e.forced import DRAFTS, drafting, force_drafts
from tests.e2e.lab import BASE, assert_same, make_engine, model, run, same_floats

pytestmark = pytest.mark.accept(6)
PROMPT = np.random.default_rng(3).integers(3, 500, 12).tolist()
END = 1
#: Ids of several ASCII characters, so that the text has no broken ones.
WORDS = tuple(range(260, 480))
LENGTH = 19
#: No id and no text of the first tokens comes twice.
LONG = di.SamplingParams(
    temperature=1, seed=12, max_tokens=LENGTH, ignore_eos=True, logprobs=1, allowed_token_ids=WORDS
)
PLACES = range(1, 13)


@pytest.fixture(scope="module")
def plain():
    """Outputs without drafts, by prompt and parameters."""
    engine, known = make_engine(replace(BASE, prefix_cache=False, async_depth=0)), {}

    def output(ids, params) -> di.RequestOutput:
        key = (tuple(ids), repr(params))
        if key not in known:
            known[key] = run(engine, ids, params)
        return known[key]

    return output


@pytest.fixture(scope="module")
def free(plain):
    """The output without an ending, and without drafts."""
    output = plain(PROMPT, LONG)
    assert len(set(output.token_ids[:14])) == 14
    return output


@pytest.fixture(
    scope="module", params=[1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))]
)
def engine(request, free):
    """Engines whose drafts are the true continuation, and the end token where it must come."""
    made = make_engine(drafting(async_depth=request.param))

    def truth(sequence):
        tokens = list(free.token_ids)
        if sequence.params.logit_bias:
            tokens[sequence.params.min_tokens] = END
        return tokens

    force_drafts(made, truth)
    return made


def check(engine, plain, params: di.SamplingParams) -> di.RequestOutput:
    """Returns the output with drafts, after comparing it and its deltas with that without."""
    deltas: list[di.StreamDelta] = []
    before = engine.stats().rounds
    output = run(engine, PROMPT, params, sink=deltas.append)
    assert_same(output, plain(PROMPT, params))
    assert "".join(delta.text for delta in deltas) == output.text
    assert tuple(t for delta in deltas for t in delta.token_ids) == output.token_ids
    assert same_floats([x for delta in deltas for x in delta.logprobs], output.logprobs)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (output.finish_reason, output.stop_reason)
    engine.drain()  # a stop string is known on the host only: rounds are in flight behind it
    late = engine.stats().depth if params.stop else 0
    assert engine.stats().rounds - before <= 1 + late + len(output.token_ids) // (DRAFTS + 1)
    return output


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_id(engine, plain, free, place):
    output = check(engine, plain, replace(LONG, stop_token_ids=(free.token_ids[place],)))
    assert output.token_ids == free.token_ids[:place]
    assert (output.finish_reason, output.stop_reason) == ("stop", free.token_ids[place])


@pytest.mark.parametrize("place", PLACES)
def test_the_end_token(engine, plain, free, place):
    params = replace(
        LONG,
        allowed_token_ids=(END, *WORDS),
        logit_bias={END: 90.0},
        min_tokens=place,
        ignore_eos=False,
    )
    output = check(engine, plain, params)
    assert (output.token_ids, output.stop_reason) == (free.token_ids[:place], END)


@pytest.mark.parametrize("most", PLACES)
def test_the_length(engine, plain, free, most):
    output = check(engine, plain, replace(LONG, max_tokens=most))
    assert (output.token_ids, output.finish_reason) == (free.token_ids[:most], "length")


def stop_at(free, place: int) -> str:
    """Returns a stop string that the token of this place completes and the one before begins."""
    texts = [model().tokenizer.decode([token]) for token in free.token_ids]
    stop = texts[place - 1][-1] + texts[place]
    assert free.text.index(stop) + len(stop) == len("".join(texts[: place + 1]))
    return stop


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_stop_string(engine, plain, free, place, is_kept):
    stop = stop_at(free, place)
    output = check(engine, plain, replace(LONG, stop=(stop,), include_stop_str_in_output=is_kept))
    cut = free.text.index(stop)
    assert output.text == free.text[: cut + len(stop) * is_kept]
    assert output.stop_reason == stop
    assert len(output.token_ids) in (place, place - 1) if not is_kept else (place + 1,)


@pytest.mark.parametrize("place", [2, 5, 6, 7, 10])
def test_a_stop_string_and_the_length_in_one_block(engine, plain, free, place):
    stop = stop_at(free, place)
    for most in range(place - 1, place + 4):
        output = check(engine, plain, replace(LONG, stop=(stop,), max_tokens=most))
        assert output.finish_reason == ("stop" if most > place else "length")
        assert output.text == free.text[: free.text.index(stop)] or most <= place


@pytest.mark.parametrize("place", [3, 6, 8])
def test_a_stop_string_before_a_stop_id(engine, plain, free, place):
    """The device has ended the sequence by then: the text decides which tokens are output."""
    for later in range(place + 1, place + 3):
        params = replace(
            LONG, stop=(stop_at(free, place),), stop_token_ids=(free.token_ids[later],)
        )
        assert check(engine, plain, params).stop_reason == params.stop[0]


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_abort_from_a_sink_keeps_whole_blocks(engine, free, calls):
    deltas = []

    def sink(delta):
        deltas.append(delta)
        if len(deltas) == calls:
            assert engine.abort("mine")

    request = engine.submit(PROMPT, LONG, request_id="mine", sink=sink)
    engine.drain()
    output = request.output()
    assert output.finish_reason == "abort"
    assert output.token_ids == free.token_ids[: 1 + (DRAFTS + 1) * (calls - 1)]
    assert engine.stats().cache.referenced == 0


@pytest.mark.parametrize("steps", range(1, 6))
def test_abort_with_rounds_in_flight(engine, plain, free, steps):
    victim, mate = (engine.submit(PROMPT, LONG, request_id=name) for name in ("victim", "mate"))
    for _ in range(steps):
        engine.step()
    engine.abort("victim")
    engine.drain()
    found = victim.output().token_ids
    assert found == free.token_ids[: len(found)]
    assert len(found) % (DRAFTS + 1) <= 1
    assert_same(mate.output(), free)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_snapshot_continues_with_other_drafts_and_without(engine, free, steps):
    request = engine.submit(PROMPT, LONG, request_id="saved")
    for _ in range(steps):
        engine.step()
    saved = json.loads(json.dumps(engine.snapshot()))
    engine.drain()
    assert_same(request.output(), free)
    for runtime in (drafting(draft_length=2), BASE):
        other = make_engine(runtime)
        (restored,) = other.restore(saved)
        other.drain()
        assert restored.output().token_ids == free.token_ids


def test_a_full_sequence_ends_in_a_block(engine, plain):
    """Drafts past the longest sequence have neither blocks nor positions."""
    for length in (237, 238, 244, 249, 250, 253, 255):
        ids = (PROMPT * 22)[:length]
        output = run(engine, ids, LONG)
        assert_same(output, plain(ids, LONG))
        assert output.finish_reason == ("capacity" if length > 237 else "length")


@pytest.mark.parametrize("is_forced", [False, True])
def test_short_prompts(plain, is_forced):
    """The first round has fewer rows behind it than windows and groups hold."""
    engine = make_engine(drafting(prefix_cache=False))
    params = replace(LONG, max_tokens=9)
    if is_forced:
        force_drafts(engine, lambda s: plain(s.ids[: s.prompt_len].tolist(), params).token_ids)
    requests = [engine.submit(PROMPT[-length:], params) for length in range(1, 13)]
    engine.drain()
    for request in requests:
        assert_same(request.output(), plain(request.prompt, params))
    assert not is_forced or engine.stats().rounds == 2 * 12


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_that_depend_on_the_rounds_are_refused_at_batch(engine, rule):
    engine.drain()
    with pytest.raises(di.InputError, match=f"verify='{rule}'.*exact.*batch"):
        engine.submit(PROMPT, replace(LONG, verify=rule))
    assert not engine.has_work


def test_more_drafts_than_a_block_has_are_refused(engine):
    with pytest.raises(di.InputError, match=r"max_draft must be at most the 5 .*got 6"):
        engine.submit(PROMPT, replace(LONG, max_draft=6))
    with pytest.raises(di.ConfigError, match=r"draft_length.* 5 .*got 6"):
        make_engine(drafting(draft_length=6))


def test_drafting_needs_stages():
    bare = replace(
        model(),
        config=replace(model().config, draft=None),
        params=replace(model().params, draft=None),
    )
    with pytest.raises(di.ConfigError, match=r"drafting=True needs draft stages"):
        Engine(bare, drafting())
    with pytest.raises(di.InputError, match="max_draft must be at most the 0 drafts"):
        Engine(bare, replace(BASE, drafting=None)).submit(PROMPT, replace(LONG, max_draft=1))


def results(*rounds: tuple[int, int, int]) -> RoundResults:
    """Returns results of rounds of (tokens that it emitted, drafts verified, drafts accepted)."""
    count, verified, accepted = map(list, zip(*rounds, strict=True))
    some = len(rounds)
    return RoundResults(
        generation=[1] * some,
        first=[0] * some,
        count=count,
        code=[RUNNING] * some,
        status=[0] * some,
        verified=verified,
        accepted=accepted,
        tokens=[(5,) * (DRAFTS + 1)] * some,
        survivals=np.zeros((some, DRAFTS), np.float32),
    )


REJECTED, NOT_VERIFIED, ENDED, A_PROMPT = (1, 2, 0), (1, 0, 0), (0, 0, 0), (1, 5, 5)


def test_drafts_that_never_help_are_worth_one_warning():
    counts = DraftCounts(DRAFTS)
    for _ in range(99):
        counts.add(results(*[REJECTED] * 10, NOT_VERIFIED, ENDED, A_PROMPT), 12)
    with pytest.warns(UserWarning, match="none of 1000 first drafts was accepted.*drafting=False"):
        counts.add(results(*[REJECTED] * 10), 10)
    counts.add(results(*[REJECTED] * 1000), 1000)
    assert counts.verified.tolist() == [2000, 0, 0, 0, 0]  # a second one was never looked at
    assert counts.rounds == 2099


def test_drafts_that_help_once_are_not():
    counts = DraftCounts(DRAFTS)
    counts.add(results((2, 2, 1)), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts.add(results(*[(1, 1, 0)] * 5000), 5000)
    assert (counts.verified[0], counts.accepted[0]) == (5001, 1)
