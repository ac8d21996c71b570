"""The whole sampler through the engine, against NumPy on the logits of `di.score` (engine.md 5)."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from tests.deepinfer_jax.sampling.oracle import kept
from tests.e2e.lab import (
    BASE,
    GREEDY,
    assert_same,
    lone_children,
    make_engine,
    model,
    run,
    same_floats,
)

pytestmark = pytest.mark.accept(5)
#: 12 + 12 ids everywhere, so that one program scores them all.
PROMPT = np.random.default_rng(3).integers(3, 500, 12).tolist()
LONG = replace(GREEDY, max_tokens=12)
SCORE = jax.jit(di.score, static_argnums=1)
SAMPLED = replace(LONG, temperature=0.9, seed=21)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def llm():
    return di.LLM(model(), runtime=BASE)


@pytest.fixture(scope="module")
def free(engine):
    """The greedy output without any edit."""
    return run(engine, PROMPT, LONG)


def score(ids: np.ndarray) -> np.ndarray:
    """Returns the logits of `di.score`, compiled once."""
    return np.asarray(SCORE(model().params, model().config, ids))


def logits_after(output) -> np.ndarray:
    """Returns the float32 logits [12, v] that chose the tokens of a 12-token output."""
    ids = np.array([*output.prompt_token_ids, *output.token_ids], np.int32)
    assert len(ids) == 24
    return score(ids)[11:23]


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Returns it in float64."""
    row = row.astype(np.float64)
    top = row.max()
    return row - top - np.log(np.exp(row - top).sum())


def edited(row: np.ndarray, output: list[int], params: di.SamplingParams) -> np.ndarray:
    """Returns one row of logits after steps 2 to 5 of engine.md 5.2; stop ids are not in it."""
    row = row.copy()
    row[model().config.image_token_id] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] = -np.inf if bias == -100 else row[token] + np.float32(bias)
    counts = np.bincount(output, minlength=len(row))
    seen = sorted({*PROMPT, *output})
    factor = np.float32(params.repetition_penalty)
    row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    row -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    row -= np.where(counts > 0, np.float32(params.presence_penalty), np.float32(0))
    if params.allowed_token_ids is not None:
        banned = np.setdiff1d(np.arange(len(row)), params.allowed_token_ids)
        row[banned] = -np.inf
    return row


EDITS = (
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -2.0, "presence_penalty": -1.0},
    {"repetition_penalty": 1.9},
    {"repetition_penalty": 0.4},
    {"logit_bias": {7: 6.0, 300: 5.5, 45: -3.0}},
    {"allowed_token_ids": tuple(range(40, 60))},
    {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {9: 4.0, 10: -100},
        "allowed_token_ids": tuple(range(5, 200)),
    },
)


@pytest.mark.parametrize("edits", EDITS, ids=lambda edits: "+".join(edits))
def test_edits_are_those_of_the_oracle(engine, free, edits):
    params = replace(LONG, logprobs=0, logprobs_mode="processed", **edits)
    output = run(engine, PROMPT, params)
    rows = logits_after(output)
    wanted = [edited(row, list(output.token_ids[:i]), params) for i, row in enumerate(rows)]
    assert list(output.token_ids) == [int(np.argmax(row)) for row in wanted]
    assert output.logprobs.tolist() == [0.0] * 12  # greedy leaves one token
    drawn = run(engine, PROMPT, replace(params, temperature=1.0, seed=4))
    rows = logits_after(drawn)
    for place, (row, token) in enumerate(zip(rows, drawn.token_ids, strict=True)):
        log_p = log_softmax(edited(row, list(drawn.token_ids[:place]), params))
        np.testing.assert_allclose(drawn.logprobs[place], log_p[token], atol=1e-5)


def test_edits_change_the_output(engine, free):
    changed = [run(engine, PROMPT, replace(LONG, **edits)).token_ids for edits in EDITS]
    assert sum(tokens != free.token_ids for tokens in changed) >= len(EDITS) - 1


def test_a_bias_of_minus_100_masks(engine, free):
    first = free.token_ids[0]
    params = replace(LONG, logit_bias={first: -100}, logprobs=20)
    output = run(engine, PROMPT, params)
    assert first not in output.token_ids
    processed = run(
        engine, PROMPT, replace(params, temperature=1.0, seed=1, logprobs_mode="processed")
    )
    assert first not in [token for row in processed.top_logprobs for token, _ in row]


def test_bad_words_never_appear(engine, free):
    word = "a"
    banned = {67, 261}
    lifted = {token: 50.0 for token in banned}
    output = run(engine, PROMPT, replace(LONG, logit_bias=lifted))
    assert set(output.token_ids) <= banned
    output = run(engine, PROMPT, replace(LONG, logit_bias=lifted, bad_words=(word,)))
    assert not banned & set(output.token_ids)
    with pytest.raises(di.InputError, match=r"bad word.*fox"):
        engine.submit(PROMPT, replace(LONG, bad_words=("fox",)))


def test_truncation_keeps_what_the_oracle_keeps(engine):
    params = replace(
        SAMPLED,
        temperature=1.5,
        top_p=0.7,
        top_k=25,
        min_p=0.02,
        logprobs=20,
        logprobs_mode="processed",
    )
    output = run(engine, PROMPT, params)
    for row, token, top in zip(
        logits_after(output), output.token_ids, output.top_logprobs, strict=True
    ):
        scores = row / np.float32(1.5)
        p = np.exp(log_softmax(scores)).astype(np.float32)
        stays = kept(scores, p, 0.7, 25, 0.02)
        assert stays[token]
        listed = [i for i, value in top if value > -9999]
        assert set(listed) == set(np.flatnonzero(stays)[np.argsort(-p[stays])][: len(listed)])
        assert len(listed) == min(20, stays.sum())


def test_raw_logprobs_are_those_of_the_untouched_head(engine):
    params = replace(SAMPLED, presence_penalty=1.0, top_p=0.5, logprobs=3)
    output = run(engine, PROMPT, params)
    for place, row in enumerate(logits_after(output)):
        log_p = log_softmax(row)
        token = output.token_ids[place]
        np.testing.assert_allclose(output.logprobs[place], log_p[token], atol=1e-5)
        best = np.argsort(-row, kind="stable")[:3]
        assert [i for i, _ in output.top_logprobs[place]] == best.tolist()
        values = [value for _, value in output.top_logprobs[place]]
        np.testing.assert_allclose(values, log_p[best], atol=1e-5)


def test_prompt_logprobs_are_those_of_score(engine, llm):
    ids = np.random.default_rng(8).integers(3, 500, 24).tolist()
    output = run(engine, ids, replace(GREEDY, prompt_logprobs=2))
    rows = score(np.array(ids, np.int32))[:-1]
    for row, token, found, top in zip(
        rows, ids[1:], output.prompt_logprobs, output.prompt_top_logprobs, strict=True
    ):
        log_p = log_softmax(row)
        np.testing.assert_allclose(found, log_p[token], atol=1e-5)
        assert [i for i, _ in top] == np.argsort(-row, kind="stable")[:2].tolist()
    (scored,) = llm.score([ids], top_logprobs=2, progress=False)
    assert same_floats(scored.logprobs, output.prompt_logprobs)
    assert scored.top_logprobs == output.prompt_top_logprobs
    long = np.random.default_rng(9).integers(3, 500, 200).tolist()  # several chunks
    (whole,) = llm.score([long], progress=False)
    (part,) = llm.score([long[:150]], progress=False)
    assert same_floats(whole.logprobs[:149], part.logprobs)


def test_one_id_has_nothing_to_score(llm):
    (scored,) = llm.score([[5]], progress=False)
    assert (scored.logprobs.shape, scored.top_logprobs) == ((0,), ())


def test_stop_ids_wait_for_min_tokens(engine, free):
    stop = free.token_ids[1]
    early = free.token_ids.index(stop)
    cut = run(engine, PROMPT, replace(LONG, stop_token_ids=(stop,)))
    assert (cut.token_ids, cut.stop_reason) == (free.token_ids[:early], stop)
    later = run(engine, PROMPT, replace(LONG, stop_token_ids=(stop,), min_tokens=6))
    assert len(later.token_ids) >= 6
    assert stop not in later.token_ids
    assert later.token_ids[:early] == free.token_ids[:early]


def test_the_end_token_stops_unless_ignored(engine):
    eos = model().config.eos_token_id
    lifted = replace(LONG, logit_bias={eos: 90.0}, ignore_eos=False)
    output = run(engine, PROMPT, lifted)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ((), "stop", eos)
    output = run(engine, PROMPT, replace(lifted, ignore_eos=True))
    assert output.token_ids == (eos,) * 12
    output = run(engine, PROMPT, replace(lifted, min_tokens=4))
    assert (len(output.token_ids), output.stop_reason) == (4, eos)
    assert eos not in output.token_ids


def test_children_are_lone_runs_with_their_seeds(engine):
    params = replace(SAMPLED, n=4, logprobs=1)
    output = run(engine, PROMPT, params)
    for found, lone in zip(output.outputs, lone_children(PROMPT, params), strict=True):
        assert_same(found, lone)
    assert len({one.token_ids for one in output.outputs}) == 4
    assert output.seed == 21


def test_a_drawn_seed_is_reported_and_gives_the_same_again(engine):
    first = run(engine, PROMPT, replace(SAMPLED, seed=None))
    again = run(engine, PROMPT, replace(SAMPLED, seed=first.seed))
    assert_same(again, first)
    assert run(engine, PROMPT, replace(SAMPLED, seed=None)).seed != first.seed
    largest = run(engine, PROMPT, replace(SAMPLED, seed=2**64 - 1))
    assert largest.token_ids != first.token_ids


def test_equal_logits_give_the_lowest_id(engine):
    flat = {token: -100 for token in range(512) if token not in (40, 44, 48)}
    few = dict(list(flat.items())[:300])
    allowed = (48, 40, 44)
    params = replace(LONG, allowed_token_ids=allowed)
    broken = model().params
    head = broken.head.at[44].set(broken.head[40]).at[48].set(broken.head[40])
    other = make_engine()
    other.replace_params(replace(broken, head=head))
    assert run(other, PROMPT, params).token_ids == (40,) * 12
    assert run(other, PROMPT, replace(params, logit_bias=few)).token_ids == (40,) * 12


def test_nothing_left_ends_as_numerical_and_leaves_others_alone(engine, free):
    allowed = (5, 6)
    dead = replace(LONG, allowed_token_ids=allowed, logit_bias=dict.fromkeys(allowed, -100))
    broken, fine = engine.submit(PROMPT, dead), engine.submit(PROMPT, LONG)
    engine.drain()
    assert (broken.output().token_ids, broken.output().finish_reason) == ((), "numerical")
    assert_same(fine.output(), free)


@pytest.mark.slow
@pytest.mark.parametrize("edits", EDITS, ids=lambda edits: "+".join(edits))
def test_edits_in_checkpoint_numerics_do_not_depend_on_the_batch(edits):
    params = replace(SAMPLED, logprobs=1, logprobs_mode="processed", **edits)
    lone = run(make_engine(numerics="checkpoint"), PROMPT, params)
    busy = make_engine(numerics="checkpoint")
    requests = [busy.submit(PROMPT[:n], params) for n in (12, 5, 9, 12)]
    busy.drain()
    assert_same(requests[0].output(), lone)
    assert_same(requests[3].output(), lone)
