"""The adversarial matrix on the engine: tokens and log-probabilities of a lone run, bit by bit."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.drafting import plan_drafting
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.output import RequestOutput
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sizes import engine_capacity
from deepinfer_jax.invariance.network import Lab
from deepinfer_jax.invariance.observe import digest, first_difference
from deepinfer_jax.invariance.report import MOST_POSITIONS, CaseRow, Difference
from deepinfer_jax.invariance.schedule import Ids
from deepinfer_jax.invariance.watch import force_drafts, watch
from deepinfer_jax.sampling.params import SamplingParams
from pallas_kernels import core

SEQS = 4
OUTPUT = 24  # tokens of a request
ROWS = 24  # of a step: prompts are cut, and rounds with all drafts still fit
SPARE_BLOCKS = 3  # beside those of one longest sequence: few enough to preempt
Kind = tuple[Ids, SamplingParams]
Records = dict[int, bytes]  # position of the logits -> token, log-probability, alternatives


class EngineLab:
    """Engines that share one compiled step, requests, and their lone runs, kept."""

    def __init__(self, lab: Lab) -> None:
        """Makes no engine yet."""
        self.lab, self.model = lab, lab.model
        longest = min(lab.length + OUTPUT, lab.config.max_position_embeddings)
        base = RuntimeConfig(
            max_seqs=SEQS,
            max_tokens_per_step=ROWS,
            max_len=longest,
            block_tokens=lab.block,
            max_logprobs=4,
        )
        drafting = plan_drafting(self.model, base)
        self.drafts = drafting.size if drafting else 0
        sizes = engine_capacity(lab.config, base, self.drafts)
        self.blocks = sizes.layout.max_blocks + SPARE_BLOCKS
        budget = sizes.layout.num_slots * sizes.slot_bytes + sizes.image_bytes
        budget += (1 + self.blocks) * sizes.block_bytes  # the null block too
        self.base = replace(base, cache_bytes=budget)
        if self.drafts:
            self.base = replace(self.base, draft_policy="fixed", draft_length=self.drafts)
        # Of many cases, so that their lone runs are shared.
        kinds = self.requests(np.random.default_rng(lab.seed), 4)
        self.few = [(ids[: lab.block + 5 + place], one) for place, (ids, one) in enumerate(kinds)]
        self._lone: dict[str, RequestOutput] = {}
        self._engine: Engine | None = None

    def engine(self, **changes: Any) -> Engine:
        """Returns a new engine; changes: of its runtime."""
        return Engine(self.model, replace(self.base, **changes))

    def lone_engine(self) -> Engine:
        """Returns an engine of depth 0 that reuses nothing."""
        return self.engine(prefix_cache=False, async_depth=0)

    def alone(self, kind: Kind) -> RequestOutput:
        """Returns the result of a request alone, without drafts; kept."""
        key = repr(kind)
        if key not in self._lone:
            self._engine = self._engine or self.lone_engine()
            request = self._engine.submit(kind[0], replace(kind[1], max_draft=0))
            self._engine.drain()
            self._lone[key] = request.output()
        return self._lone[key]

    def requests(self, rng: np.random.Generator, count: int) -> list[Kind]:
        """Returns requests, greedy and sampled, whose prompts have beginnings in common."""
        found = []
        for number in range(count):
            ids = self.lab.sequences[number % 2]
            most = len(ids) - 2
            length = int(rng.integers(self.lab.block + 2, most))
            params = SamplingParams(
                temperature=(0.0, 1.0, 0.7)[number % 3],
                top_p=(1.0, 0.9)[number % 2],
                seed=int(rng.integers(2**63)),
                max_tokens=OUTPUT,
                ignore_eos=True,
                detokenize=False,
                logprobs=3,
                presence_penalty=(0.0, 0.0, 0.0, 0.5)[number % 4],
            )
            found.append((ids[:length], params))
        return found


def records(output: RequestOutput) -> Records:
    """Returns the bytes of everything reported of each output token, by its logits' position."""
    found, first = {}, len(output.prompt_token_ids) - 1
    assert output.logprobs is not None
    assert output.top_logprobs is not None
    for place, token in enumerate(output.token_ids):
        best = output.top_logprobs[place]
        words = [word for one, value in best for word in (one, np.float32(value))]
        found[first + place] = struct.pack(
            "<if" + "if" * len(best), token, output.logprobs[place], *words
        )
    return found


@dataclass(slots=True)
class Found:
    """What the runs of a case met so far."""

    runs: int = 0
    positions: int = 0
    wrong: list[int] = field(default_factory=list)
    first: Difference | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, **counts: int) -> None:
        """Adds to the counts that `CaseRow.detail` shows."""
        for name, number in counts.items():
            self.counts[name] = self.counts.get(name, 0) + number


@dataclass(frozen=True, slots=True)
class Setup:
    """One run: how the engine is made, the requests, whose drafts, one after the other or all."""

    detail: str
    runtime: dict[str, Any]
    kinds: list[Kind]
    drafts: str = "own"
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class EngineCase:
    """A case. setups: its runs; why_not: why there are none; meets: a count that may not be 0."""

    name: str
    setups: Callable[[EngineLab, np.random.Generator], Iterator[Setup]]
    why_not: Callable[[EngineLab], str | None] = lambda _: None
    meets: str = ""

    def run(
        self, lab: EngineLab, rng: np.random.Generator, runs: int | None, locates: bool
    ) -> CaseRow:
        """Returns the row of the case; runs: at most so many. locates: find layer and op."""
        reason = self.why_not(lab)
        if reason is not None:
            return CaseRow(name=self.name, skipped=reason)
        found = Found()
        for setup in self.setups(lab, rng):
            if runs is not None and found.runs == runs:
                break
            _run(lab, setup, found, locates)
        if self.meets and not found.wrong and not found.counts.get(self.meets):
            return CaseRow(name=self.name, skipped=f"these requests met no {self.meets}")
        counts = (f"{name} {number}" for name, number in found.counts.items())
        return CaseRow(
            name=self.name,
            runs=found.runs,
            positions=found.positions,
            differing=len(found.wrong),
            first=found.first,
            at=tuple(sorted(set(found.wrong))[:MOST_POSITIONS]),
            detail=", ".join(counts),
        )


def _run(lab: EngineLab, setup: Setup, found: Found, locates: bool) -> None:
    """Runs one setup and compares every request with its lone run."""
    lone = [lab.alone(kind) for kind in setup.kinds]
    engine, requests = _submitted(lab, setup, lone, None)
    stats = engine.stats()
    found.count(
        preemptions=stats.counters.get("preemptions", 0),
        hits=stats.cache.hits,
        accepted=int(sum(stats.accepted)),
        rejected=int(sum(stats.verified) - sum(stats.accepted)),
    )
    for place, (request, alone) in enumerate(zip(requests, lone, strict=True)):
        got, want = records(request.output()), records(alone)
        places = sorted(got.keys() | want.keys())
        wrong = [one for one in places if got.get(one) != want.get(one)]
        found.positions += len(places)
        found.wrong += wrong
        if wrong and found.first is None:
            where = {}
            if locates:
                where = _observed_difference(lab, setup, lone, place, wrong[0])
            found.first = _difference(setup, place, wrong[0], found.runs, got, want, where)
    found.runs += 1


def _submitted(
    lab: EngineLab, setup: Setup, lone: list[RequestOutput], watched: int | None
) -> tuple[Engine, Any]:
    """Returns (engine, its requests) after they ran; watched: returns observations of that one."""
    engine, requests, seen = lab.engine(**setup.runtime), [], {}
    for place, (ids, params) in enumerate(setup.kinds):
        requests.append(engine.submit(ids, params))
        if place == watched:
            seen = watch(engine, requests[-1].sequences[0])
        if setup.in_turn:
            _force(lab, setup, engine, requests[-1:], lone[place : place + 1])
            engine.drain()
    _force(lab, setup, engine, requests, lone)
    engine.drain()
    return engine, requests if watched is None else seen


def _force(
    lab: EngineLab,
    setup: Setup,
    engine: Engine,
    requests: list[Request],
    lone: list[RequestOutput],
) -> None:
    if setup.drafts == "own":
        return
    vocabulary, guesses = lab.lab.config.vocab_size, {}
    for request, alone in zip(requests, lone, strict=True):
        tokens = list(alone.token_ids)
        step = {"right": len(tokens) + 1, "wrong": 1, "mixed": 3}[setup.drafts]
        tokens[::step] = [(token + 1) % vocabulary for token in tokens[::step]]
        if setup.drafts == "right":
            tokens = list(alone.token_ids)
        guesses[request.sequences[0]] = tokens
    force_drafts(engine, guesses)


def _observed_difference(
    lab: EngineLab, setup: Setup, lone: list[RequestOutput], place: int, position: int
) -> dict[str, Any]:
    """Runs the case and the lone run again, observed up to the first position that differs."""
    ids, params = setup.kinds[place]
    alone = Setup(
        "alone",
        {"prefix_cache": False, "async_depth": 0},
        [(ids, replace(params, max_draft=0))],
    )
    sides = []
    for one, number in ((setup, place), (alone, 0)):
        seen = _submitted(lab, one, lone if one is setup else [lone[place]], number)[1]
        sides.append(
            {key: {p: v for p, v in rows.items() if p <= position} for key, rows in seen.items()}
        )
    return first_difference(lab.lab.config, *sides)


def _difference(
    setup: Setup,
    place: int,
    position: int,
    run: int,
    got: Records,
    want: Records,
    where: dict[str, Any],
) -> Difference:
    """Returns the difference; where: of `first_difference`, empty if that found or sought none."""
    outside = {
        "op": "token choice or log-probability",
        "op_position": position,
        "found": digest(got.get(position, b"")),
        "lone": digest(want.get(position, b"")),
    }
    detail = f"{setup.detail}, request {place}"
    return Difference(run=run, detail=detail, position=position, **(where or outside))


def _network(lab: EngineLab, rng: np.random.Generator, runs: int | None) -> CaseRow:
    """The lone engine against the lone call of the network: raw log-probabilities of its tokens."""
    compared, wrong, first = 0, [], None
    kinds = [kind for kind in lab.requests(rng, 12) if not kind[1].presence_penalty][: runs or 4]
    for run, kind in enumerate(kinds):
        ids, output = kind[0], lab.alone(kind)
        tokens = output.token_ids
        scores = lab.lab.lone((*ids, *tokens))[len(ids) - 1 : -1]
        expected = np.asarray(core.log_softmax(jnp.asarray(scores)))[
            np.arange(len(tokens)), list(tokens)
        ]
        assert output.logprobs is not None
        for place, (one, other) in enumerate(zip(output.logprobs, expected, strict=True)):
            is_greedy = kind[1].temperature == 0
            is_best = not is_greedy or tokens[place] == int(np.argmax(scores[place]))
            position, compared = len(ids) - 1 + place, compared + 1
            if np.float32(one).tobytes() != np.float32(other).tobytes() or not is_best:
                wrong.append(position)
                first = first or Difference(
                    run=run,
                    detail=f"prompt of {len(ids)}",
                    position=position,
                    op="log-probability or greedy token",
                    op_position=position,
                    found=digest(np.float32(one).tobytes()),
                    lone=digest(np.float32(other).tobytes()),
                )
    return CaseRow(
        name=ALONE,
        runs=len(kinds),
        positions=compared,
        differing=len(wrong),
        first=first,
        at=tuple(sorted(set(wrong))),
        detail="log-probabilities are those of the network in one call",
    )


def _together(lab: EngineLab, rng: np.random.Generator) -> Iterator[Setup]:
    for count in (2, 8):
        yield Setup(f"{count} requests", {}, lab.requests(rng, count))


def _depths(lab: EngineLab, rng: np.random.Generator) -> Iterator[Setup]:
    for depth in (0, 1, 2):
        yield Setup(f"depth {depth}", {"async_depth": depth}, lab.few)


def _budgets(lab: EngineLab, rng: np.random.Generator) -> Iterator[Setup]:
    for rows in (1, 7, 13):
        yield Setup(f"{rows} rows a step", {"max_tokens_per_step": rows}, lab.few)


def _hits(restore: str) -> Callable[[EngineLab, np.random.Generator], Iterator[Setup]]:
    def setups(lab: EngineLab, rng: np.random.Generator) -> Iterator[Setup]:
        kinds = lab.requests(rng, 3)
        kinds[0] = (lab.lab.sequences[0][:-2], kinds[0][1])  # as long as any: it is hit for sure
        again = [(ids, replace(params, seed=7)) for ids, params in kinds]
        yield Setup(restore, {"prefix_restore": restore}, kinds + again, in_turn=True)

    return setups


def _preemption(lab: EngineLab, rng: np.random.Generator) -> Iterator[Setup]:
    """Prompts that all find room, a block to spare each, and long outputs, which do not fit."""
    each = max(1, lab.blocks // SEQS - 1) * lab.lab.block - 2
    kinds = [
        ((lab.lab.sequences[2][place:] * 2)[:each], replace(params, max_tokens=2 * OUTPUT))
        for place, (_, params) in enumerate(lab.requests(rng, 6))
    ]
    # Without drafts first: with them a request may be done before the next one has begun.
    yield Setup("outputs outgrow the cache", {"draft_length": 0} if lab.drafts else {}, kinds)
    yield Setup("outputs outgrow the cache, depth 2", {"async_depth": 2}, kinds[1:5])


def _drafts(whose: str) -> Callable[[EngineLab, np.random.Generator], Iterator[Setup]]:
    def setups(lab: EngineLab, rng: np.random.Generator) -> Iterator[Setup]:
        for length in range(lab.drafts + 1):
            yield Setup(f"{length} drafts, {whose}", {"draft_length": length}, lab.few, whose)

    return setups


def _no_drafts(lab: EngineLab) -> str | None:
    return None if lab.drafts else "the model has no draft stages"


def _no_halo(lab: EngineLab) -> str | None:
    rows, longest = lab.lab.rule("off", "halo").recomputed_rows, lab.lab.length
    if rows + lab.lab.block < longest:
        return None
    return f"{rows} rows to rebuild are more than these prompts have"


ALONE = "engine: alone"


@dataclass(frozen=True, slots=True)
class _Alone(EngineCase):
    """The case that ties the engine's lone run to the network's."""

    def run(
        self, lab: EngineLab, rng: np.random.Generator, runs: int | None, locates: bool
    ) -> CaseRow:
        """Returns the row of the case; runs: requests. There is no layer to look for."""
        return _network(lab, rng, runs)


ENGINE_CASES: tuple[EngineCase, ...] = (
    _Alone(ALONE, _together),
    EngineCase("engine: together", _together),
    EngineCase("engine: async depth", _depths),
    EngineCase("engine: rows per step", _budgets),
    EngineCase("engine: prefix hit, checkpoint", _hits("checkpoint"), meets="hits"),
    EngineCase("engine: prefix hit, halo", _hits("halo"), _no_halo, meets="hits"),
    EngineCase("engine: preemption", _preemption, meets="preemptions"),
    EngineCase("engine: own drafts", _drafts("own"), _no_drafts),
    EngineCase("engine: right drafts", _drafts("right"), _no_drafts),
    EngineCase("engine: wrong drafts", _drafts("wrong"), _no_drafts),
    EngineCase("engine: mixed drafts", _drafts("mixed"), _no_drafts),
)
