"""Grammars for many callers: `AsyncLLM` compiles beside the loop, errors reach their callers."""

import asyncio
import json

import pytest

import deepinfer_jax as di
from tests.e2e.lab import BASE, alone, model

pytestmark = pytest.mark.accept(11)
SCHEMA = {"type": "array", "items": {"enum": ["red", 12]}, "minItems": 1, "maxItems": 3}
PARAMS = di.SamplingParams(
    temperature=1, seed=3, max_tokens=40, grammar=di.Grammar.json_schema(SCHEMA)
)
BAD = di.SamplingParams(grammar=di.Grammar.json_schema({"items": {"not": {}}}))


def test_callers_get_their_text_or_their_error():
    async def main() -> list:
        async with di.AsyncLLM(model(), runtime=BASE) as served:

            async def streamed(params):
                return "".join([delta.text async for delta in served.generate([5, 6, 7], params)])

            calls = (
                served.complete([5, 6, 7], PARAMS),
                served.complete([5, 6, 7], BAD),
                streamed(BAD),
                streamed(PARAMS),
            )
            return await asyncio.gather(*calls, return_exceptions=True)

    whole, refused, cut, text = asyncio.run(main())
    assert whole.token_ids == alone([5, 6, 7], PARAMS).token_ids
    assert json.loads(whole.text) == json.loads(text)
    for error in (refused, cut):
        assert isinstance(error, di.GrammarError)
        assert "/items/not" in str(error)
