"""Training state, optimiser and the training step: pure functions of what they are given.

Optax and Orbax are imported at first use.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.checkpoint.orbax_store import read_arrays, write_arrays
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError
from deepinfer_jax.model.params import Leaf, Params
from deepinfer_jax.training.losses import LossSettings, balanced_bias, total_loss

Batch = tuple[Any, Any]  # ids int32 [b, t], weights float32 [b, t]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimiserSettings:
    """AdamW with a linear warm-up and a cosine down to `final_fraction` of the peak.

    `steps` is the length of the schedule; beyond it the rate stays at its floor.
    """

    steps: int
    peak_rate: float = 2e-3
    warmup_steps: int = 100
    final_fraction: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    # Of the routers' selection biases. A short training has no time for the paper's 1e-3: scores
    # differ by tenths.
    bias_rate: float = 1e-2
    loss: Any = field(default_factory=LossSettings)  # or `draft_loss.DraftLossSettings`, or None


@struct.dataclass
class TrainState:
    """Master parameters (float32) of what is trained, optimiser state, number of finished steps."""

    params: Leaf  # Params, or DraftParams
    optimiser: Any
    step: Leaf  # int32 []


def learning_rate(settings: OptimiserSettings) -> Callable[[Any], Any]:
    """Returns the learning rate as a function of the step."""
    import optax

    warmup = min(settings.warmup_steps, max(1, settings.steps // 2))
    return optax.warmup_cosine_decay_schedule(
        init_value=settings.peak_rate / max(1, warmup),
        peak_value=settings.peak_rate,
        warmup_steps=warmup,
        decay_steps=max(settings.steps, warmup + 1),
        end_value=settings.peak_rate * settings.final_fraction,
    )


def optimiser(settings: OptimiserSettings) -> Any:
    """Returns the gradient transformation: clipping by the global norm, then AdamW."""
    import optax

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            learning_rate(settings),
            b1=settings.beta1,
            b2=settings.beta2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=decays,
        ),
    )


def decays(params: Any) -> Any:
    """Returns which leaves decay: matrices of the backbone, or of draft stages on their own.

    Norms, sinks, residual mixing, router biases and looked-up tables do not; draft stages within a
    backbone get no gradient and stay as they are.
    """
    kept = (
        "norm",
        "sink",
        "hc_",
        "bias",
        "tables",
        "q_weight",
        "k_weight",
        ".draft",
        "embed",
        "readout",
        "image_",
    )

    def is_decayed(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path)
        return not any(part in name for part in kept)

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def initial_state(params: Any, settings: OptimiserSettings) -> TrainState:
    """Returns the state before the first step; the optimiser starts from zero moments.

    It holds copies: every step takes its arrays over, and the giver keeps its own.
    """
    params = jax.tree.map(lambda leaf: leaf.copy(), params)
    return TrainState(params=params, optimiser=optimiser(settings).init(params), step=jnp.int32(0))


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    config: ModelConfig,
    settings: OptimiserSettings,
    axis: str | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns (state after one step, metrics as scalars). Pure; `compiled_step` jits it.

    Gradients of the loss at the stored values go to the master parameters (straight through), the
    routers' biases follow the load of this batch (that of images is a copy, made on export).
    axis: the mesh axis over whose devices the batch is split; the state is the same on all.
    """
    ids, weights = batch

    def loss(params: Params) -> tuple[Array, dict[str, Array]]:
        return total_loss(params, config, ids, weights, settings.loss, axis=axis)

    state, load, metrics = descend(state, loss, settings, axis=axis)
    layers = state.params.layers
    bias = balanced_bias(layers.gate_bias, load, settings.bias_rate)
    params = replace(state.params, layers=replace(layers, gate_bias=bias))
    return replace(state, params=params), metrics


def descend(
    state: TrainState,
    loss: Callable[[Any], tuple[Array, dict[str, Array]]],
    settings: OptimiserSettings,
    *,
    axis: str | None = None,
) -> tuple[TrainState, Array, dict[str, Array]]:
    """Returns (state after one step of the optimiser, expert load, metrics as scalars).

    loss: parameters -> (value, metrics), whose `load` [layers, experts] is taken out of the
    metrics: the caller balances its routers by it. axis: a mesh axis whose devices each return
    their share of the loss and of the metrics.
    """
    import optax

    (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    if axis is not None:
        value, metrics, gradients = lax.psum((value, metrics, gradients), axis)
    updates, moments = optimiser(settings).update(gradients, state.optimiser, state.params)
    params = optax.apply_updates(state.params, updates)
    load = metrics.pop("load")
    peak = load.max(axis=1) / load.mean(axis=1)
    metrics |= {
        "loss": value,
        "gradient_norm": _global_norm(gradients),
        "learning_rate": jnp.asarray(learning_rate(settings)(state.step)),
        # Rows of the fullest expert over the mean: 1 is perfect balance.
        "load_peak": peak.max(),
        "load_peak_mean": peak.mean(),
    }
    return TrainState(params=params, optimiser=moments, step=state.step + 1), load, metrics


@lru_cache(maxsize=4)
def compiled_step(
    config: ModelConfig, settings: OptimiserSettings, devices: int = 1
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """Returns the jitted step; it takes over the state that it is given (donated).

    devices: how many of this process's devices share a batch, whose size they divide. The state is
    kept on each; the sum of their gradients depends on how many they are.

    Raises:
        ConfigError: The process has fewer devices.
    """
    if devices == 1:
        return jax.jit(partial(train_step, config=config, settings=settings), donate_argnums=0)
    found = jax.local_devices()
    if len(found) < devices:
        raise ConfigError(f"training on {devices} devices needs as many; there are {len(found)}")
    mesh = jax.sharding.Mesh(np.asarray(found[:devices]), ("data",))
    shared, split = PartitionSpec(), PartitionSpec("data")
    step = jax.shard_map(
        partial(train_step, config=config, settings=settings, axis="data"),
        mesh=mesh,
        in_specs=(shared, split),
        out_specs=shared,
        check_vma=False,  # `descend` adds the gradients itself
    )
    places = (NamedSharding(mesh, shared), NamedSharding(mesh, split))
    run = jax.jit(step, donate_argnums=0)
    # A state that moves to the mesh in its first step would compile twice.
    return lambda state, batch: run(*jax.device_put((state, batch), places))


def save_state(folder: Path, state: TrainState, record: dict[str, Any]) -> Path:
    """Writes `folder/step-NNNNNNNN` with the state and a JSON record; complete or not there.

    Raises:
        CheckpointError: The arrays cannot be written.
    """
    target = folder / f"step-{int(state.step):08d}"
    partial_folder = folder / f".partial-{target.name}"
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    write_arrays(partial_folder / "arrays", _named(state))
    (partial_folder / "record.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    partial_folder.rename(target)
    return target


def newest_state(folder: Path) -> Path | None:
    """Returns the folder of the newest saved state, None if there is none."""
    saved = sorted(folder.glob("step-*"))
    return saved[-1] if saved else None


def restore_state(saved: Path, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Returns (state with the saved arrays in the places of `state`'s, the record beside them).

    Raises:
        CheckpointError: The arrays are unreadable or belong to another model or optimiser.
    """
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in _named(state).items()
    }
    found = read_arrays(saved / "arrays", targets)
    for name, target in targets.items():
        if found[name].shape != target.shape:
            raise CheckpointError(
                f"a saved state must belong to the model it continues: {name} has shape "
                f"{found[name].shape} in {saved}, the model needs {target.shape}. Use the config "
                "it was saved with."
            )
    arrays = [jnp.asarray(found[name]) for name in targets]
    record = json.loads((saved / "record.json").read_text())
    return jax.tree.unflatten(jax.tree.structure(state), arrays), record


def remove_old(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` saved states."""
    for saved in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(saved)


def settings_record(settings: OptimiserSettings) -> dict[str, Any]:
    """Returns the settings as plain values for a record."""
    return asdict(settings)


def _global_norm(tree: Any) -> Array:
    return jnp.sqrt(sum((jnp.square(leaf).sum() for leaf in jax.tree.leaves(tree)), jnp.zeros(())))


def _named(state: TrainState) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
