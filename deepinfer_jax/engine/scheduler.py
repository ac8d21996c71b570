"""Which rows run next: continuous batching over slots and cache blocks (engine.md 2.6, 6.3).

Host integers only. `plan` uses what the host knows, which is up to `depth` steps late, and upper
bounds for the rest; `commit` takes the results in order. Sequences are served by rank (priority,
then arrival): decode rows first, then prompt chunks, then new admissions while slots and blocks
last. When a block is missing the sequence of the last rank gives up its own and is recomputed
later, so that the first always finishes.
"""

from bisect import insort
from collections import Counter

from deepinfer_jax.cache.block_cache import BlockCache
from deepinfer_jax.cache.capacity import admissible, blocks_for
from deepinfer_jax.cache.hit import Miss, checkpoint_positions, usable_hit
from deepinfer_jax.engine.commit import Taken, take_results
from deepinfer_jax.engine.draft_policy import DraftPolicy
from deepinfer_jax.engine.images import ImagePool, cuts_beside_images, image_chunk
from deepinfer_jax.engine.layout import PlanVectors
from deepinfer_jax.engine.packing import pack_plan
from deepinfer_jax.engine.plan import Chunk, Limits, StepPlan
from deepinfer_jax.engine.results import RoundResults
from deepinfer_jax.engine.runners import Runners, runners_of
from deepinfer_jax.engine.sequence import Phase, Sequence
from deepinfer_jax.errors import CacheError


class Scheduler:
    """Owns the queue, the slots and the blocks."""

    def __init__(self, limits: Limits, cache: BlockCache, policy: DraftPolicy) -> None:
        """Starts empty; `cache` has the blocks that the device state has."""
        self.limits = limits
        self.policy = policy
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []  # by rank
        self.free_slots = list(range(limits.layouts[-1].slots, 0, -1))
        self.images = ImagePool(limits.layouts[-1].image_rows)
        self.counters: Counter[str] = Counter()
        self._vectors = PlanVectors(limits.depth + 2)
        self._runners: Runners | None = None  # None: no longer those that decode
        self._generation = 0
        self._deltas: list[tuple[int, int, int]] = []

    # -- requests ---------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        sequence.phase = Phase.WAITING
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def end(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its blocks and its slot are free at once.

        Steps in flight run before any later plan on the device, so what they still write is
        overwritten by the next owner before it is read.
        """
        if sequence.phase is Phase.DONE:
            return
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is not Phase.COMPILING:
            self._give_up(sequence)
        sequence.phase = Phase.DONE

    def _give_up(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self._runners = None
        self.cache.release(sequence.blocks)
        slot = sequence.slot
        self.free_slots.append(slot)
        self._deltas = [entry for entry in self._deltas if entry[0] != slot]
        sequence.blocks = []
        sequence.slot = sequence.generation = 0
        sequence.computed = sequence.written = sequence.published = 0
        sequence.survivals = ()
        sequence.planned = sequence.produced
        if sequence.matcher is not None:
            sequence.matcher.drafts = ()

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up(sequence)
        sequence.preemptions += 1
        self.counters["preemptions"] += 1
        self.add(sequence)

    # -- planning ---------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Returns the next step, or None if nothing can run before a result is read."""
        plan = StepPlan(layout=self.limits.layouts[-1])
        self.images.begin_step()
        self._fork(plan)
        self._decode(plan)
        for sequence in list(self.active) if len(self.active) > len(plan.spans) else ():
            if sequence.phase is Phase.PREFILL:
                self._chunk(plan, sequence)
        self._admit(plan)
        if not plan.rows:
            return None
        self.counters["steps"] += 1
        self.policy.expect(self.active, self.waiting[: len(self.free_slots)])
        deltas, self._deltas = self._deltas, []
        pack_plan(plan, self._vectors, self.limits, self.policy, deltas)
        return plan

    def _decode(self, plan: StepPlan) -> None:
        """Plans a round of every running sequence, by rank. Kept lean: it runs once a token."""
        runners = self._runners = self._runners or runners_of(self.active, self.policy)
        idle, spans = set(), runners.spans()
        for place, sequence in enumerate(runners.sequences):
            last = sequence.computed + spans[place]
            goes_on = sequence.planned < sequence.room and sequence.slot  # 0: given up just now
            if goes_on and last > sequence.capacity:
                goes_on = self._grow(sequence, min(last, sequence.longest))
            if goes_on:
                sequence.computed = last
                sequence.planned += 1
            else:
                idle.add(place)
        if idle:
            runners = runners.without(idle)
            spans = [span for place, span in enumerate(spans) if place not in idle]
        plan.emits += runners.sequences
        plan.slots = runners.slots
        plan.generations += runners.generations
        plan.spans += spans
        plan.wants_logprobs = any(runners.wants_logprobs)
        plan.is_constrained = any(runners.has_grammar)
        plan.verify_rows, plan.makes_drafts = self.policy.rows(plan.emits, spans)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Gives the sequence blocks for so many tokens, taking them from the last rank if need be.

        Which may be its own: then it no longer runs. Returns whether it does.
        """
        while sequence.capacity < tokens:
            while (found := self.cache.allocate(1)) is None:
                victim = self.active[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
            self._deltas.append((sequence.slot, len(sequence.blocks), found[0]))
            sequence.blocks += found
            sequence.capacity += self.cache.block_tokens
        return True

    def _chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """Plans as many prompt rows of a sequence as the budget and its next cut allow."""
        start, end = sequence.computed, sequence.count
        cut = next((position for position in sequence.cuts if position > start), end)
        left = max(self.limits.budget - plan.rows, 0 if plan.chunks else 1)
        count = min(left, cut - start, end - start)
        if sequence.images and count > 0:
            count = image_chunk(self.images, plan, sequence, start, start + count) - start
        if count <= 0:
            return
        row, stop = plan.prompt_rows, start + count
        if sequence.scores_prompt:
            plan.scores_prompt |= sequence.output.needs_prompt_scores
        plan.prompt_rows += count
        sequence.computed = stop
        chunk = Chunk(sequence, sequence.generation, start, stop, row)
        plan.chunks.append(chunk)
        if stop in sequence.cuts:
            plan.checkpoints.append(chunk)
        if stop < end:
            return
        sequence.phase, self._runners = Phase.RUNNING, None
        if sequence.room > 0:
            plan.ends.append(row + count - 1)
            plan.emits.append(sequence)
            plan.generations.append(sequence.generation)
            plan.wants_logprobs |= sequence.params.logprobs is not None
            plan.is_constrained |= sequence.matcher is not None
            sequence.planned += 1

    def _admit(self, plan: StepPlan) -> None:
        """Starts waiting sequences in order of rank until something is missing."""
        for sequence in list(self.waiting):
            full = plan.rows >= self.limits.budget and plan.chunks
            if full or not self.free_slots:
                return
            if sequence.copies_soon:
                continue
            if not self._start(plan, sequence):
                return
            plan.admitted.append(sequence)
            self._chunk(plan, sequence)

    def _start(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Gives a waiting sequence its slot and the blocks of its tokens, or changes nothing."""
        cache, rule, size = self.cache, self.limits.rule, self.cache.block_tokens
        tokens = sequence.ids[: sequence.count]
        bypass = self._bypass(sequence)
        match = None if bypass else cache.match(sequence.root, tokens, images=sequence.spans)
        matched, held = (match.tokens, match.checkpoints) if match else (0, ())
        length, prompt = len(tokens), sequence.prompt_len
        hit = usable_hit(rule, length, matched, held, prompt=prompt, bypass=bypass)
        reused = match.blocks[: hit.length // size] if match else []
        need = blocks_for(length, size) - len(reused)
        if len(reused) + need > plan.layout.deltas - len(self._deltas):
            return False
        cache.acquire(reused)
        fits = admissible(
            available=cache.available,
            need=need,
            running=len(self.active),
            lookahead=(self.limits.depth + 1) * (plan.layout.drafts + 1),
            block_tokens=size,
            num_blocks=cache.num_blocks,
        )
        found = cache.allocate(need) if fits else None
        if found is None:
            cache.release(reused)
            return False
        cache.record(hit)
        first = max(0, hit.length - rule.recomputed_rows)
        leaves = cache.checkpoint(reused[-1]) if hit.length == first > 0 else None
        self._occupy(plan, sequence, reused + found, reused=hit.length, first=first)
        if leaves is not None:
            plan.before.append(("restore", (sequence.slot, hit.length, leaves)))
        sequence.published = len(reused)
        sequence.written = hit.length
        if sequence.cached is None:
            sequence.cached = hit.length
            sequence.output.cache_reason = None if hit.reason is None else str(hit.reason)
        if self.limits.prefix_cache and rule.restore == "checkpoint":
            cuts = checkpoint_positions(rule, prompt)
            cuts = cuts_beside_images(cuts, sequence.images, size) if sequence.images else cuts
            sequence.cuts = tuple(cut for cut in cuts if cut > hit.length)
        return True

    def _bypass(self, sequence: Sequence) -> Miss | None:
        if not self.limits.prefix_cache:
            return Miss.PREFIX_CACHE_OFF
        if sequence.params.bypass_prefix_cache:
            return Miss.BYPASS
        if sequence.output.needs_prompt_scores:
            return Miss.PROMPT_LOGPROBS
        return None

    def _occupy(
        self, plan: StepPlan, sequence: Sequence, blocks: list[int], *, reused: int, first: int
    ) -> None:
        self._generation += 1
        self.waiting.remove(sequence)
        insort(self.active, sequence, key=lambda s: s.rank)
        sequence.phase = Phase.PREFILL
        sequence.slot = self.free_slots.pop()
        sequence.generation = self._generation
        sequence.blocks = blocks
        sequence.capacity = len(blocks) * self.cache.block_tokens
        sequence.reused, sequence.first, sequence.computed = reused, first, first
        sequence.planned = sequence.produced
        sequence.cuts = ()
        self._deltas += [(sequence.slot, place, block) for place, block in enumerate(blocks)]
        if sequence.has_edits:
            plan.before.append(("edit", (sequence,)))

    def _fork(self, plan: StepPlan) -> None:
        """Starts children whose sibling has just computed the prompt from a copy of its rows.

        The copy is one token short: the last prompt row runs again and gives the child its own
        first token.
        """
        size = self.cache.block_tokens
        for child in [s for s in self.waiting if s.parent is not None]:
            parent, length = child.parent, child.prompt_len
            ready = parent is not None and parent.phase is Phase.RUNNING
            if parent is None or not ready or parent.computed != length or child.produced:
                continue
            shared = parent.blocks[: (length - 1) // size]
            fits = len(parent.blocks) <= plan.layout.deltas - len(self._deltas)
            if not self.free_slots or not fits:
                return
            found = self.cache.allocate(len(parent.blocks) - len(shared))
            if found is None:
                return
            self.cache.acquire(shared)
            self._occupy(plan, child, shared + found, reused=length - 1, first=length - 1)
            pairs = tuple(zip(parent.blocks[len(shared) :], found, strict=True))
            plan.before.append(("copy", (parent.slot, child.slot, pairs)))
            child.written = length - 1
            child.published = len(shared) if self.limits.prefix_cache else 0
            child.cached = length - 1
            plan.admitted.append(child)

    # -- results ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, results: RoundResults, seconds: float) -> Taken:
        """Takes the tokens of a step: they are part of their sequences, their rows are cached.

        results: of `plan.emits`, in order. seconds: of the step, from when the device was free for
        it. Publishes blocks that are full; before anything ends, since rows of a sequence that ends
        here are worth keeping too.
        """
        rounds = len(plan.spans)
        rows = plan.prompt_rows + results.rows(rounds)
        if rounds and self.policy.corrections is not None:
            context = sum(sequence.computed for sequence in plan.emits[:rounds]) / rounds
            self.policy.observe(rows, rounds, context, seconds, made_drafts=plan.makes_drafts)
        taken = take_results(plan, results, self.cache.block_tokens)
        for sequence in taken.full:
            self._publish(sequence)
        for chunk in plan.chunks:
            if chunk.sequence.generation == chunk.generation:
                chunk.sequence.written = max(chunk.sequence.written, chunk.stop)
                self._publish(chunk.sequence)
        step = self.limits.row_step
        self.counters["rows"] += rows
        self.counters["tile_rows"] += -(-rows // step) * step  # computed at level "batch"
        return taken

    def _publish(self, sequence: Sequence) -> None:
        """Shares the blocks of a sequence that are full by now."""
        first, full = sequence.published, sequence.written // self.cache.block_tokens
        if full <= first or not self.limits.prefix_cache or sequence.params.bypass_prefix_cache:
            return
        before = sequence.blocks[first:full]
        tokens = sequence.ids[: full * self.cache.block_tokens]
        blocks, images = sequence.blocks, sequence.spans
        after = self.cache.publish(sequence.root, tokens, blocks, first, full, images=images)
        for place, (old, new) in enumerate(zip(before, after, strict=True), start=first):
            if old != new:
                self._deltas.append((sequence.slot, place, new))
        sequence.blocks[first:full] = after
        sequence.published = full

    def check(self) -> None:
        """Checks the conservation of slots and blocks.

        Raises:
            CacheError: a slot or block is lost or used twice.
        """
        self.cache.check()
        self.images.check()
        used = sorted([s.slot for s in self.active] + self.free_slots)
        if used != list(range(1, self.limits.layouts[-1].slots + 1)):
            raise CacheError(f"every slot must be free or used once, they are {used}")
        held = Counter(block for sequence in self.active for block in sequence.blocks)
        if held != self.cache.references():
            raise CacheError("references to blocks must be those of active sequences")
