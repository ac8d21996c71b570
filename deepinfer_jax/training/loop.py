"""The training loop: seeded batches, log, saved states, stop by steps or by seconds.

A batch is a function of (seed, step) alone, so a resumed run needs no state of an iterator.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError, InputError
from deepinfer_jax.model.engram.vocabulary import TokenMap, build_token_map
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.state import (
    Batch,
    OptimiserSettings,
    TrainState,
    compiled_step,
    newest_state,
    remove_old,
    restore_state,
    save_state,
    settings_record,
)

BatchAt = Callable[[int], Batch]
Report = Callable[[int, dict[str, float]], None]
Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


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


@dataclass(frozen=True)
class Packed:
    """Token sequences of equal length, with what a model needs to know of their tokenizer."""

    ids: np.ndarray  # uint16 or int32 [n, length]
    weights: np.ndarray  # [n, length], any dtype that holds them
    token_map: np.ndarray  # int32 [vocab]: compressed ids of the Engram
    special: dict[str, int]  # bos_token_id, eos_token_id, pad_token_id, ..

    @property
    def compressed_vocab_size(self) -> int:
        """Distinct ids of the token reduction."""
        return int(self.token_map.max()) + 1


def save_packed(path: Path, packed: Packed) -> None:
    """Writes sequences as a compressed .npz: uint16 ids; whole weights below 256 as bytes."""
    ids, weights = np.asarray(packed.ids), np.asarray(packed.weights)
    if ids.max(initial=0) < 2**16:
        ids = ids.astype(np.uint16)
    exact = np.asarray(weights, np.uint8)
    weights = exact if (exact == weights).all() else np.asarray(weights, np.float32)
    special = json.dumps(packed.special)
    np.savez_compressed(
        path, ids=ids, weights=weights, token_map=packed.token_map, special=np.asarray(special)
    )


def load_packed(path: Path) -> Packed:
    """Returns the sequences of a file that `save_packed` wrote.

    Raises:
        InputError: The file is absent, no such archive, or its arrays do not belong together.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("ids", "weights", "token_map", "special")}
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"training data is an .npz with ids, weights, token_map and special: {error}, at "
            f"{path}. Write it with `training.loop.save_packed`."
        ) from error
    ids, weights = arrays["ids"], arrays["weights"]
    if ids.ndim != 2 or ids.shape != weights.shape or not len(ids):
        raise InputError(
            f"ids and weights must have one shape [n, length], got {ids.shape} and {weights.shape}"
            f", in {path}. Pack the data again."
        )
    return Packed(ids, weights, arrays["token_map"], json.loads(str(arrays["special"])))


def pack_corpus(tokenizer_folder: Path, *, items: int, length: int, seed: int) -> Packed:
    """Returns `items` items of the corpus's training split, packed to rows of `length` tokens.

    Raises:
        TokenizerError: The folder has no tokenizer with the control tokens of V4.1.
    """
    from deepinfer_jax.errors import TokenizerError
    from deepinfer_jax.loading import read_tokenizer
    from deepinfer_jax.model.engram.vocabulary import reduction_key
    from deepinfer_jax.training import corpus
    from deepinfer_jax.training.corpus.template import BOS, EOS, PAD

    tokenizer = read_tokenizer(tokenizer_folder)
    spelled = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    special: dict[str, int] = {}
    for name, text in spelled.items():
        number = None if tokenizer is None else tokenizer.token_to_id(text)
        if number is not None:
            special[name] = number
    if tokenizer is None or len(special) < len(spelled):
        raise TokenizerError(
            "the corpus needs a tokenizer.json with the control tokens of V4.1: there is none in "
            f"{tokenizer_folder}. Name the folder of nano's tokenizer."
        )
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    spellings = [tokenizer.id_to_token(token) or "" for token in range(vocab_size)]
    # Open draft positions are fed an id that no text has.
    unused = [token for token, text in enumerate(spellings) if "place▁holder" in text]
    special["noise_token_id"] = unused[-1] if unused else vocab_size - 1
    keys = {
        reduction_key(tokenizer.decode([token], skip_special_tokens=False), text)
        for token, text in enumerate(spellings)
    }
    engram = nano_config(vocab_size, len(keys)).engram
    assert engram is not None
    token_map = build_token_map(tokenizer, engram, vocab_size)
    rows, group = [], 20_000
    for start in range(0, items, group):
        count = min(group, items - start)
        drawn = corpus.items("train", seed=seed, count=count, start=start, max_tokens=length)
        rendered = corpus.render_batch(list(drawn), tokenizer)
        # Items start where a group of two tokens does, as in a sequence of their own.
        packed = corpus.pack(
            rendered,
            length,
            seed + start,
            pad_id=special["pad_token_id"],
            align=2,
            task_weights=corpus.TOKEN_WEIGHTS,
        )
        rows.append((packed.ids.astype(np.uint16), packed.weights))
    ids, weights = (np.concatenate(part) for part in zip(*rows, strict=True))
    return Packed(ids, weights, np.asarray(token_map.ids), special)


def packed_batches(packed: Packed, *, batch: int, length: int, seed: int) -> BatchAt:
    """Returns batch(step): every sequence once an epoch, in an order drawn from (seed, epoch).

    length: a divisor of the stored length; longer sequences are cut into parts of it.

    Raises:
        InputError: The stored length is no multiple of `length`, or there are too few sequences.
    """
    stored = packed.ids.shape[1]
    if stored % length:
        raise InputError(
            f"--length must divide the length of the packed sequences, got {length} for {stored}"
        )
    ids, weights = packed.ids.reshape(-1, length), packed.weights.reshape(-1, length)
    count = len(ids) // batch
    if not count:
        raise InputError(f"a batch of {batch} needs as many sequences, there are {len(ids)}")
    orders: dict[int, np.ndarray] = {}

    def at(step: int) -> Batch:
        epoch, place = divmod(step, count)
        if epoch not in orders:
            orders.clear()
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(len(ids))
        rows = orders[epoch][place * batch : (place + 1) * batch]
        return ids[rows].astype(np.int32), weights[rows].astype(np.float32)

    return at


def alternating(short: BatchAt, long: BatchAt, every: int) -> BatchAt:
    """Returns batch(step): of `long` at every `every`-th step, of `short` at the others."""

    def at(step: int) -> Batch:
        longs, place = divmod(step, every)
        return long(longs) if place == every - 1 else short(step - longs)

    return at


def resume(folder: Path, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
    """Returns the newest saved state of a training folder, or `state` and None without one."""
    saved = newest_state(folder)
    return (state, None) if saved is None else restore_state(saved, state)


def train(
    state: TrainState,
    config: ModelConfig,
    batch_at: BatchAt,
    settings: OptimiserSettings,
    loop: LoopSettings,
    *,
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
        folder: Where `log.jsonl` and saved states go; None keeps nothing.
        record: Added to the record of every saved state (seeds, data).
        report: Called with (finished steps, metrics) whenever metrics are logged.

    Raises:
        ConfigError: Nothing bounds the run.
        InputError: The loss is not finite; the newest saved state is from before.
    """
    notes = settings_record(settings) | (record or {})
    run = compiled_step(config, settings)
    return run_steps(state, run, batch_at, loop, folder=folder, record=notes, report=report)


def run_steps(
    state: TrainState,
    run: Step,
    batch_at: BatchAt,
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
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]

        matplotlib.use("Agg")
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'deepinfer-jax[notebook]'"
        ) from error
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for name in ("token_loss", "index_loss"):
        axis.plot([line["step"] for line in lines], [line[name] for line in lines], label=name)
    axis.set(xlabel="step", ylabel="nats", yscale="log")
    axis.legend()
    figure.savefig(folder / "loss.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return folder / "loss.png"


def packed_token_map(packed: Packed, vocab_size: int) -> TokenMap:
    """Returns the Engram's token map of packed data, ids beyond the tokenizer marked -1."""
    ids = np.full((vocab_size,), -1, np.int32)
    ids[: len(packed.token_map)] = packed.token_map
    ids.setflags(write=False)
    return TokenMap(ids)


def _on_device(batch: Batch) -> Batch:
    ids, weights = batch
    return jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)


def _log(folder: Path | None, values: dict[str, float]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.jsonl", "a") as file:
        file.write(json.dumps(values) + "\n")
