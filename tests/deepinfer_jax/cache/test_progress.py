"""Admission and preemption by the cache's arithmetic always finish every request (engine.md 6.3).

A small scheduler: admit in order while `admissible`, grow each running request block by block,
preempt the latest arrival when nothing is left. It stands for the engine's own.
"""

import random
from dataclasses import dataclass, field

import pytest

from deepinfer_jax.cache.block_cache import BlockCache
from deepinfer_jax.cache.capacity import admissible, blocks_for

pytestmark = pytest.mark.accept(5)
BLOCK = 4
MAX_LEN = 40
LONGEST = blocks_for(MAX_LEN, BLOCK)
ROOT = bytes(16)


@dataclass
class Request:
    """`tokens` is what it will have at its end, `done` what it has now."""

    arrival: int
    tokens: list[int]
    prompt: int
    done: int = 0
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    preempted: int = 0


def admit(cache, request, running, num_blocks, lookahead):
    resumed = max(request.done, request.prompt)
    match = cache.match(ROOT, request.tokens[:resumed])
    reused = match.blocks[: (resumed - 1) // BLOCK]
    cache.acquire(reused)
    need = blocks_for(resumed, BLOCK) - len(reused)
    if not admissible(
        available=cache.available,
        need=need,
        running=len(running),
        lookahead=lookahead,
        block_tokens=BLOCK,
        num_blocks=num_blocks,
    ):
        cache.release(reused)
        return False
    request.blocks = reused + cache.allocate(need)
    request.published, request.done = len(reused), resumed
    running.append(request)
    return True


def preempt(cache, running, waiting):
    victim = max(running, key=lambda r: r.arrival)
    running.remove(victim)
    cache.release(victim.blocks)
    victim.blocks, victim.preempted = [], victim.preempted + 1
    waiting.insert(0, victim)
    return victim


def advance(cache, request, running, waiting, step):
    """Adds `step` tokens; returns False if the request itself was preempted for room."""
    request.done = min(request.done + step, len(request.tokens))
    while len(request.blocks) < blocks_for(request.done, BLOCK):
        got = cache.allocate(1)
        if got is not None:
            request.blocks += got
        elif preempt(cache, running, waiting) is request:
            return False
    last = request.done // BLOCK
    first, request.published = request.published, last
    request.blocks[first:last] = cache.publish(ROOT, request.tokens, request.blocks, first, last)
    return True


def simulate(seed, blocks, draft):
    """Runs 30 requests to their end; returns how often one was preempted."""
    rng = random.Random(seed)
    cache = BlockCache(blocks + 1, block_tokens=BLOCK, checkpoint_bytes=0)
    waiting = []
    for arrival in range(30):
        length = rng.randint(2, MAX_LEN)
        tokens = rng.choices((0, 1), (9, 1), k=length)
        waiting.append(Request(arrival, tokens, rng.randint(1, length - 1)))
    everyone, running, rounds = list(waiting), [], 0
    while waiting or running:
        rounds += 1
        assert rounds < 3000, "no progress"
        waiting.sort(key=lambda r: r.arrival)
        while waiting and admit(cache, waiting[0], running, blocks + 1, 2 * (draft + 1)):
            waiting.pop(0)
        assert running, "everyone waits although nothing runs"
        for request in sorted(running, key=lambda r: r.arrival):
            if request not in running:
                continue  # preempted by an older one in this round
            step = rng.randint(1, draft + 1)
            if advance(cache, request, running, waiting, step) and request.done == len(
                request.tokens
            ):
                running.remove(request)
                cache.release(request.blocks)
        cache.check()
    assert cache.stats().referenced == 0
    assert all(request.done == len(request.tokens) for request in everyone)
    return sum(request.preempted for request in everyone)


@pytest.mark.parametrize("draft", [0, 5])
@pytest.mark.parametrize("blocks", [LONGEST, LONGEST + 1, 2 * LONGEST])
def test_everyone_finishes(blocks, draft):
    preempted = sum(simulate(seed, blocks, draft) for seed in range(5))
    print(f"{blocks} blocks, draft {draft}: {preempted} preemptions")
    assert preempted > 0


def test_a_large_pool_preempts_nobody():
    assert simulate(0, 40 * LONGEST, 5) == 0
