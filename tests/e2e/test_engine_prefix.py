"""C3: prefix hits have the length of the rule, are really read, and never change a bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from tests.e2e.lab import (
    BASE,
    GREEDY,
    alone,
    assert_same,
    finish,
    hit_blocks,
    lone_children,
    make_engine,
    model,
    run,
    small_cache,
)

pytestmark = pytest.mark.accept(5)
SEEDED = di.SamplingParams(temperature=1, seed=5, max_tokens=4, ignore_eos=True, logprobs=2)
#: Window 8 of 10 layers: rows that "halo" runs again, 8 + 9 * 7.
HALO = 71
LENGTHS = (15, 16, 17, 31, 32, 33, 47, 48, 49, 88, 89, 160, 161)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Returns random ids."""
    return np.random.default_rng([length, seed]).integers(3, 500, length).tolist()


def rows_of(engine, act) -> int:
    """Returns the rows that plans hold while `act` runs."""
    before = engine.stats().counters.get("rows", 0)
    act()
    return engine.stats().counters["rows"] - before


@pytest.mark.parametrize("restore", ["checkpoint", "halo"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_repeat_hits_by_the_rule_and_gives_the_same_bits(length, restore):
    engine, ids = make_engine(replace(BASE, prefix_restore=restore)), prompt(length)
    cold = run(engine, ids, SEEDED)
    assert (cold.cached_tokens, cold.metrics.cache_reason is None) == (0, False)
    border = 16 * ((length - 1) // 16)
    again = HALO if restore == "halo" else 0
    hit = border if border > again else 0
    found = []
    rows = rows_of(engine, lambda: found.append(run(engine, ids, SEEDED)))
    (warm,) = found
    assert warm.cached_tokens == hit
    reason = None if hit else "prompt too short"
    assert warm.metrics.cache_reason == reason
    decoded = SEEDED.max_tokens - 1
    assert rows == length - hit + (again if hit else 0) + decoded
    assert_same(warm, cold)
    assert_same(warm, alone(ids, SEEDED))


def test_a_longer_prompt_reuses_what_its_beginning_left():
    engine, ids = make_engine(), prompt(100)
    run(engine, ids, SEEDED)
    longer = run(engine, ids + prompt(30, 1), SEEDED)
    assert longer.cached_tokens == 96
    assert_same(longer, alone(ids + prompt(30, 1), SEEDED))
    other = run(engine, ids[:50] + prompt(30, 1), SEEDED)
    assert (other.cached_tokens, other.metrics.cache_reason) == (0, "no checkpoint")
    assert_same(other, alone(ids[:50] + prompt(30, 1), SEEDED))


def test_one_token_outputs_leave_a_prefix_too():
    engine, ids = make_engine(replace(BASE, prefix_restore="halo")), prompt(161)
    run(engine, ids, replace(SEEDED, max_tokens=1))
    assert run(engine, ids, SEEDED).cached_tokens == 160


def _poison(engine, ids: list[int], blocks: list[int]) -> None:
    """Writes NaN into the pages of some blocks on the device."""
    state = engine._device._state
    where = jnp.asarray(blocks)
    main = jax.tree.map(lambda leaf: leaf.at[:, where].set(jnp.nan), state.cache.main)
    engine._device._state = replace(state, cache=replace(state.cache, main=main))


def test_hit_blocks_are_read_and_others_are_not():
    ids = prompt(161)
    engine = make_engine()
    cold = run(engine, ids, SEEDED)
    blocks = hit_blocks(engine, ids)
    assert len(blocks) == 10
    others = sorted(set(range(1, 65)) - set(blocks))
    _poison(engine, ids, others)
    assert_same(run(engine, ids, SEEDED), cold)
    _poison(engine, ids, blocks)
    broken = run(engine, ids, SEEDED)
    assert broken.cached_tokens == 160
    assert broken.finish_reason == "numerical"


def test_the_saved_window_is_read():
    engine, ids = make_engine(), prompt(161)
    cold = run(engine, ids, SEEDED)
    block = hit_blocks(engine, ids)[-1]
    leaves = engine.scheduler.cache.checkpoint(block)
    other = {name: np.asarray(leaf) * np.float32(2) for name, leaf in leaves.items()}
    assert engine.scheduler.cache.attach(block, other)
    assert run(engine, ids, SEEDED).logprobs.tolist() != cold.logprobs.tolist()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cache_salt": "tenant"}, "no match"),
        ({"bypass_prefix_cache": True}, "bypass"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_requests_that_may_not_hit_say_why(change, reason):
    engine, ids = make_engine(), prompt(49)
    run(engine, ids, SEEDED)
    other = run(engine, ids, replace(SEEDED, **change))
    assert (other.cached_tokens, other.metrics.cache_reason) == (0, reason)
    assert_same(other, alone(ids, SEEDED))
    assert engine.stats().cache.misses[reason] >= 1


def test_a_salt_hits_itself():
    engine, ids = make_engine(), prompt(49)
    salted = replace(SEEDED, cache_salt="tenant")
    assert [run(engine, ids, salted).cached_tokens for _ in range(2)] == [0, 48]


def test_bypass_leaves_nothing_behind():
    engine, ids = make_engine(), prompt(49)
    run(engine, ids, replace(SEEDED, bypass_prefix_cache=True))
    assert run(engine, ids, SEEDED).cached_tokens == 0


def test_switched_off_says_so():
    engine, ids = make_engine(replace(BASE, prefix_cache=False)), prompt(49)
    run(engine, ids, SEEDED)
    again = run(engine, ids, SEEDED)
    assert (again.cached_tokens, again.metrics.cache_reason) == (0, "prefix cache off")


def test_replaced_weights_forget_every_prefix():
    engine, ids = make_engine(), prompt(49)
    params = model().params
    first = run(engine, ids, SEEDED)
    engine.replace_params(replace(params, norm=params.norm * 2))
    other = run(engine, ids, SEEDED)
    assert (other.cached_tokens, other.metrics.cache_reason) == (0, "no match")
    assert other.logprobs.tolist() != first.logprobs.tolist()
    engine.replace_params(params)
    back = run(engine, ids, SEEDED)
    assert back.cached_tokens == 0
    assert_same(back, first)


def test_weights_of_another_shape_or_at_a_bad_time_are_refused():
    engine, params = make_engine(), model().params
    with pytest.raises(di.InputError, match="same structure, shapes and dtypes"):
        engine.replace_params(replace(params, norm=params.norm[:-1]))
    engine.submit([5, 6], GREEDY)
    with pytest.raises(di.InputError, match="drain or abort"):
        engine.replace_params(params)
    engine.drain()


def test_identical_prompts_at_once_agree():
    engine, ids = make_engine(), prompt(89)
    requests = [engine.submit(ids, SEEDED) for _ in range(3)]
    for request in requests:
        assert_same(finish(engine, request), alone(ids, SEEDED))
    stats = engine.stats().cache
    assert stats.duplicates > 0
    assert stats.kept == 5  # 89 + 3 rows: 5 full blocks, once
    assert run(engine, ids, SEEDED).cached_tokens == 80


def test_children_copy_the_prompt_instead_of_computing_it():
    engine, ids = make_engine(), prompt(60)
    params = replace(SEEDED, n=4)
    found = []
    rows = rows_of(engine, lambda: found.append(run(engine, ids, params)))
    decoded = params.n * (params.max_tokens - 1)
    assert rows == 60 + 3 * 1 + decoded
    for one, lone in zip(found[0].outputs, lone_children(ids, params), strict=True):
        assert_same(one, lone)


def test_preempted_requests_hit_their_own_blocks():
    engine = make_engine(small_cache())
    params = replace(SEEDED, max_tokens=40, logprobs=0)
    prompts = [prompt(50, seed) for seed in range(4)]
    requests = [engine.submit(ids, params) for ids in prompts]
    engine.drain()
    stats = engine.stats()
    assert stats.counters["preemptions"] > 0
    assert stats.cache.hits > 0  # the prompts have nothing in common
    for ids, request in zip(prompts, requests, strict=True):
        output = request.output()
        assert output.cached_tokens == 0
        assert_same(output, alone(ids, params))
    assert sum(r.output().metrics.preemptions for r in requests) == stats.counters["preemptions"]


def test_an_approximate_restore_is_refused_at_batch():
    with pytest.raises(di.ConfigError, match="bounded"):
        make_engine(replace(BASE, prefix_restore="bounded"))
