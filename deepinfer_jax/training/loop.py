"""The training loop: seeded batches, log, saved states, stop by steps or by seconds.

A batch is a function of (seed, step) alone, so a resumed run needs no state of an iterator.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError, InputError
from deepinfer_jax.pictures import new_picture, save_picture
from deepinfer_jax.training.data import BatchAt
from deepinfer_jax.training.state import (
    OptimiserSettings,
    TrainState,
    compiled_step,
    newest_state,
    remove_old,
    restore_state,
    save_state,
    settings_record,
)

Report = Callable[[int, dict[str, float]], None]
# A batch begins with ids and weights; a step may have it hold more.
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def saved_run(folder: Path, resume: bool) -> Path | None:
    """Returns the newest saved state of a folder, or None without one.

    Raises:
        ConfigError: There is one, and the run does not resume.
    """
    saved = newest_state(folder)
    if saved is not None and not resume:
        raise ConfigError(f"{folder} holds saved states: add --resume, or choose another folder")
    return saved


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """When to stop, save and log. At least one of `steps` and `seconds` bounds the run.

    `steps` counts from the first step of the whole training, resumed parts included; `seconds`
    counts this run, without compilation of the step.
    """

    steps: int | None = None
    seconds: float | None = None
    save_every: int = 500
    keep: int = 2
    log_every: int = 10


def resume(
    folder: Path, state: TrainState, notes: Mapping[str, Any] | None = None
) -> tuple[TrainState, dict[str, Any] | None]:
    """Returns the newest saved state of a folder and its record; `state` and None without one.

    Raises:
        ConfigError: The saved run had other options than `notes`.
    """
    saved = newest_state(folder)
    if saved is None:
        return state, None
    notes = notes or {}
    found = json.loads((saved / "record.json").read_text())  # first: the arrays may not fit
    changed = {name: found.get(name) for name in notes if found.get(name) != notes[name]}
    if changed:
        raise ConfigError(f"--resume continues with the same options: the run had {changed}")
    return restore_state(saved, state)


def train(
    state: TrainState,
    config: ModelConfig,
    batch_at: BatchAt,
    settings: OptimiserSettings,
    loop: LoopSettings,
    *,
    devices: int = 1,
    folder: Path | None = None,
    record: dict[str, Any] | None = None,
    report: Report | None = None,
) -> TrainState:
    """Returns the state after the run. The given state is consumed.

    Args:
        state: Where to begin; `resume` finds a saved one.
        config: The model.
        batch_at: Batch of a step, the same at every call.
        settings: Optimiser and loss.
        loop: When to stop, save and log.
        devices: How many devices share a batch.
        folder: Where `log.jsonl` and saved states go; None keeps nothing.
        record: Added to the record of every saved state (seeds, data).
        report: Called with (finished steps, metrics) whenever metrics are logged.

    Raises:
        ConfigError: Nothing bounds the run, or there are fewer devices.
        InputError: The loss is not finite; the newest saved state is from before.
    """
    notes = settings_record(settings) | (record or {})
    run = compiled_step(config, settings, devices)
    return run_steps(state, run, batch_at, loop, folder=folder, record=notes, report=report)


def run_steps(
    state: TrainState,
    run: Step,
    batch_at: Callable[[int], Any],
    loop: LoopSettings,
    *,
    folder: Path | None = None,
    record: dict[str, Any] | None = None,
    report: Report | None = None,
) -> TrainState:
    """Returns the state after steps of `run`, which takes over the state that it is given.

    The loop of `train`, for any step that returns metrics with a `loss`; arguments as there.

    Raises:
        ConfigError: Nothing bounds the run.
        InputError: The loss is not finite; the newest saved state is from before.
    """
    if loop.steps is None and loop.seconds is None:
        raise ConfigError("a training run needs an end: give steps or seconds")
    begin = int(state.step)
    last = loop.steps if loop.steps is not None else 2**31 - 1
    if begin >= last:
        return state
    step, compile_s, started, values = begin, 0.0, time.perf_counter(), {}
    batch, ended = _on_device(batch_at(step)), False
    while not ended:
        state, metrics = run(state, batch)
        step += 1
        if step == begin + 1:
            jax.block_until_ready(metrics)
            compile_s, started = time.perf_counter() - started, time.perf_counter()
        is_logged = step == begin + 1 or step % loop.log_every == 0 or step >= last
        if step < last:
            batch = _on_device(batch_at(step))  # while the device works
        if is_logged:
            values = {name: float(value) for name, value in metrics.items()}  # waits for the device
        elapsed = time.perf_counter() - started
        ended = step >= last or (loop.seconds is not None and elapsed >= loop.seconds)
        if is_logged:
            timed = (step - begin - 1) * batch[0].size  # the first step waited for the compiler
            values |= {"step": step, "tokens": (step - begin) * batch[0].size, "seconds": elapsed}
            values |= {"compile_seconds": compile_s, "tokens_per_second": timed / elapsed}
            _log(folder, values)
            if report is not None:
                report(step, values)
            if not np.isfinite(values["loss"]):
                raise InputError(
                    f"the loss must stay finite, it is {values['loss']} after step {step}: lower "
                    "the learning rate and resume from the newest saved state"
                )
        if folder is not None and (step % loop.save_every == 0 or ended):
            save_state(folder, state, {**(record or {}), "step": step})
            remove_old(folder, loop.keep)
    return state


def plot_log(folder: Path) -> Path:
    """Writes `loss.png` from `log.jsonl` and returns its path.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    figure, axis = new_picture((7.0, 4.0))
    for name in ("token_loss", "index_loss"):
        axis.plot([line["step"] for line in lines], [line[name] for line in lines], label=name)
    axis.set(xlabel="step", ylabel="nats", yscale="log")
    axis.legend()
    save_picture(figure, folder / "loss.png")
    return folder / "loss.png"


def _on_device(batch: Any) -> Any:
    """Returns (ids, weights) and whatever a step's batch has beside them."""
    ids, weights, *others = batch
    return (
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(weights, jnp.float32),
        *map(jnp.asarray, others),
    )


def _log(folder: Path | None, values: dict[str, float]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.jsonl", "a") as file:
        file.write(json.dumps(values) + "\n")
