"""Experts placed again while an engine serves: what it counts, when it decides, what it moves.

Steps return their rows by layer and expert with their results, so that nothing waits. A full window
is planned on a thread of its own; a fixed number of steps later, layer after layer is moved, one
between two steps. Given the same calls an engine moves the same experts at the same steps, and no
placement changes a bit at level "batch" (parallelism.md 4).
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.rebalance import layouts_of
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.model.step import Plan
from sharding.eplb.decide import Decision, decide_all
from sharding.eplb.load import LoadWindow
from sharding.eplb.score import imbalance
from sharding.mesh import mesh_sizes

#: Share of a window of steps that a decision has time for before the engine waits for it.
_PATIENCE = 4


@runtime_checkable
class MovesExperts(Protocol):
    """The part of a `Device` that is needed here."""

    def move_experts(self, layer: int, present: np.ndarray, layout: np.ndarray) -> None:
        """Places the experts of one layer again, between two steps."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStats:
    """How the experts' rows are shared out over the devices that share them.

    steps: in the window. imbalance: of each layer, the busiest device's rows over the mean device's
    in the window, under the placement in force; 1 is perfect. gain: mean over layers of what the
    last decision would have saved the busiest devices on steps it had not seen; None before the
    first. decisions: taken so far. placed_layers, moved_slots: placed again so far. waiting_layers:
    decided, not placed yet. is_deciding: a window is being planned.
    """

    steps: int
    imbalance: tuple[float, ...]
    gain: float | None
    decisions: int
    placed_layers: int
    moved_slots: int
    waiting_layers: int
    is_deciding: bool


class ExpertBalance:
    """Takes the load of every step, and places experts again where that pays."""

    def __init__(
        self, layouts: np.ndarray, *, experts: int, ranks: int, steps: int, gain: float
    ) -> None:
        """Begins with an empty window.

        Args:
            layouts: the expert of every slot, int32 [layers, slots].
            experts: of a layer.
            ranks: devices that share them.
            steps: of the window.
            gain: as `RuntimeConfig.rebalance_gain`.
        """
        self._first, self._ranks, self._gain = layouts, ranks, gain
        self._window = LoadWindow(steps, len(layouts), experts)
        self._delay = max(1, steps // _PATIENCE)
        self._decisions = self._placed = self._moved = 0
        self._last_gain: float | None = None
        self.reset()

    def reset(self) -> None:
        """Begins again, for new weights: they lie as at first."""
        self._layouts = self._first.copy()
        self._window.clear()
        self._deciding: Future[list[Decision]] | None = None
        self._left = 0  # recorded steps until the decision is needed
        self._queue: deque[tuple[int, np.ndarray]] = deque()

    def add(self, load: np.ndarray) -> None:
        """Takes the rows of a step by layer and expert, int32 [layers, experts], as it is read."""
        if not self._window.add(load):
            return
        if self._deciding is not None:
            self._left -= 1
        elif self._window.is_full and not self._queue:
            trace, layouts = self._window.trace(), self._layouts.copy()
            work = partial(decide_all, trace, layouts, self._ranks, threshold=self._gain)
            self._deciding, self._left = _on_a_thread(work), self._delay

    def act(self, device: MovesExperts) -> None:
        """Places the next layer, if one is due; before a step is dispatched."""
        if self._deciding is not None and self._left <= 0:
            found = self._deciding.result()
            self._deciding, self._decisions = None, self._decisions + 1
            self._last_gain = float(np.mean([one.gain for one in found]))
            self._queue.extend((i, one.layout) for i, one in enumerate(found) if one.moved)
            self._window.clear()
        if self._queue:
            layer, layout = self._queue.popleft()
            present = self._layouts[layer]
            device.move_experts(layer, present.copy(), layout)
            self._placed += 1
            self._moved += int((layout != present).sum())
            self._layouts[layer] = layout

    def stats(self) -> ExpertStats:
        """Returns the state as of now."""
        trace = self._window.trace()
        loads = [
            imbalance(trace[:, layer], layout, self._ranks)
            for layer, layout in enumerate(self._layouts)
        ]
        return ExpertStats(
            steps=len(self._window),
            imbalance=tuple(round(one, 4) for one in loads),
            gain=self._last_gain,
            decisions=self._decisions,
            placed_layers=self._placed,
            moved_slots=self._moved,
            waiting_layers=len(self._queue),
            is_deciding=self._deciding is not None,
        )


def _on_a_thread(work: Callable[[], Any]) -> Future[Any]:
    """Returns the future of `work()` on a thread that nobody has to end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever reads the future raises it
            future.set_exception(error)

    threading.Thread(target=run, name="deepinfer-experts", daemon=True).start()
    return future


def check_rebalancing(config: ModelConfig, runtime: RuntimeConfig) -> None:
    """Checks that experts can be placed again, if that is asked for.

    Raises:
        ConfigError: no devices share the experts, or the model is no V4.1.
    """
    if runtime.rebalance_steps is None:
        return
    mesh = config.execution.mesh
    if mesh is None or mesh_sizes(mesh).expert_parallel == 1:
        raise ConfigError(
            "RuntimeConfig.rebalance_steps places experts again on the devices that share them, "
            f"and here every device holds all, got {runtime.rebalance_steps}: load the model with "
            'mesh={"dp": n} or {"cp": n}, or leave it at None'
        )
    if config.model_type != "deepseek_v41":
        raise ConfigError(
            "RuntimeConfig.rebalance_steps is for models of type deepseek_v41, got "
            f"{runtime.rebalance_steps} for {config.model_type!r}: leave it at None"
        )


def expert_balance(
    config: ModelConfig, runtime: RuntimeConfig, weights: AnyParams
) -> ExpertBalance | None:
    """Returns what places experts again in an engine, None if `rebalance_steps` is None.

    weights: of the engine (`weights.engine_weights`).
    """
    if runtime.rebalance_steps is None:
        return None
    assert isinstance(weights, Params), "check_rebalancing"
    return ExpertBalance(
        layouts_of(weights.layers),
        experts=config.moe.n_routed_experts,
        ranks=mesh_sizes(config.execution.mesh).expert_parallel,
        steps=runtime.rebalance_steps,
        gain=runtime.rebalance_gain,
    )


def step_load(
    plan: Plan, expert_ids: Int[Array, "l t k"], config: ModelConfig
) -> Int[Array, "l e"]:
    """Returns the rows of a step by layer and expert, inside its program; padding is none.

    expert_ids: chosen by each row of the plan, as `model.step.step` collects them.
    """
    layers, rows = expert_ids.shape[:2]
    is_real = jnp.arange(rows) < plan.count
    if plan.valid is not None:
        is_real &= plan.valid
    experts = config.moe.n_routed_experts
    chosen = jnp.where(is_real[None, :, None], expert_ids, experts).reshape(layers, -1)
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None]
    return jnp.zeros((layers, experts), jnp.int32).at[layer, chosen].add(1, mode="drop")
