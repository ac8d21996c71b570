"""`AsyncLLM.submit`: events in order, alternatives with their tokens, and refused grammars."""

import asyncio
import gc

import pytest

import deepinfer_jax as di
from deepinfer_jax.async_llm.call import Admitted, Call, Grown
from deepinfer_jax.engine.request import Request
from tests.golden.network import TINY

RUNTIME = di.RuntimeConfig(max_seqs=4, max_tokens_per_step=32, max_len=128, block_tokens=16)
PROMPT = list(range(20, 60))
PARAMS = di.SamplingParams(
    temperature=0.9, seed=11, max_tokens=8, n=2, ignore_eos=True, logprobs=2, detokenize=False
)


@pytest.fixture(scope="module")
def model():
    return di.load(TINY, numerics="float32")


def use(model, main):
    async def session():
        async with di.AsyncLLM(model, runtime=RUNTIME) as served:
            return await asyncio.wait_for(main(served), 120)

    return asyncio.run(session())


async def read_all(stream):
    events = []
    while not events or not isinstance(events[-1], di.RequestOutput):
        events += await stream.read()
    return events


def test_events_add_up_to_the_output(model):
    async def main(served):
        first = await read_all(served.submit(PROMPT, PARAMS))
        second = await read_all(served.submit(PROMPT, PARAMS))
        return first, second, served.busy_s, served.failure

    first, second, busy, failure = use(model, main)
    for events in (first, second):
        admitted, *grown, output = events
        assert isinstance(admitted, Admitted)
        assert admitted.cached_tokens == output.cached_tokens
        assert all(isinstance(one, Grown) for one in grown)
        for index, one in enumerate(output.outputs):
            own = [event for event in grown if event.delta.index == index]
            assert tuple(t for e in own for t in e.delta.token_ids) == one.token_ids
            assert tuple(row for e in own for row in e.top_logprobs) == one.top_logprobs
            assert own[-1].delta.finish_reason == one.finish_reason == "length"
    assert second[0].cached_tokens > 0
    assert busy >= 0
    assert failure is None


def test_a_cancelled_read_loses_nothing_and_close_ends_the_request(model):
    async def main(served):
        stream = served.submit(PROMPT, PARAMS)
        read = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        read.cancel()
        events = await read_all(stream)
        ended = served.submit([5], di.SamplingParams(max_tokens=100, ignore_eos=True))
        await ended.read()
        ended.close()
        return events, (await read_all(ended))[-1].finish_reason

    events, reason = use(model, main)
    assert isinstance(events[0], Admitted)
    assert sum(len(e.delta.token_ids) for e in events if isinstance(e, Grown)) == 16
    assert reason == "abort"


def test_an_ended_request_is_freed_without_a_collection(model):
    """What ends in circles makes a server grow until the collector's next full turn."""

    def left():
        return [one for one in gc.get_objects() if isinstance(one, Request | Call)]

    async def main(served):
        await read_all(served.submit(PROMPT, PARAMS))
        gc.collect()
        before = len(left())
        gc.disable()
        try:
            for _ in range(3):
                await read_all(served.submit(PROMPT, PARAMS))
                await served.stats()  # the worker has let go of it
            return len(left()) - before
        finally:
            gc.enable()

    assert use(model, main) <= 0


def test_a_grammar_that_is_refused_is_an_error_of_its_caller(model):
    params = di.SamplingParams(grammar=di.Grammar.json_schema({"not": {}}), max_tokens=4)

    async def main(served):
        with pytest.raises(di.GrammarError, match="not"):
            await read_all(served.submit([5], params))
        with pytest.raises(di.GrammarError, match="not"):
            await served.complete([5], params)
        return (await served.complete([5], PARAMS)).finish_reason

    assert use(model, main) == "length"
