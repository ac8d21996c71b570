"""Random traces of requests, aborts and forks, run on an engine and compared with lone runs."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.request import Request
from tests.e2e.lab import alone, assert_same, lone_children, same_floats

MOST_STEPS = 4000
IMAGE = 502
Kind = tuple[tuple[int, ...], di.SamplingParams]


def growing_pool(seed: int, size: int) -> list[Kind]:
    """Returns requests whose outputs outgrow the small cache: they preempt each other."""
    rng = random.Random(seed)
    pool = []
    for _ in range(size):
        ids = tuple(rng.randrange(3, 500) for _ in range(rng.randint(30, 60)))
        params = di.SamplingParams(
            temperature=rng.choice([0, 1]),
            seed=rng.getrandbits(64),
            max_tokens=40,
            ignore_eos=True,
            logprobs=rng.choice([None, 1]),
            priority=rng.choice([0, 0, 1]),
        )
        pool.append((ids, params))
    return pool


def request_pool(seed: int, size: int) -> list[Kind]:
    """Returns prompts, many with a common beginning, and parameters of every kind."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, 500) for _ in range(200)] for _ in range(3)]
    pool = []
    for _ in range(size):
        length = rng.choice([rng.randint(1, 60), rng.randint(40, 80), rng.randint(1, 200)])
        shared = rng.randint(0, length) if rng.random() < 0.6 else 0
        ids = rng.choice(stems)[:shared]
        ids = ids + [rng.randrange(3, 500) for _ in range(length - shared)]
        pool.append((tuple(ids), _params(rng)))
    return pool


def _params(rng: random.Random) -> di.SamplingParams:
    most = rng.choice([0, 1, rng.randint(2, 12), rng.randint(25, 40), rng.randint(25, 40)])
    options = {
        "stop_token_ids": lambda: tuple(rng.sample(range(3, 500), 8)),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.5, 2),
        "logit_bias": lambda: {rng.randrange(500): rng.choice([-100, 4.5]) for _ in range(9)},
        "allowed_token_ids": lambda: tuple(rng.sample(range(500), 60)),
        "min_tokens": lambda: rng.randint(0, most),
        "logprobs": lambda: rng.randint(0, 3),
        "prompt_logprobs": lambda: rng.randint(0, 2),
        "top_p": lambda: 0.8,
        "top_k": lambda: 40,
        "n": lambda: rng.randint(2, 4),
        "ignore_eos": lambda: True,
        "logprobs_mode": lambda: "processed",
        "bypass_prefix_cache": lambda: True,
        "cache_salt": lambda: "other",
    }
    chosen = [name for name in options if rng.random() < 0.2]
    return di.SamplingParams(
        temperature=rng.choice([0, 1]),
        seed=rng.getrandbits(64),
        max_tokens=most,
        priority=rng.choice([0, 0, 0, 1, -1]),
        **{name: options[name]() for name in chosen},
    )


@dataclass
class TraceRun:
    """A trace while it runs. `aborted`: names; `done`: names in the order they ended."""

    engine: Engine
    rng: random.Random
    requests: dict[str, Request] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)

    def submit(self, kind: Kind) -> None:
        """Queues a request under the next name."""
        name = f"r{len(self.requests)}"
        self.requests[name] = self.engine.submit(list(kind[0]), kind[1], request_id=name)

    def abort_one(self) -> None:
        """Aborts a live request."""
        name = self.rng.choice(sorted(self.live()))
        assert self.engine.abort(name)
        self.aborted.add(name)

    def fork_one(self, params: di.SamplingParams) -> None:
        """Continues a live completion as a request of its own."""
        live = self.live()
        name = self.rng.choice(sorted(live))
        parent = live[name].sequences[0]
        has_image = IMAGE in parent.ids[: parent.count]  # emitted, and refused in a prompt
        if parent.count + params.max_tokens <= 250 and not has_image:
            new = f"f{len(self.requests)}"
            self.requests[new] = self.engine.fork(name, params, request_id=new)

    def step(self) -> None:
        """One engine step; with `RuntimeConfig.check` it checks conservation."""
        self.done += [request.request_id for request in self.engine.step()]

    def live(self) -> dict[str, Request]:
        """Returns the unfinished requests."""
        return {name: r for name, r in self.requests.items() if not r.is_done}


def run_trace(engine: Engine, pool: list[Kind], seed: int, count: int) -> Counter[str]:
    """Runs `count` requests of the pool with random arrivals, aborts and forks, and checks them.

    Returns:
        what the trace met: requests, aborts, forks, preemptions, evictions, hits, steps.
    """
    rng = random.Random(seed)
    run = TraceRun(engine, rng)
    waiting = [rng.choice(pool) for _ in range(count)]
    steps = 0
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.4:
            run.submit(waiting.pop())
        if run.live() and rng.random() < 0.03:
            run.abort_one()
        if run.live() and rng.random() < 0.03:
            run.fork_one(replace(rng.choice(pool)[1], n=1, prompt_logprobs=None))
        run.step()
        steps += 1
        assert steps < MOST_STEPS, "no progress"
    _check(run)
    stats = engine.stats()
    return Counter(
        requests=len(run.requests),
        aborts=len(run.aborted),
        forks=sum(name.startswith("f") for name in run.requests),
        steps=steps,
        preemptions=stats.counters.get("preemptions", 0),
        evictions=stats.cache.evictions,
        hits=stats.cache.hits,
    )


def _check(run: TraceRun) -> None:
    """Every request ended once, for the right reason, with the bits of a lone run."""
    assert sorted(run.done) == sorted(run.requests)
    stats = run.engine.stats()
    assert (stats.waiting, stats.running, stats.in_flight) == (0, 0, 0)
    assert stats.cache.referenced == 0
    for name, request in run.requests.items():
        output, params = request.output(), request.params
        for found, lone in zip(output.outputs, lone_children(request.prompt, params), strict=True):
            if found.finish_reason == "abort":
                assert name in run.aborted
                count = len(found.token_ids)
                assert found.token_ids == lone.token_ids[:count]
                assert lone.logprobs is None or same_floats(found.logprobs, lone.logprobs[:count])
            else:
                assert_same(found, lone)
        if name not in run.aborted:
            whole = alone(request.prompt, replace(params, n=1))
            assert same_floats(output.prompt_logprobs, whole.prompt_logprobs)
            assert output.prompt_top_logprobs == whole.prompt_top_logprobs
            if params.max_tokens or params.prompt_logprobs is not None:
                assert (output.cached_tokens == 0) == (output.metrics.cache_reason is not None)
