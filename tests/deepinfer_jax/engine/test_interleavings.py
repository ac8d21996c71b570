"""Model check of the host side: every interleaving of submit, step and abort, and what must hold.

Laws 1, 5 and 7 of engine.md 0 on two slots, three requests of at most 4 tokens (6 with drafts) and
the smallest cache; `FakeDevice` catches a row that reads what is not its own.
"""

from collections import Counter

import pytest

from deepinfer_jax.engine.sequence import Phase
from deepinfer_jax.sampling.params import SamplingParams
from tests.deepinfer_jax.engine.fake_device import END, expected, logprob_of
from tests.deepinfer_jax.engine.small_engine import small_engines

pytestmark = pytest.mark.accept(5)

#: (prompt, most tokens, n): two share a block, one of them has a sibling; the third must grow.
REQUESTS = (((3, 4, 5), 1, 1), ((3, 4, 6), 1, 2), ((6,), 3, 1))
#: The same for rounds of several tokens.
LONGER = (((3, 4, 5), 3, 1), ((3, 4, 6), 3, 2), ((21,), 5, 1))
DRAFTS = 3
MOST_STEPS = 60
#: 13 is among the drafts that are accepted in LONGER.
STOPS = (40, 13)


class Case:
    """One word of actions on one engine, and what it finished."""

    def __init__(self, engine, kinds) -> None:
        self.engine, self.kinds, self.requests, self.aborted = engine, kinds, [], set()
        self.ended: list[str] = []

    def legal(self) -> list[str]:
        """Returns the actions that do something now."""
        words = ["submit"] if len(self.requests) < len(self.kinds) else []
        words += ["step"] if self.engine.has_work else []
        live = [r.request_id for r in self.requests if not r.is_done]
        return words + [f"abort {name}" for name in live]

    def act(self, word: str) -> None:
        """Does one action and checks conservation, and upper bounds that must be exact by now."""
        if word == "submit":
            prompt, most, n = self.kinds[len(self.requests)]
            params = SamplingParams(
                temperature=0, max_tokens=most, n=n, stop_token_ids=STOPS, logprobs=0
            )
            self.requests.append(self.engine.submit(prompt, params))
        elif word == "step":
            self.ended += [r.request_id for r in self.engine.step()]
        else:
            name = word.removeprefix("abort ")
            assert self.engine.abort(name)
            self.aborted.add(name)
        scheduler = self.engine.scheduler
        scheduler.check()
        if not self.engine.stats().in_flight:
            for one in scheduler.active:
                is_running = one.phase is Phase.RUNNING
                known = (one.count - 1, one.produced) if is_running else (one.computed, one.planned)
                assert (one.computed, one.planned) == known

    def finish(self) -> None:
        """Runs to the end and checks every request."""
        steps = 0
        while self.engine.has_work:
            self.act("step")
            steps += 1
            assert steps < MOST_STEPS, "no progress"
        assert sorted(self.ended) == sorted(r.request_id for r in self.requests)
        for request in self.requests:
            whole = expected(request.prompt, request.params.max_tokens, (*STOPS, END))
            usual = "length" if len(whole) == request.params.max_tokens else "stop"
            for one in request.output().outputs:
                assert one.logprobs.tolist() == [logprob_of(token) for token in one.token_ids]
                if request.request_id in self.aborted and one.finish_reason == "abort":
                    assert one.token_ids == whole[: len(one.token_ids)]
                else:
                    assert (one.finish_reason, one.token_ids) == (usual, whole)
        stats = self.engine.stats()
        assert (stats.waiting, stats.running, stats.in_flight) == (0, 0, 0)
        assert stats.cache.free + stats.cache.kept == stats.blocks


def explore(make, depth: int, kinds=REQUESTS) -> Counter[str]:
    """Runs every word of `depth` actions to its end; returns how many, and what they met."""
    words, met = [()], Counter()
    while words:
        word = words.pop()
        case = Case(make(), kinds)
        for action in word:
            case.act(action)
        longer = case.legal() if len(word) < depth else []
        words += [(*word, action) for action in longer]
        if longer:
            continue
        case.finish()
        stats = case.engine.stats()
        met["words"] += 1
        met["preemptions"] += stats.counters.get("preemptions", 0)
        met["evictions"] += stats.cache.evictions
        met["hits"] += stats.cache.hits
        met += case.engine._device.counts
    return met


@pytest.mark.parametrize(
    ("async_depth", "length"), [(0, 5), (1, 5), (2, 5), pytest.param(1, 6, marks=pytest.mark.slow)]
)
def test_every_interleaving_conserves_and_finishes(monkeypatch, async_depth, length):
    make = small_engines(monkeypatch, slots=2, blocks=2, max_len=4, async_depth=async_depth)
    met = explore(make, depth=length)
    assert met["words"] > 50
    assert min(met["evictions"], met["hits"]) > 0


SCHEDULED = {"draft_policy": "scheduled", "draft_length": None}


@pytest.mark.parametrize(("async_depth", "policy"), [(0, {}), (1, {}), (1, SCHEDULED), (2, {})])
def test_every_interleaving_of_rounds_conserves_and_finishes(monkeypatch, async_depth, policy):
    options = {"slots": 2, "blocks": 3, "max_len": 6, "drafts": DRAFTS, **policy}
    met = explore(small_engines(monkeypatch, async_depth=async_depth, **options), 5, LONGER)
    assert met["words"] > 50
    assert min(met["evictions"], met["hits"]) > 0
    assert met["verified"] > met["accepted"] > met["stopped"] > 0


@pytest.mark.parametrize(
    ("drafts", "async_depth", "blocks"), [(0, 1, 3), (DRAFTS, 0, 4), (DRAFTS, 1, 6)]
)
def test_preemption_is_met_and_recovered_from(monkeypatch, drafts, async_depth, blocks):
    most = 2 * (blocks - 2)
    kinds = [(prompt, most, 1) for prompt in ((4, 5), (3, 7))]
    options = {"max_len": 2 + most, "drafts": drafts, "async_depth": async_depth}
    met = explore(small_engines(monkeypatch, slots=2, blocks=blocks, **options), 6, kinds)
    assert met["preemptions"] > 0


@pytest.mark.parametrize(("drafts", "kinds"), [(0, REQUESTS), (DRAFTS, LONGER)])
def test_without_a_prefix_cache_nothing_is_shared(monkeypatch, drafts, kinds):
    options = {"blocks": 3, "max_len": 6, "drafts": drafts, "prefix_cache": False}
    met = explore(small_engines(monkeypatch, slots=2, **options), 5, kinds)
    assert (met["hits"], met["evictions"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("async_depth", [0, 1, 2])
@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_every_long_interleaving_conserves_and_finishes(monkeypatch, async_depth, blocks):
    make = small_engines(monkeypatch, slots=2, blocks=blocks, max_len=4, async_depth=async_depth)
    met = explore(make, depth=9)
    print(f"depth {async_depth}, {blocks} blocks: {dict(met)}")
    if async_depth:
        assert met["words"] > 1000
    else:  # nothing is in flight: fewer states, of which longer words reach few more
        assert met["words"] == {2: 736, 3: 736, 4: 648}[blocks]


@pytest.mark.slow
@pytest.mark.accept(6)
@pytest.mark.parametrize("async_depth", [0, 1, 2])
@pytest.mark.parametrize("blocks", [3, 4, 5])
def test_every_long_interleaving_of_rounds_conserves_and_finishes(monkeypatch, async_depth, blocks):
    options = {"slots": 2, "blocks": blocks, "max_len": 6, "drafts": DRAFTS}
    make = small_engines(monkeypatch, async_depth=async_depth, **options)
    met = explore(make, 8, LONGER)
    print(f"depth {async_depth}, {blocks} blocks, {DRAFTS} drafts: {dict(met)}")
    assert met["words"] > 500
    assert met["verified"] > met["accepted"] > met["stopped"] > 0
