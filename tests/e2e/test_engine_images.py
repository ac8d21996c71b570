"""L2: what stands beside, before or under an image changes no bit of what follows it."""

import asyncio
import json
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine.images import ImagePool
from deepinfer_jax.model.vision.encode import encode_images
from deepinfer_jax.record.logit_hash import hash_text, logit_hash_tile
from deepinfer_jax.sampling.random import child_seed
from tests.e2e.forced import drafting, force_drafts, mostly_right
from tests.e2e.lab import assert_same, finish, make_engine, model, run, small_cache

pytestmark = pytest.mark.accept(12)
#: All alternatives that may be asked for: many bits of every row of logits.
SEEDED = di.SamplingParams(temperature=1, seed=5, max_tokens=4, ignore_eos=True, logprobs=20)
DRAW = np.random.default_rng(12)
#: 11, 8 and 23 tokens.
PICTURES = tuple(
    DRAW.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((28, 20), (16, 20), (30, 62))
)
TOKENS = (11, 8, 23)
STEP = 64  # rows of a step of the shared program


def image_token() -> int:
    """Returns the id that stands for an image."""
    return model().config.image_token_id


def text(length: int, seed: int = 0) -> list[int]:
    """Returns random ids of text."""
    return np.random.default_rng([length, seed]).integers(3, 500, length).tolist()


def prompt(*parts: int) -> list[int]:
    """Returns text of the given lengths with an image between each two."""
    ids = text(parts[0], 1)
    for place, length in enumerate(parts[1:], start=2):
        ids += [image_token(), *text(length, place)]
    return ids


#: Name -> (ids, numbers of pictures).
CASES = {
    "middle": (prompt(9, 14), (0,)),
    "first": (prompt(0, 12), (1,)),
    "last": (prompt(12, 0), (2,)),
    "alone": (prompt(0, 0), (0,)),
    "two alone": (prompt(0, 0, 0), (2, 1)),
    "adjacent": (prompt(7, 0, 5), (0, 2)),
    "the same twice": (prompt(3, 4, 5), (1, 1)),
    "many": (prompt(5, 9, 0, 17, 2), (0, 1, 2, 0)),
    "none": (text(30), ()),
}


def pictures(numbers) -> list[np.ndarray]:
    """Returns pictures by number."""
    return [PICTURES[number] for number in numbers]


@cache
def alone(name: str, params: di.SamplingParams = SEEDED) -> di.RequestOutput:
    """Returns a case run alone: no prefix cache, no step in flight beside it."""
    ids, numbers = CASES[name]
    return run(lone_engine(), ids, params, images=pictures(numbers))


@cache
def lone_engine():
    """Returns the engine of `alone`."""
    return make_engine(replace(small_cache(), prefix_cache=False, async_depth=0))


@cache
def shared_engine():
    """Returns an engine that forgets prefixes between requests of no test."""
    return make_engine(small_cache())


def test_requests_together_are_each_alone():
    engine = make_engine(small_cache())
    requests = {
        name: engine.submit(ids, SEEDED, images=pictures(numbers))
        for name, (ids, numbers) in CASES.items()
    }
    engine.drain()
    for name, request in requests.items():
        assert_same(request.output(), alone(name))
        ids, numbers = CASES[name]
        tokens = sum(TOKENS[number] for number in numbers)
        assert len(request.prompt) == len(ids) - len(numbers) + tokens


def chunked(engine, before: int, name: str) -> di.RequestOutput:
    """Returns a case behind another prompt of `before` tokens in the same step."""
    ids, numbers = CASES[name]
    other = engine.submit(text(before, 7), replace(SEEDED, max_tokens=1)) if before else None
    request = engine.submit(ids, SEEDED, images=pictures(numbers))
    engine.drain()
    assert other is None or other.is_done
    return request.output()


@pytest.mark.parametrize("before", [30, 43, 44, 53, 54, 55, 63, 64])
def test_an_image_at_a_chunk_border_is_moved_whole(before):
    engine = make_engine(replace(small_cache(), prefix_cache=False))
    # the image has rows 9 to 19, and `before` of 64 rows are taken
    assert_same(chunked(engine, before, "middle"), alone("middle"))
    starts = {chunk for chunk in (STEP - before,) if 9 < chunk < 20}
    assert engine.stats().counters["steps"] >= 4 + bool(starts)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_chunk_offset(name):
    engine = make_engine(replace(small_cache(), prefix_cache=False))
    for before in range(STEP + 1):
        assert_same(chunked(engine, before, name), alone(name))


@pytest.mark.parametrize("restore", ["checkpoint", "halo"])
def test_a_prefix_hit_across_an_image(restore):
    ids = prompt(40, 0, 60)
    engine = make_engine(replace(small_cache(), prefix_restore=restore))
    images = pictures((2, 0))
    cold, warm = (run(engine, ids, SEEDED, images=images) for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 128)
    assert_same(warm, cold)
    assert_same(cold, run(lone_engine(), ids, SEEDED, images=images))
    # another picture of the same size: the same ids, and nothing from its rows on is reused
    other = [PICTURES[2] // 2, PICTURES[0]]
    found = run(engine, ids, SEEDED, images=other)
    assert found.cached_tokens <= 32
    assert_same(found, run(lone_engine(), ids, SEEDED, images=other))
    assert found.prompt_token_ids == cold.prompt_token_ids
    assert found.logprobs.tolist() != cold.logprobs.tolist()


def test_a_hit_that_ends_inside_an_image_runs_its_rest():
    engine = make_engine(replace(small_cache(), prefix_restore="halo"))
    ids = prompt(90, 0)  # rows 90 to 112 are the image's; a block ends at 112
    cold, warm = (run(engine, ids, SEEDED, images=[PICTURES[2]]) for _ in range(2))
    assert warm.cached_tokens == 112
    assert_same(warm, cold)


def test_preemption_encodes_again():
    engine = make_engine(small_cache())
    params = replace(SEEDED, max_tokens=60)
    requests = {
        name: engine.submit(CASES[name][0], params, images=pictures(CASES[name][1]))
        for name in ("many", "middle", "adjacent", "two alone")
    }
    engine.drain()
    assert engine.stats().counters.get("preemptions", 0) > 0
    for name, request in requests.items():
        assert_same(request.output(), alone(name, params))


def test_a_full_pool_makes_the_next_image_wait():
    engine = make_engine(replace(small_cache(), prefix_cache=False))
    engine.scheduler.images = ImagePool(24)  # one largest image
    assert_same(chunked(engine, 0, "many"), alone("many"))
    assert_same(chunked(engine, 0, "two alone"), alone("two alone"))
    engine.scheduler.images.check()


def test_completions_forks_and_snapshots_see_what_their_prompt_sees():
    engine, (ids, numbers) = make_engine(small_cache()), CASES["many"]
    both = run(engine, ids, replace(SEEDED, n=2), images=pictures(numbers))
    for child, one in enumerate(both.outputs):
        lone = replace(SEEDED, seed=child_seed(SEEDED.seed, child))
        assert_same(one, alone("many", lone))
    parent = engine.submit(ids, SEEDED, images=pictures(numbers))
    while parent.sequences[0].produced < 2:
        engine.step()
    saved = json.loads(json.dumps(engine.snapshot()))
    fork = finish(engine, engine.fork(parent.request_id, replace(SEEDED, max_tokens=2)))
    whole = finish(engine, parent)
    assert_same(whole, alone("many"))
    assert fork.prompt_token_ids == whole.prompt_token_ids + whole.token_ids[:2]
    (again,) = lone_engine().restore(saved)
    assert_same(finish(lone_engine(), again), whole)


def test_drafts_after_an_image_change_nothing():
    params = replace(SEEDED, max_tokens=30, logprobs=1)
    engine = make_engine(drafting(async_depth=1))
    names = ("last", "adjacent")
    truth = {
        alone(name, params).prompt_token_ids: mostly_right(
            alone(name, params).token_ids, model().config.vocab_size, 3
        )
        for name in names
    }
    force_drafts(engine, lambda one: truth[tuple(one.ids[: one.prompt_len].tolist())])
    requests = {
        name: engine.submit(CASES[name][0], params, images=pictures(CASES[name][1]))
        for name in names
    }
    engine.drain()
    assert sum(engine.stats().accepted) > 0
    for name, request in requests.items():
        assert_same(request.output(), alone(name, params))


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_replay_after_images_is_the_same_warm_and_cold(mode):
    runtime = replace(small_cache(), replay=mode, replay_keep_tokens=20)
    engine, ids = make_engine(runtime), prompt(40, 30, 0)
    given = {"images": pictures((2, 0))}  # the last image lies in the rows that are kept
    cold, warm = (run(engine, ids, SEEDED, **given) for _ in range(2))
    assert warm.cached_tokens > 0
    assert_same(warm, cold)
    if mode == "compact":
        masked = make_engine(replace(runtime, replay="mask"))
        assert_same(cold, run(masked, ids, SEEDED, **given))


@pytest.mark.slow
def test_the_drafts_after_an_image_are_those_of_the_pure_function():
    engine, loaded = make_engine(drafting(async_depth=0)), model()
    for name in ("last", "adjacent"):
        ids, numbers = CASES[name]
        greedy = replace(SEEDED, temperature=0)
        request = engine.submit(ids, greedy, images=pictures(numbers))
        while not (sequence := request.sequences[0]).produced:
            engine.step()
        made = engine.device._state.slots.drafting.token[sequence.slot]
        _, placed = di.LLM(loaded).read_prompt(ids, pictures(numbers))
        rows = encode_images(loaded.params, loaded.config, [one.pixels for one in placed])
        known = sequence.ids[: sequence.count].tolist()
        wanted = di.draft(loaded.params, loaded.config, known, rows)
        assert np.asarray(made).tolist() == np.asarray(wanted.token_ids).tolist()
        finish(engine, request)


def test_other_weights_encode_again():
    engine, (ids, numbers) = make_engine(small_cache()), CASES["middle"]
    seen, before = pictures(numbers), model().params
    assert_same(run(engine, ids, SEEDED, images=seen), alone("middle"))
    vision = before.vision.replace(image_start=2 * before.vision.image_start)
    engine.replace_params(before.replace(vision=vision))
    other = run(engine, ids, SEEDED, images=seen)
    assert other.logprobs.tolist() != alone("middle").logprobs.tolist()
    engine.replace_params(before)
    assert_same(run(engine, ids, SEEDED, images=seen), alone("middle"))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["float32", "checkpoint"])
def test_the_engine_has_the_bits_of_score(numerics):
    loaded = model(numerics)
    engine = make_engine(replace(small_cache(numerics), record="logits"), numerics=numerics)
    for ids, numbers in CASES.values():
        output = run(engine, ids, replace(SEEDED, max_tokens=1), images=pictures(numbers))
        _, placed = di.LLM(loaded).read_prompt(ids, pictures(numbers))
        rows = encode_images(loaded.params, loaded.config, [one.pixels for one in placed])
        logits = di.score(loaded.params, loaded.config, list(output.prompt_token_ids), rows)
        words = np.asarray(logit_hash_tile(logits[-1:]))[0]
        assert output.outputs[0].logit_hashes == (hash_text(words),)


def test_llm_takes_images_in_every_form_of_a_request():
    ids, numbers = CASES["adjacent"]
    seen, wanted = pictures(numbers), alone("adjacent")
    with di.LLM(model(), runtime=small_cache()) as llm:
        assert_same(llm.generate(ids, SEEDED, images=seen)[0], wanted)
        both = llm.generate([ids, CASES["none"][0]], SEEDED, images=[seen, ()])
        assert_same(both[0], wanted)
        assert_same(both[1], alone("none"))
        deltas = [delta.token_ids for delta in llm.stream(ids, SEEDED, images=seen)]
        assert sum(deltas, ()) == wanted.token_ids
        scores = llm.score(ids, images=seen)[0].logprobs
        assert len(scores) == len(wanted.prompt_token_ids) - 1
        written = llm.generate("some text", SEEDED, images=seen[:1])[0].prompt_token_ids
        first = int(written[0] == model().config.bos_token_id)
        assert written[first : first + TOKENS[0]] == (image_token(),) * TOKENS[0]
        assert list(written[first + TOKENS[0] :]) == llm.encode("some text")[first:]
        with pytest.raises(di.InputError, match="one sequence for each, got 1 for 2 prompts"):
            llm.generate([ids, ids], SEEDED, images=[seen])


def test_async_llm_takes_images():
    ids, numbers = CASES["middle"]

    async def ask():
        async with di.AsyncLLM(model(), runtime=small_cache()) as llm:
            whole = await llm.complete(ids, SEEDED, images=pictures(numbers))
            deltas = [d async for d in llm.generate(ids, SEEDED, images=pictures(numbers))]
            with pytest.raises(di.InputError, match="every image token"):
                llm.generate(ids, SEEDED)
            return whole, deltas

    whole, deltas = asyncio.run(ask())
    assert_same(whole, alone("middle"))
    assert sum((d.token_ids for d in deltas), ()) == whole.token_ids


def test_a_prompt_and_its_images_must_agree():
    engine = shared_engine()
    for ids, images, words in (
        ([5, image_token()], [], "every image token"),
        ([5, 6], [PICTURES[0]], "one image token"),
        ([image_token()] * 2, [PICTURES[0]], "one image token"),
        ([image_token()], [np.zeros((4, 4, 2), np.uint8)], "image"),
    ):
        with pytest.raises(di.InputError, match=words):
            engine.submit(ids, SEEDED, images=images)
    assert not engine.has_work


def test_the_pool_is_part_of_the_budget():
    capacity = make_engine(small_cache()).capacity
    assert capacity.image_bytes == STEP * model().config.hidden_size * 4
    assert capacity.total_bytes == small_cache().cache_bytes
    state = shared_engine().device._state
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((state.cache, state.images)))
    assert held == capacity.total_bytes
