"""Engines of tiny_v41 that share few compiled programs, and the oracle: a request run alone.

The oracle never drafts, so every comparison with it is also one of drafts on with drafts off.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.output import RequestOutput
from deepinfer_jax.engine.request import Request
from deepinfer_jax.loading import Model
from deepinfer_jax.sampling.random import child_seed
from tests.golden.network import TINY

#: One program serves every test that keeps these sizes; depth, cache policy and check are free.
BASE = di.RuntimeConfig(
    block_tokens=16, max_len=256, max_seqs=4, max_tokens_per_step=64, drafting=False, check=True
)
#: The same with room for one longest sequence and one block more.
SMALL_BLOCKS = 17
GREEDY = di.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@cache
def model(numerics: str = "float32") -> Model:
    """Returns tiny_v41, loaded once."""
    return di.load(TINY, numerics=numerics)


def make_engine(
    runtime: di.RuntimeConfig = BASE, *, numerics: str = "float32", **options: Any
) -> Engine:
    """Returns a new engine; options: of `Engine`."""
    return Engine(model(numerics), runtime, **options)


@cache
def small_cache(numerics: str = "float32") -> di.RuntimeConfig:
    """Returns BASE with a cache of `SMALL_BLOCKS` blocks beside the null block."""
    sizes = make_engine(numerics=numerics).capacity
    slots = sizes.layout.num_slots * sizes.slot_bytes + sizes.image_bytes
    return replace(BASE, cache_bytes=slots + (1 + SMALL_BLOCKS) * sizes.block_bytes)


def run(engine: Engine, ids: Any, params: di.SamplingParams, **options: Any) -> RequestOutput:
    """Returns the result of one request, run to its end."""
    return finish(engine, engine.submit(list(ids), params, **options))


def finish(engine: Engine, request: Request) -> RequestOutput:
    """Steps until a request has ended."""
    while request.ended is None:
        engine.step()
    return request.output()


_ALONE: dict[tuple[Any, ...], RequestOutput] = {}


def alone(
    ids: Any, params: di.SamplingParams, *, runtime: di.RuntimeConfig = BASE, numerics="float32"
) -> RequestOutput:
    """Returns the result in a fresh engine without prefix cache, drafts and depth; memoised."""
    runtime = replace(runtime, prefix_cache=False, async_depth=0, drafting=False)
    params = replace(params, max_draft=None)
    key = (tuple(ids), repr(params), repr(runtime), numerics)
    if key not in _ALONE:
        _ALONE[key] = run(make_engine(runtime, numerics=numerics), ids, params)
    return _ALONE[key]


def hit_blocks(engine: Engine, ids: Any) -> list[int]:
    """Returns the blocks that hold a prompt's beginning."""
    probe = engine.submit(list(ids), GREEDY)
    engine.abort(probe.request_id)
    engine.drain()
    return engine.scheduler.cache.match(probe.sequences[0].root, ids).blocks


def lone_children(ids: Any, params: di.SamplingParams, **options: Any) -> list[RequestOutput]:
    """Returns what every completion of n must be: the request alone, with the child's seed."""
    assert params.seed is not None
    return [
        alone(ids, replace(params, n=1, seed=child_seed(params.seed, child)), **options)
        for child in range(params.n)
    ]


def same_floats(one: Any, other: Any) -> bool:
    """Returns whether two float arrays, or two None, have the same bits."""
    if one is None or other is None:
        return one is other
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    return one.shape == other.shape and bool((one.view("i4") == other.view("i4")).all())


def assert_same(found: Any, wanted: Any) -> None:
    """Asserts that two completions (or outputs of n = 1) agree in every bit."""
    assert found.token_ids == wanted.token_ids
    assert (found.finish_reason, found.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
    assert found.text == wanted.text
    assert same_floats(found.logprobs, wanted.logprobs)
    assert found.top_logprobs == wanted.top_logprobs
