"""`AsyncLLM`: streams, batches, aborts, and what a caller sees when something goes wrong."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.errors import CapacityError
from tests.golden.network import TINY

RUNTIME = di.RuntimeConfig(max_seqs=4, max_tokens_per_step=32, max_len=128, block_tokens=16)
SEEDED = di.SamplingParams(
    temperature=0.9, top_p=0.95, seed=11, max_tokens=8, ignore_eos=True, logprobs=1
)
LONG = di.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9], list(range(20, 60)), [300, 301], [8] * 9, [4, 4]]


@pytest.fixture(scope="module")
def model():
    return di.load(TINY, numerics="float32")


@pytest.fixture(scope="module")
def llm(model):
    return di.LLM(model, runtime=RUNTIME)


def use(model, main):
    """Runs `main(AsyncLLM)` to its end; no worker is left behind."""
    before = set(threading.enumerate())  # a server of another test may be at work

    async def session():
        async with di.AsyncLLM(model, runtime=RUNTIME) as served:
            result = await asyncio.wait_for(main(served), 120)
        assert not [t for t in set(threading.enumerate()) - before if t.name == "AsyncLLM"]
        return result

    return asyncio.run(session())


async def joined(deltas):
    found = [delta async for delta in deltas]
    ids = tuple(t for d in found for t in d.token_ids)
    return "".join(d.text for d in found), ids, found[-1].finish_reason


def test_many_callers_get_what_generate_gives(model, llm):
    expected = llm.generate(PROMPTS, SEEDED, progress=False)

    async def main(served):
        whole = asyncio.gather(*(served.complete(p, SEEDED) for p in PROMPTS))
        streams = asyncio.gather(*(joined(served.generate(p, SEEDED)) for p in PROMPTS))
        return await whole, await streams

    outputs, streams = use(model, main)
    for one, other, stream in zip(expected, outputs, streams, strict=True):
        assert other.token_ids == one.token_ids
        np.testing.assert_array_equal(other.logprobs, one.logprobs)
        assert stream == (one.text, one.token_ids, "length")
        assert other.seed == 11


def test_score_chat_and_several_completions(model, llm):
    hello = [{"role": "user", "content": "Hello"}]
    params = replace(SEEDED, logprobs=None)
    (scored,) = llm.score([PROMPTS[2]], top_logprobs=2, progress=False)
    (three,) = llm.generate([PROMPTS[0]], replace(params, n=3), progress=False)
    answer = list(llm.stream_chat(hello, params, thinking=False))

    async def main(served):
        score = await served.score(PROMPTS[2], top_logprobs=2)
        deltas = [d async for d in served.generate(PROMPTS[0], replace(params, n=3))]
        chat = [d async for d in served.chat(hello, params, thinking=False)]
        return score, deltas, chat

    score, deltas, chat = use(model, main)
    np.testing.assert_array_equal(score.logprobs, scored.logprobs)
    assert score.top_logprobs == scored.top_logprobs
    for index, completion in enumerate(three.outputs):
        ids = tuple(t for d in deltas if d.index == index for t in d.token_ids)
        assert ids == completion.token_ids
    assert [d.content for d in chat] == [d.content for d in answer]
    assert chat[-1].finish_reason == answer[-1].finish_reason == "length"


def test_close_cancel_and_abort_end_requests_and_leave_the_others_alone(model, llm):
    (expected,) = llm.generate([PROMPTS[0]], SEEDED, progress=False)

    async def main(served):
        stream = served.generate([5, 6], LONG)
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(served.complete([5, 7], LONG))
        other = asyncio.create_task(served.complete([5, 8], LONG, request_id="mine"))
        named = served.generate([5, 9], LONG, request_id="theirs")
        await anext(named)
        task.cancel()
        assert served.abort("theirs")
        assert served.abort("mine")
        assert not served.abort("nobody")
        with pytest.raises(asyncio.CancelledError):
            await task
        rest = [delta async for delta in named]
        left = await served.complete(PROMPTS[0], SEEDED)
        return (await other).finish_reason, rest[-1].finish_reason, left, await served.stats()

    other, named, left, stats = use(model, main)
    assert (other, named) == ("abort", "abort")
    assert left.token_ids == expected.token_ids
    assert stats.counters["finished_abort"] == 4
    assert stats.waiting == stats.running == stats.cache.referenced == 0


def test_a_finished_stream_does_not_abort_the_next_owner_of_its_name(model):
    async def main(served):
        first = served.generate([5, 6], replace(LONG, max_tokens=1), request_id="x")
        await anext(first)
        while "x" in served._calls:
            await served.stats()  # a turn of the worker
        second = asyncio.create_task(served.complete([5, 7], LONG, request_id="x"))
        await asyncio.sleep(0)
        await first.aclose()
        return (await second).finish_reason

    assert use(model, main) == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], LONG, "at least 1"),
        ([5, 512], LONG, "512 at position 1"),
        ("\ud800", LONG, "valid Unicode"),
        (list(range(128)), LONG, "a sequence may have 128"),
        ([5], replace(LONG, bad_words=("two words",)), "must be one token"),
    ],
)
def test_bad_input_raises_in_the_caller_before_anything_runs(model, prompt, params, text):
    async def main(served):
        with pytest.raises(di.InputError, match=text):
            served.generate(prompt, params)
        with pytest.raises(di.InputError, match=text):
            await served.complete(prompt, params)
        assert served._worker is None

    use(model, main)


def test_a_name_in_use_and_a_closed_llm_are_refused(model):
    async def main(served):
        stream = served.generate([5], LONG, request_id="x")
        await anext(stream)
        with pytest.raises(di.InputError, match="in use"):
            await served.complete([6], LONG, request_id="x")
        with pytest.raises(di.InputError, match="n=2"):
            served.chat("hi", replace(LONG, n=2))
        await served.close()
        rest = [delta async for delta in stream]
        assert rest[-1].finish_reason == "abort"
        for attempt in (served.complete([5], LONG), served.stats()):
            with pytest.raises(di.InputError, match="closed"):
                await attempt

    use(model, main)


def test_a_failing_engine_reaches_every_waiter(model, monkeypatch):
    def fail(self):
        raise ZeroDivisionError("step")

    async def main(served):
        monkeypatch.setattr(Engine, "step", fail)
        waiting = [served.complete([5], LONG), joined(served.generate([6], LONG))]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        for error in found:
            assert isinstance(error, di.DeepInferError)
            assert isinstance(error.__cause__, ZeroDivisionError)
        assert found[0] is not found[1]
        for attempt in (served.complete([7], LONG), served.stats()):
            with pytest.raises(di.DeepInferError, match="ZeroDivisionError"):
                await attempt

    use(model, main)


def test_a_question_that_fails_ends_the_engine(model, monkeypatch):
    def fail(self):
        raise ZeroDivisionError("stats")

    async def main(served):
        monkeypatch.setattr(Engine, "stats", fail)
        waiting = asyncio.create_task(served.complete([5], LONG))
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError):
            await served.stats()
        with pytest.raises(di.DeepInferError, match="ZeroDivisionError"):
            await waiting

    use(model, main)


def test_an_engine_that_cannot_be_made_is_the_callers_error(model):
    async def main():
        small = replace(RUNTIME, cache_bytes=1)
        async with di.AsyncLLM(model, runtime=small) as served:
            with pytest.raises(CapacityError):
                await served.complete([5], LONG)

    asyncio.run(main())


def test_weights_are_replaced_right_after_a_request(model, llm):
    llm.generate(PROMPTS, SEEDED, progress=False)  # may leave a step in flight
    llm.replace_params(model.params)


def test_weights_are_replaced_between_requests_only(model):
    async def main(served):
        stream = served.generate([5], LONG)
        await anext(stream)
        with pytest.raises(di.InputError, match="between requests"):
            await served.replace_params(model.params)
        await stream.aclose()
        await served.replace_params(model.params)
        return (await served.complete(PROMPTS[0], SEEDED)).cached_tokens

    assert use(model, main) == 0


def test_an_event_loop_that_is_gone_takes_its_requests_along(model, llm):
    (expected,) = llm.generate([PROMPTS[0]], SEEDED, progress=False)
    served = di.AsyncLLM(model, runtime=RUNTIME)
    lost = asyncio.new_event_loop()
    stream = served.generate([5], LONG)
    lost.run_until_complete(anext(stream))
    lost.close()  # without aclose: nobody reads on

    async def main():
        output = await served.complete(PROMPTS[0], SEEDED)
        stats = await served.stats()
        await served.close()
        return output.token_ids, stats

    ids, stats = asyncio.run(main())
    assert ids == expected.token_ids
    assert stats.counters["finished_abort"] == 1
