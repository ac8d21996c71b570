"""The engine: requests in, steps on the device, results out (engine.md 1.3, 2.6).

A thin host loop over a pure step function. `step` plans, dispatches, and reads the result of the
step `async_depth` steps ago: while the device works, the host prepares the next plan. One thread
plans and reads, another launches what it dispatches (`device`); given the same calls they do the
same things.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.cache.block_cache import BlockCache
from deepinfer_jax.cache.keys import root_key
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.determinism import require_level
from deepinfer_jax.engine.ascend_device import ascend_runtime
from deepinfer_jax.engine.book import RequestBook
from deepinfer_jax.engine.constraints import Constraints
from deepinfer_jax.engine.device import Flight, engine_device
from deepinfer_jax.engine.draft_policy import draft_policy
from deepinfer_jax.engine.drafting import plan_drafting
from deepinfer_jax.engine.expert_load import expert_balance
from deepinfer_jax.engine.layout import PlanLayout
from deepinfer_jax.engine.output import StreamDelta
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.profile import measured_corrections
from deepinfer_jax.engine.prompt import PromptImage, placed_images
from deepinfer_jax.engine.request import Request, request_factory
from deepinfer_jax.engine.results import round_results, take_scores
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.engine.sizes import engine_capacity, engine_limits
from deepinfer_jax.engine.snapshot import pack_request, unpack_request
from deepinfer_jax.engine.stats import DraftCounts, EngineStats, collect_stats
from deepinfer_jax.engine.tell import tell
from deepinfer_jax.engine.trace import Trace
from deepinfer_jax.engine.weights import engine_weights, require_same_form
from deepinfer_jax.errors import ConfigError, InputError
from deepinfer_jax.grammar.compiler import GrammarCompiler
from deepinfer_jax.grammar.masks import MaskRows
from deepinfer_jax.loading import Model
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.sampling.random import fresh_seed


class Engine:
    """Runs requests of one model. clock: seconds, for metrics and deadlines.

    Raises:
        ConfigError: an option the model cannot honour.
        CapacityError: the cache does not fit its budget.

    Examples:
        >>> di.Engine(model, di.RuntimeConfig(max_seqs=2, max_len=64)).has_work
        False
    """

    def __init__(
        self,
        model: Model,
        runtime: RuntimeConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocates the state; programs compile at `warm_up` or at the first step."""
        runtime = ascend_runtime(model.config, runtime or RuntimeConfig())
        self.model, self.runtime, self.clock = model, runtime, clock
        execution = replace(model.config.execution, replay=runtime.replay)
        self.config = replace(model.config, execution=execution)
        require_level(execution, runtime)
        self.max_len = runtime.longest(self.config)
        drafting = plan_drafting(model, runtime)
        size = drafting.size if drafting else 0
        # Before the cache, which takes a share of the memory that is free then.
        weights = engine_weights(self.config, model.params, runtime)
        self._experts = expert_balance(self.config, runtime, weights)
        self.capacity = engine_capacity(self.config, runtime, size)
        self._weights = self._numbers = 0
        self._flights: deque[Flight] = deque()
        self._last_read = 0.0
        self.counters: Counter[str] = Counter()
        self.trace = Trace(clock)
        limits = engine_limits(self.config, runtime, self.capacity, size)
        blocks = BlockCache(
            self.capacity.layout.num_blocks,
            block_tokens=runtime.block_tokens,
            checkpoint_bytes=runtime.checkpoint_bytes,
        )
        self.scheduler = Scheduler(
            limits, blocks, draft_policy(runtime, size, self.config, limits.layouts)
        )
        self._book = RequestBook(self.scheduler, self.counters, clock)
        self.drafts = DraftCounts(size)
        self._factory = request_factory(model, runtime, records=True)
        self.device = self._device = engine_device(
            self.config,
            weights,
            self.capacity.layout,
            stop_ids=runtime.max_stop_ids,
            drafting=drafting,
            alternatives=min(runtime.max_logprobs, self.config.vocab_size),
            hashes=runtime.record == "logits",
            image_rows=limits.layouts[-1].image_rows,
        )
        compiler = GrammarCompiler(
            model.tokenizer, self.config, seconds=float(runtime.grammar_seconds)
        )
        prepare = lambda: self._device.masked_work(self.layouts)  # noqa: E731
        self._constraints = Constraints(self._book, compiler, prepare, size, self.config.vocab_size)

    def submit(
        self,
        ids: Items[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        sink: Callable[[StreamDelta], None] | None = None,
        images: Items[Any] = (),
    ) -> Request:
        """Queues a request; `step` runs it.

        Args:
            ids: of the prompt, with one image token for each image.
            params: what is asked for.
            request_id: a name not in use; None takes the number of arrival.
            sink: called with what is new of every completion, as it is read.
            images: as `vision.image.read_image` takes them.

        Raises:
            InputError: it cannot be honoured.
            TokenizerError: it needs text and there is no tokenizer.
        """
        prompt = placed_images(self.config, ids, images)
        return self._enter(*prompt, params or SamplingParams(), request_id=request_id, sink=sink)

    def _enter(
        self,
        ids: Items[int],
        images: tuple[PromptImage, ...],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        sink: Callable[[StreamDelta], None] | None = None,
        seed: int | None = None,
        output_ids: Items[int] = (),
    ) -> Request:
        seed = params.seed if seed is None else seed
        name = self._book.name(request_id, self._numbers)
        options = (f"replay={self.runtime.replay}", f"keep={self.runtime.replay_keep_tokens}")
        request = self._factory.build(
            self._numbers,
            ids,
            params,
            request_id=name,
            root=root_key(
                self.config, weights=str(self._weights), salt=params.cache_salt, options=options
            ),
            seed=fresh_seed() if seed is None else seed,
            now=self.clock(),
            output_ids=output_ids,
            images=images,
        )
        self._numbers += 1
        request.sink = sink
        self._book.add(request)
        if params.grammar is None:
            self._queue(request)
        else:
            self._constraints.add(request)
        return request

    def _queue(self, request: Request) -> None:
        for sequence in request.sequences:
            self.scheduler.add(sequence)
            if sequence.room == 0 and not sequence.output.needs_prompt_scores:
                self._book.end(sequence, "length")

    def abort(self, request_id: str) -> bool:
        """Ends a request with reason "abort"; returns whether it was running or queued."""
        return self._book.abort(request_id)

    def abort_all(self) -> None:
        """Ends every request with reason "abort"."""
        for name in tuple(self._book.requests):
            self.abort(name)

    def check(
        self, ids: Items[int], params: SamplingParams, name: str = "", images: Items[Any] = ()
    ) -> None:
        """Raises InputError or TokenizerError for a request that `submit` would refuse.

        Waits until a grammar is compiled: GrammarError, if it cannot be.
        """
        self._factory.check(ids, params, name, images)
        if params.grammar is not None:
            self._constraints.check(params.grammar)

    def fork(
        self, request_id: str, params: SamplingParams, /, *, child: int = 0, **options: Any
    ) -> Request:
        """Queues a request that continues a running completion from where the host has read it.

        Its prompt is the prompt and the output so far. options: `request_id`, `sink`.

        Raises:
            InputError: no such request is running, or `params` cannot be honoured.
        """
        request = self._book.requests.get(request_id)
        if request is None or not 0 <= child < len(request.sequences):
            raise InputError(f"only a running completion can be forked, got {request_id!r}")
        parent = request.sequences[child]
        return self._enter(parent.ids[: parent.count].tolist(), parent.images, params, **options)

    @property
    def layouts(self) -> list[PlanLayout]:
        """Layouts of all steps that the engine can plan; each has a program."""
        return self.scheduler.policy.layouts(self.scheduler.limits.layouts)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight."""
        return bool(self._book.requests or self._flights)

    def step(self) -> list[Request]:
        """Plans and dispatches a step, reads what is due; returns the requests done now."""
        with jax.transfer_guard("disallow"):
            self._book.expire()
            if self._constraints.is_waiting:
                is_idle = not (self._flights or self.scheduler.active or self.scheduler.waiting)
                for request in self._constraints.admit(is_idle=is_idle):
                    self._queue(request)
            with self.trace.span("plan"):
                plan = self.scheduler.plan()
            if plan is not None:
                for sequence in plan.admitted:
                    request = self._book.owner[sequence]
                    request.admitted = request.admitted or self.clock()
                fill = partial(self._masks, plan) if plan.is_constrained else None
                options = {} if fill is None else {"fill": fill}
                if self._experts is not None:
                    self._experts.act(self._device)
                with self.trace.span("dispatch", rows=plan.rows, tokens=len(plan.emits)):
                    flight = self._device.dispatch(plan, self.clock(), **options)
                self._flights.append(flight)
            due = self.runtime.async_depth if plan is not None else len(self._flights) - 1
            while self._flights and len(self._flights) > max(due, 0):
                self._read(self._flights.popleft())
        if self.runtime.check:
            self.scheduler.check()
        return self._book.finished()

    def _masks(self, plan: StepPlan) -> MaskRows:
        """Returns the masks of a step whose network runs already, after all steps before it."""
        while self._flights:
            self._read(self._flights.popleft())
        with self.trace.span("mask"):
            return self._constraints.masks(plan)

    def drain(self) -> list[Request]:
        """Runs until nothing is left; returns all requests that finished."""
        done = []
        while self.has_work:
            done += self.step()
        return done

    def _read(self, flight: Flight) -> None:
        """Takes the result of a step; the only place where the host waits for the device."""
        plan = flight.plan
        with self.trace.span("wait"):
            result, windows = flight.read()
        with self.trace.span("commit"):
            now = self.clock()
            self._last_read, busy_since = now, max(self._last_read, flight.dispatched)
            if self._experts is not None:
                self._experts.add(result.load)
            if result.prompt is not None:
                take_scores(self._book.owner, plan.chunks, result.prompt)
            found = round_results(result.rounds, len(plan.emits))
            self.drafts.add(found, len(plan.spans))
            taken = self.scheduler.commit(plan, found, now - busy_since)
            for chunk, leaves in zip(plan.checkpoints, windows, strict=True):
                sequence = chunk.sequence
                if sequence.generation == chunk.generation:
                    block = sequence.blocks[chunk.stop // self.runtime.block_tokens - 1]
                    self.scheduler.cache.attach(block, leaves)
            told = tell(self._book, self._constraints, plan, taken.told, found, result, now)
            self.counters["tokens"] += taken.tokens + told
            for chunk in plan.chunks:
                sequence = chunk.sequence
                is_last = chunk.stop == sequence.prompt_len
                if sequence.room == 0 and is_last and sequence.generation == chunk.generation:
                    self._book.end(sequence, "length")

    def profile(self, folder: Path | None = None) -> str:
        """Measures what rows cost, for draft_policy="scheduled"; returns a note on their origin.

        folder: of a file that may hold it already; None is `speculative.cost.cache_folder()`.
        Unmeasured, the time is taken to grow with the rows.

        Raises:
            InputError: requests are running.
            ConfigError: nothing would read the figures.
        """
        if self.scheduler.policy.corrections is None:
            raise ConfigError('what rows cost matters to draft_policy="scheduled" with drafts only')
        self._settle("steps are measured")
        corrections, note = measured_corrections(
            self._device,
            self.scheduler.limits.layouts,
            source=self.model.source,
            max_len=self.max_len,
            folder=folder,
        )
        self.scheduler.policy.corrections = corrections
        return note

    def _settle(self, what: str) -> None:
        if self._book.requests:
            raise InputError(f"{what} between requests: drain or abort them first")
        self.drain()  # steps in flight, of requests that have ended

    def warm_up(self) -> dict[str, float]:
        """Compiles every program the engine can need; returns seconds by name.

        Those of requests with grammars only if `RuntimeConfig.warm_grammars`; the first such
        request waits for them otherwise, and no other does.
        """
        seconds = self._device.warm_up(self.layouts)
        if self.runtime.warm_grammars:
            begin = time.perf_counter()
            self._constraints.begin().result()
            seconds["compiling steps with grammars"] = time.perf_counter() - begin
        return seconds

    def replace_params(self, params: Any) -> None:
        """Uses other weights of the same shapes from the next step on; forgets all prefixes.

        Raises:
            InputError: a leaf differs in shape or dtype, requests are running, or this is a job of
                several processes.
        """
        self._settle("weights are replaced")
        require_same_form(self.model.params, params)
        self._device.params = engine_weights(self.config, params, self.runtime)
        if self._experts is not None:
            self._experts.reset()
        self.model = replace(self.model, params=params)
        self._factory = self._factory.with_weights(self.model)
        self._weights += 1
        self.scheduler.cache.clear()
        self.scheduler.images.clear()

    def snapshot(self) -> dict[str, Any]:
        """Returns every unfinished request as plain values: prompt, params, seed, output.

        `restore` continues them, here or in another process: with a seed and at "batch" the
        tokens are those of an uninterrupted run. Requests with n > 1 begin anew.
        """
        return {"requests": [pack_request(request) for request in self._book.requests.values()]}

    def restore(self, snapshot: dict[str, Any]) -> list[Request]:
        """Queues the requests of a snapshot.

        Raises:
            InputError: one cannot be honoured here; those before it are queued.
        """
        return [
            self._enter(found.ids, found.images, found.params, **found.options)
            for found in map(unpack_request, snapshot["requests"])
        ]

    def stats(self) -> EngineStats:
        """Returns counters and gauges as of now."""
        return collect_stats(
            self.scheduler,
            self.drafts,
            self.counters,
            len(self._flights),
            self._constraints.stats(),
            None if self._experts is None else self._experts.stats(),
        )
