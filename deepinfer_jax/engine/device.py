"""The device side of the engine as the host sees it: parameters, state, and what is dispatched.

Every call returns at once; results are futures. The state is donated to each program in turn.
Launching a step's kernels takes the host milliseconds on a GPU, so that steps are launched by a
thread of their own, in order; whatever else uses the state waits for them to be launched.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.engine.drafting import Drafting
from deepinfer_jax.engine.images import empty_pool, put_rows
from deepinfer_jax.engine.layout import PlanLayout, blank
from deepinfer_jax.engine.marks import edit_rows
from deepinfer_jax.engine.masked import (
    mask_sizes,
    mask_table,
    padded,
    run_network,
    run_tokens,
    table_rows,
)
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.program import MaskTable, StepResult, run_step
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.slots import EngineState, init_slots, null_marks, set_marks_program
from deepinfer_jax.grammar.masks import MaskRows, blank_masks
from deepinfer_jax.model.rebalance import compile_moves, place_layer
from deepinfer_jax.model.registry import AnyParams, network_of
from deepinfer_jax.model.slots import copy_block, copy_slot, put_checkpoint, take_checkpoint
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.model.vision.encode import encode_program
from deepinfer_jax.model.vision.patches import (
    EncoderSize,
    encoder_sizes,
    grid_of,
    padded_patches,
    size_for,
    vision_of,
)

Windows = dict[str, jax.Array]
Launched = tuple[StepResult, list[Windows]]


@dataclass(frozen=True, slots=True)
class Flight:
    """A dispatched step: its plan and what it will return once it is launched.

    dispatched: when, by the engine's clock. launched: result, and saved windows of
    `plan.checkpoints`.
    """

    plan: StepPlan
    dispatched: float
    launched: Future[Launched]

    def read(self) -> tuple[StepResult, list[dict[str, np.ndarray]]]:
        """Waits; returns (result, windows) on the host, None for what the plan does not want."""
        plan, (result, windows) = self.plan, self.launched.result()
        wanted = replace(
            result,
            chosen=result.chosen if plan.wants_logprobs else None,
            prompt=result.prompt if plan.scores_prompt else None,
        )
        return jax.device_get((wanted, windows))


def flown(plan: StepPlan, dispatched: float, result: StepResult, windows: list[Windows]) -> Flight:
    """Returns the flight of a step that has been launched already."""
    launched: Future[Launched] = Future()
    launched.set_result((result, windows))
    return Flight(plan, dispatched, launched)


class Device:
    """Owns the engine's state on the device.

    drafting: how drafts are made, or None. alternatives: k of log-probabilities. hashes: whether
    steps return hashes of logits. image_rows: of encoded images.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: AnyParams,
        cache: CacheLayout,
        *,
        stop_ids: int,
        drafting: Drafting | None,
        alternatives: int,
        hashes: bool,
        image_rows: int = 0,
    ) -> None:
        """Allocates the state beside the parameters."""
        self.config, self.alternatives, self.drafting = config, alternatives, drafting
        self.hashes = hashes
        self._place = params.embed.sharding
        self._programs: dict[PlanLayout, Any] = {}
        self._masked: dict[PlanLayout, tuple[Any, Any]] = {}  # network and tokens
        self._launcher = ThreadPoolExecutor(1, "deepinfer-launch")
        self._last: Future[Launched] | None = None

        def empty() -> EngineState:
            return EngineState(
                cache=network_of(config).init_cache(config, cache),
                slots=init_slots(
                    cache.num_slots,
                    config.vocab_size,
                    stop_ids,
                    drafts=drafting.size if drafting else 0,
                    keeps_q=config.execution.determinism != "batch",
                ),
                images=empty_pool(config, image_rows),
            )

        # Where the parameters are: a state that moves after its first step would compile twice.
        self._state = self._make(empty)
        self.params = params

    @property
    def params(self) -> AnyParams:
        """Parameters of the model."""
        return jax.tree.unflatten(self._trees[0], self._params)

    @params.setter
    def params(self, params: AnyParams) -> None:
        leaves, tree = jax.tree.flatten(params)
        self._params = tuple(leaves)
        self._vision = getattr(params, "vision", None)
        self._trees = (tree, self._tree)

    @property
    def _leaves(self) -> tuple[jax.Array, ...]:
        if self._last is not None:
            self._last.result()
        return self._held  # of the launching thread, until it has nothing left to launch

    @property
    def _state(self) -> EngineState:
        return jax.tree.unflatten(self._tree, self._leaves)

    @_state.setter
    def _state(self, state: EngineState) -> None:
        leaves, self._tree = jax.tree.flatten(state)
        self._held = tuple(leaves)

    def dispatch(
        self, plan: StepPlan, now: float = 0.0, fill: Callable[[], MaskRows] | None = None
    ) -> Flight:
        """Starts a step at time `now`, after what it needs; nothing waits.

        fill: of a step with grammars, which `masked_work` has prepared: gives its masks while the
            network runs.
        """
        for action, arguments in plan.before:
            getattr(self, action)(*arguments)
        saved = [(chunk.sequence.slot, chunk.stop) for chunk in plan.checkpoints]
        if fill is not None:
            return flown(plan, now, *self._results(plan, self._run_masked(plan, fill), saved))
        run = self._programs.get(plan.layout) or self.compile(plan.layout)
        self._last = self._launcher.submit(self._launch, run, plan, saved)
        return Flight(plan, now, self._last)

    def _launch(self, run: Any, plan: StepPlan, saved: Items[tuple[int, int]]) -> Launched:
        """Starts a step; on the launching thread."""
        with jax.transfer_guard("disallow"):
            # The one transfer of a step to the device; device_put would take five times as long.
            with jax.transfer_guard_host_to_device("allow"):
                self._held, result = run(self._params, self._held, plan.vector)
            return self._results(plan, result, saved)

    def _results(
        self, plan: StepPlan, result: StepResult, saved: Items[tuple[int, int]]
    ) -> Launched:
        """Returns a step's result and the windows it saves, on their way to the host."""
        wanted = jax.tree.leaves((result.rounds, result.hashes, result.drafts, result.load))
        wanted += jax.tree.leaves(result.chosen) if plan.wants_logprobs else []
        wanted += jax.tree.leaves(result.prompt) if plan.scores_prompt else []
        cache = jax.tree.unflatten(self._tree, self._held).cache if saved else None
        windows = [self._take(cache, *chunk) for chunk in saved]
        wanted += jax.tree.leaves(windows)
        # The one transfer to the host, begun here and read when the step is due. A CPU device has
        # nothing to copy, a GPU counts a copy that is not a `device_get` as implicit.
        with jax.transfer_guard_device_to_host("allow"):
            for leaf in wanted:
                leaf.copy_to_host_async()
        return result, windows

    def _run_masked(self, plan: StepPlan, fill: Callable[[], MaskRows]) -> StepResult:
        network, tokens = self._masked[plan.layout]
        with jax.transfer_guard_host_to_device("allow"):
            self._held, rows = network(self._params, self._leaves, plan.vector)
        masks = self._mask_table(plan.layout, fill())
        with jax.transfer_guard_host_to_device("allow"):
            self._held, result = tokens(self._params, self._held, plan.vector, rows, masks)
        return result

    def _mask_table(self, layout: PlanLayout, found: MaskRows) -> MaskTable:
        rows = self._put(padded(layout, found))
        return mask_table(*rows, rows=table_rows(layout))

    def masked_work(self, layouts: Items[PlanLayout]) -> Callable[[], None]:
        """Returns what compiles the programs of steps with grammars; another thread may run it."""

        def shape(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        return partial(
            self._compile_masked,
            tuple(layouts),
            *jax.tree.map(shape, (self._params, self._leaves)),
        )

    def _compile_masked(self, layouts: Items[PlanLayout], params: Any, leaves: Any) -> None:
        width = -(-self.config.vocab_size // 32)
        options = {"trees": self._trees, "config": self.config, "alternatives": self.alternatives}

        def placed(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

        networks: dict[PlanLayout, tuple[Any, Any]] = {}  # with and without drafting the same
        for layout in layouts:
            same, vector = replace(layout, makes_drafts=None), placed(layout.size)
            if same not in networks:
                lowered = run_network.lower(params, leaves, vector, **options, layout=same)
                networks[same] = lowered.out_info[1], lowered.compile()
            shapes, network = networks[same]
            rows = jax.tree.map(lambda x: placed(*x.shape, dtype=x.dtype), shapes)
            size = table_rows(layout)
            masks = MaskTable(words=placed(size, width), forced=placed(size, layout.drafts))
            tokens = run_tokens.lower(
                params,
                leaves,
                vector,
                rows,
                masks,
                **options,
                layout=layout,
                drafting=self.drafting,
                hashes=self.hashes,
            )
            for size in mask_sizes(layout):
                self._mask_table(layout, blank_masks(size, width, layout.drafts))
            self._masked[layout] = network, tokens.compile()

    def wait(self) -> None:
        """Returns when everything dispatched is done."""
        jax.block_until_ready(self._leaves)

    def compile(self, layout: PlanLayout) -> Any:
        """Returns the step of a layout, compiled ahead: its call does not hash the config."""
        vector = jax.ShapeDtypeStruct((layout.size,), np.int32, sharding=self._place)
        lowered = run_step.lower(
            self._params,
            self._leaves,
            vector,
            trees=self._trees,
            config=self.config,
            layout=layout,
            alternatives=self.alternatives,
            drafting=self.drafting,
            hashes=self.hashes,
        )
        self._programs[layout] = lowered.compile()
        return self._programs[layout]

    def restore(self, slot: int, length: int, leaves: dict[str, np.ndarray]) -> None:
        """Puts the window state that was saved after `length` tokens into a slot."""
        words, leaves = self._words(slot, length), self._put(leaves)
        cache = put_checkpoint(self.config, self._state.cache, *words, leaves)
        self._state = replace(self._state, cache=cache)

    def copy(self, source: int, target: int, blocks: Items[tuple[int, int]]) -> None:
        """Copies a slot and some blocks: (source, target) pairs."""
        cache = copy_slot(self._state.cache, *self._words(source, target))
        for pair in blocks:
            cache = copy_block(cache, *self._words(*pair))
        self._state = replace(self._state, cache=cache)

    def encode(self, pixels: np.ndarray, rows: np.ndarray) -> None:
        """Encodes an image into rows of the pool: a canvas, and a place for each of its tokens."""
        grid = grid_of(self.config, pixels)
        size = size_for(self.config, grid)
        self._encode(
            size, padded_patches(self.config, pixels, size), (grid.rows, grid.columns), rows
        )

    def _encode(
        self, size: EncoderSize, patches: np.ndarray, grid: tuple[int, int], rows: np.ndarray
    ) -> None:
        assert self._state.images is not None, "an engine without images encodes none"
        beyond = self._state.images.shape[0]
        target = np.full(size.tokens, beyond, np.int32)
        target[: len(rows)] = rows
        patches, sides, target = self._put((patches, np.asarray(grid, np.int32), target))
        found = encode_program(self._vision, patches, sides, config=self.config, tokens=size.tokens)
        self._state = replace(self._state, images=put_rows(self._state.images, found, target))

    def edit(self, sequence: Sequence) -> None:
        """Writes the logit edits of a sequence that is about to start."""
        self._mark(sequence.slot, edit_rows(sequence, self.config.vocab_size))

    def warm_up(self, layouts: Items[PlanLayout]) -> dict[str, float]:
        """Compiles every program, steps side by side; returns seconds by name.

        Then runs each: steps without rows, and the null slot, which nothing reads.
        """
        begin = time.perf_counter()
        missing = [layout for layout in layouts if layout not in self._programs]
        with ThreadPoolExecutor(len(layouts)) as pool:
            list(pool.map(self.compile, missing))
        seconds = {"compiling steps": time.perf_counter() - begin}
        for layout in layouts:
            begin = time.perf_counter()
            flight = self.dispatch(StepPlan(layout=layout, vector=blank(layout)[0]))
            jax.block_until_ready(flight.launched.result())
            seconds[f"step of {layout.rows} rows"] = time.perf_counter() - begin
        sizes = encoder_sizes(self.config) if self._state.images is not None else ()
        for size in sizes:
            begin = time.perf_counter()
            width = 3 * vision_of(self.config).patch_size ** 2
            patches = np.zeros((size.patches, width), np.uint8)
            self._encode(size, patches, (1, 1), np.zeros(0, np.int32))
            jax.block_until_ready(self._state.images)
            seconds[f"images of {size.patches} patches"] = time.perf_counter() - begin
        begin = time.perf_counter()
        self.restore(0, 0, jax.device_get(self._save(0, 0)))
        self.copy(0, 0, [(0, 0)])
        self._mark(0, null_marks(self.config.vocab_size))
        jax.block_until_ready(self._state)
        if layouts[0].counts_experts:
            self.compile_moves()
        seconds["windows, copies and edits"] = time.perf_counter() - begin
        return seconds

    def _mark(self, slot: int, rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        words, rows = self._words(slot), self._put(rows)
        slots = set_marks_program(self._state.slots, *words, *rows)
        self._state = replace(self._state, slots=slots)

    def _save(self, slot: int, length: int) -> Windows:
        return self._take(self._state.cache, slot, length)

    def _take(self, cache: Any, slot: int, length: int) -> Windows:
        return take_checkpoint(self.config, cache, *self._words(slot, length))

    def _words(self, *values: int) -> Any:
        return self._put(tuple(np.int32(value) for value in values))

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._place)

    def _make(self, build: Callable[[], Any]) -> Any:
        return jax.device_put(build(), self._place)

    def move_experts(self, layer: int, present: np.ndarray, layout: np.ndarray) -> None:
        """Places one layer's experts, which lie as `present` says, as `layout` does (EPLB)."""
        if self._last is not None:
            self._last.result()  # launched: the experts are donated
        with jax.transfer_guard_host_to_device("allow"):
            self.params = place_layer(self.params, self.config, layer, present, layout)

    def compile_moves(self) -> None:
        """Compiles whatever `move_experts` can need."""
        self.params = compile_moves(self.params, self.config)

    def close(self) -> None:
        """Ends the launching thread, which has nothing left to do."""
        self._launcher.shutdown()


def engine_device(config: ModelConfig, *arguments: Any, **options: Any) -> Any:
    """Returns the device of an engine; in a job of several processes, this process's part of it.

    A `Device`, or what takes its place.
    """
    if config.execution.on_ascend:
        from deepinfer_jax.engine.ascend_device import AscendDevice

        return AscendDevice(config, *arguments, **options)
    if jax.process_count() == 1:
        return Device(config, *arguments, **options)
    from deepinfer_jax.engine.lockstep import FollowingDevice, LeadingDevice

    part = LeadingDevice if jax.process_index() == 0 else FollowingDevice
    return part(config, *arguments, **options)
