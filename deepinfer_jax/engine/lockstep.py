"""One engine over several processes: the first plans, the others run what it dispatches.

All processes hold a part of the mesh and run the same programs in the same order; what the first
does to its device goes to the others as numbered messages, before it does it (parallelism.md 6.3,
engine.md 2.6). Results are the same on all, and only the first reads them.
"""

import pickle
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from deepinfer_jax.engine.device import Device, Flight
from deepinfer_jax.engine.layout import PlanLayout
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.errors import ConfigError, InputError
from deepinfer_jax.grammar.masks import MaskRows
from deepinfer_jax.model.vision.patches import EncoderSize
from sharding.processes import Channel, run_or_end


class _JobDevice(Device):
    """What the parts share: arrays that every process makes from its own copy of the values."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Allocates this process's part of the state.

        Raises:
            ConfigError: the model lies on the devices of this process alone.
        """
        params = arguments[1] if len(arguments) > 1 else options["params"]
        if params.embed.sharding.is_fully_addressable:
            raise ConfigError(
                "in a job of several processes a model lies on the devices of all of them: load it "
                'with mesh={"dp": n}, n being jax.device_count()'
            )
        self.channel = Channel("engine")
        super().__init__(*arguments, **options)

    def _put(self, tree: Any) -> Any:
        # device_put to the whole mesh would compare the values of all processes, and wait for them
        def one(value: Any) -> jax.Array:
            array = np.asarray(value)
            parts = [jax.device_put(array, d) for d in self._place.addressable_devices]
            return jax.make_array_from_single_device_arrays(array.shape, self._place, parts)

        return jax.tree.map(one, tree)

    def _make(self, build: Callable[[], Any]) -> Any:
        return jax.jit(build, out_shardings=self._place)()


@dataclass(frozen=True, slots=True)
class _JobFlight(Flight):
    """A step of a job; number: of the last message before it was read."""

    number: int

    def read(self) -> tuple[StepResult, list[dict[str, np.ndarray]]]:
        """Waits; ends this process if the step fails, as `FollowingDevice.follow` does."""
        return run_or_end(partial(Flight.read, self), lambda: self.number)


class LeadingDevice(_JobDevice):
    """The part of the first process: whatever it does, the others are told."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Allocates this process's part of the state."""
        super().__init__(*arguments, **options)
        self._one_by_one = threading.Lock()

    def _send(self, action: str, *arguments: Any) -> None:
        self.channel.send(pickle.dumps((action, arguments)))

    def dispatch(
        self, plan: StepPlan, now: float = 0.0, fill: Callable[[], MaskRows] | None = None
    ) -> Flight:
        """Starts a step everywhere; as `Device.dispatch`.

        Raises:
            ConfigError: a request has a grammar, whose masks do not travel.
        """
        if fill is not None:
            raise ConfigError("grammars run in one process; this engine runs over several")
        before, plan.before = plan.before, []
        for action, arguments in before:
            getattr(self, action)(*arguments)
        saved = [(chunk.sequence.slot, chunk.stop) for chunk in plan.checkpoints]
        self._send("run", plan.layout, np.asarray(plan.vector), saved)
        flight = super().dispatch(plan, now)
        plan.before = before
        return _JobFlight(plan, now, flight.launched, self.channel.step)

    def compile(self, layout: PlanLayout) -> Any:
        """Returns the step of a layout when every process has compiled it."""
        with self._one_by_one:
            self._send("compile", layout)
            program = super().compile(layout)
            self.channel.meet()
        return program

    def restore(self, slot: int, length: int, leaves: dict[str, np.ndarray]) -> None:
        """Puts saved window state into a slot, everywhere."""
        self._send("restore", slot, length, leaves)
        super().restore(slot, length, leaves)

    def copy(self, source: int, target: int, blocks: Items[tuple[int, int]]) -> None:
        """Copies a slot and some blocks, everywhere."""
        self._send("copy", source, target, list(blocks))
        super().copy(source, target, blocks)

    def _encode(
        self, size: EncoderSize, patches: np.ndarray, grid: tuple[int, int], rows: np.ndarray
    ) -> None:
        self._send("_encode", size, patches, grid, rows)
        super()._encode(size, patches, grid, rows)

    def _mark(self, slot: int, rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        self._send("_mark", slot, rows)
        super()._mark(slot, rows)

    def move_experts(self, layer: int, present: np.ndarray, layout: np.ndarray) -> None:
        """Places one layer's experts again, everywhere between the same two steps."""
        self._send("move_experts", layer, present, layout)
        super().move_experts(layer, present, layout)

    def compile_moves(self) -> None:
        """Compiles whatever `move_experts` can need, everywhere."""
        self._send("compile_moves")
        super().compile_moves()

    def close(self) -> None:
        """Lets the other processes go on after `follow`."""
        self._send("end")


class FollowingDevice(_JobDevice):
    """The part of any other process: does what it is told."""

    def dispatch(
        self, plan: StepPlan, now: float = 0.0, fill: Callable[[], MaskRows] | None = None
    ) -> Flight:
        """Raises InputError: requests go to the first process."""
        raise InputError(
            f"process {jax.process_index()} of {jax.process_count()} takes no requests: give them "
            "to process 0, and call `follow` here"
        )

    def compile(self, layout: PlanLayout) -> Any:
        """Returns the step of a layout when every process has compiled it."""
        program = super().compile(layout)
        self.channel.meet()
        return program

    def follow(self) -> None:
        """Runs what the first process dispatches, until it closes its engine.

        If that process is lost, or a step fails, this one ends with code `LOST_PEER`.
        """
        run_or_end(self._follow, lambda: self.channel.step)

    def _follow(self) -> None:
        while True:
            action, arguments = pickle.loads(self.channel.receive())
            if action == "end":
                return
            if action == "run":
                self._run(*arguments)
            else:
                getattr(self, action)(*arguments)

    def _run(self, layout: Any, vector: np.ndarray, saved: list[tuple[int, int]]) -> None:
        flight = super().dispatch(StepPlan(layout=layout, vector=vector))
        flight.launched.result()  # raises what kept the step from being launched
        for slot, stop in saved:  # the same programs in the same order, results unread
            self._save(slot, stop)
