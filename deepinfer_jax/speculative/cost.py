"""What a step costs by its rows and context: measured once, kept on disk, corrected while serving.

A curve decides only how many drafts are verified, never a token (engine.md 3.6, 3.7). Host NumPy.
"""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from deepinfer_jax.errors import InputError

CHAIN = 20
REPEATS = 3
_FORMAT = 1
_FIELDS = ("rows", "contexts", "step_seconds", "draft_rows", "draft_seconds")
_WINDOW = 5000  # steps that the slope is taken from
_BUCKET_SAMPLES = 10
_REFRESH = 64  # steps between two computations of the slope
_DRAFT_WINDOW = 9
_DRAFT_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCost:
    """Measured seconds of a step and of drafting.

    rows [b] int: sizes a step is padded to, ascending (tile multiples at level "batch").
    contexts [c] int: tokens per sequence, ascending. step_seconds [b c] float64: of a step without
    drafting. draft_rows [d] int: numbers of sequences, ascending. draft_seconds [d] float64: of
    drafting for that many.

    Raises:
        InputError: a field of another form, or a time that is not finite or not above 0
            (drafting: below 0).
    """

    __no_type_check__: ClassVar[bool] = True  # `__post_init__` checks, also what a file holds

    rows: np.ndarray
    contexts: np.ndarray
    step_seconds: np.ndarray
    draft_rows: np.ndarray
    draft_seconds: np.ndarray

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("contexts", 0), ("draft_rows", 1)):
            axis = getattr(self, name)
            is_legal = axis.ndim == 1 and axis.size > 0 and axis.dtype.kind == "i"
            if not is_legal or axis[0] < least or (np.diff(axis) <= 0).any():
                raise InputError(
                    f"StepCost.{name} must be ascending integers from {least} on, at least one; "
                    f"got {axis!r}"
                )
        steps, drafts = self.step_seconds, self.draft_seconds
        shapes = ((self.rows.size, self.contexts.size), self.draft_rows.shape)
        if (steps.shape, drafts.shape) != shapes:
            raise InputError(
                f"StepCost needs seconds of the shapes {shapes} of its axes, got {steps.shape} and "
                f"{drafts.shape}"
            )
        if not (np.isfinite(steps).all() and np.isfinite(drafts).all()):
            raise InputError("StepCost needs finite seconds: measure again")
        if (steps <= 0).any() or (drafts < 0).any():
            raise InputError("StepCost needs steps above 0 s and drafting of 0 s or more")

    def bucket(self, rows: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the place in `rows` of the smallest size that holds so many; the last if none."""
        return np.minimum(np.searchsorted(self.rows, rows), self.rows.size - 1)

    def seconds(
        self,
        rows: Int[np.ndarray, " n"],
        context: int | float | Float[np.ndarray, " n"],
    ) -> Float[np.ndarray, " n"]:
        """Returns the seconds of steps of so many rows, without drafting.

        Args:
            rows: valid rows of each step; it costs what its bucket costs.
            context: tokens per sequence, one number or one per step; linear between the measured
                ones, the nearest beyond them.
        """
        bucket = self.bucket(rows)
        place = np.interp(context, self.contexts, np.arange(self.contexts.size))
        lower = np.asarray(place, np.int64)
        upper, share = np.minimum(lower + 1, self.contexts.size - 1), place - lower
        if lower.ndim:
            low, high = self.step_seconds[bucket, lower], self.step_seconds[bucket, upper]
            return low * (1 - share) + high * share
        low, high = self.step_seconds[:, lower], self.step_seconds[:, upper]
        return (low * (1 - share) + high * share)[bucket]  # few buckets, many rows

    def drafting_seconds(self, sequences: int) -> float:
        """Returns the seconds of drafting; linear between the measured numbers of sequences."""
        return float(np.interp(sequences, self.draft_rows, self.draft_seconds))


def chain_seconds(
    dispatch: Callable[[], None],
    wait: Callable[[], None],
    *,
    chain: int = CHAIN,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the median seconds of one dispatch in a chain, after one that does not count.

    Waiting for each one would add the host's latency to it, which a running engine hides.

    Args:
        dispatch: starts the work and returns; the next one may start before it ends.
        wait: returns when all that was dispatched is done.
        chain: dispatches between two waits, at least 20.
        repeats: chains; their median counts.
        clock: seconds, ascending.

    Raises:
        InputError: too short a chain, or no repeat.
    """
    if chain < CHAIN or repeats < 1:
        raise InputError(
            f"a chain has at least {CHAIN} dispatches and is run at least once, got chain={chain} "
            f"and repeats={repeats}"
        )
    dispatch()
    wait()
    measured = []
    for _ in range(repeats):
        begin = clock()
        for _ in range(chain):
            dispatch()
        wait()
        measured.append((clock() - begin) / chain)
    return float(np.median(measured))


def profile(
    step: Callable[[int, int], None],
    draft: Callable[[int, bool], None],
    wait: Callable[[], None],
    *,
    rows: Sequence[int],
    contexts: Sequence[int],
    sequences: Sequence[int],
    chain: int = CHAIN,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCost:
    """Measures a curve, the largest sizes first (engine.md 3.7).

    Args:
        step: dispatches one step of (rows, tokens per sequence). What a step does without drafts
            too, such as choosing the token of each row, belongs here.
        draft: dispatches the smallest step of so many sequences, with or without drafting; the
            difference is what drafting costs.
        wait: returns when all that was dispatched is done.
        rows: sizes that steps are padded to.
        contexts: tokens per sequence.
        sequences: numbers of sequences.
        chain: as in `chain_seconds`.
        repeats: as in `chain_seconds`.
        clock: as in `chain_seconds`.

    Raises:
        InputError: as in `chain_seconds` and `StepCost`.
    """
    sizes, lengths, counts = (sorted(set(axis)) for axis in (rows, contexts, sequences))

    def measure(dispatch: Callable[[], None]) -> float:
        return chain_seconds(dispatch, wait, chain=chain, repeats=repeats, clock=clock)

    steps = np.zeros((len(sizes), len(lengths)))
    for i, size in reversed(list(enumerate(sizes))):
        for j, length in reversed(list(enumerate(lengths))):
            steps[i, j] = measure(lambda size=size, length=length: step(size, length))
    drafts = np.zeros(len(counts))
    for i, count in reversed(list(enumerate(counts))):
        whole, rest = (measure(lambda c=count, w=which: draft(c, w)) for which in (True, False))
        drafts[i] = max(0.0, whole - rest)
    return StepCost(
        rows=np.asarray(sizes),
        contexts=np.asarray(lengths),
        step_seconds=steps,
        draft_rows=np.asarray(counts),
        draft_seconds=drafts,
    )


def at_sizes(cost: StepCost, rows: Sequence[int]) -> StepCost:
    """Returns the curve at other sizes, linear between the measured ones, the nearest beyond them.

    For a device whose time grows with every tile: a few measured sizes tell those between them,
    where the next larger measured one would make steps of one row more look far dearer.
    """
    sizes = np.asarray(sorted(set(rows)))
    columns = [np.interp(sizes, cost.rows, column) for column in cost.step_seconds.T]
    return StepCost(
        rows=sizes,
        contexts=cost.contexts,
        step_seconds=np.stack(columns, axis=1),
        draft_rows=cost.draft_rows,
        draft_seconds=cost.draft_seconds,
    )


def cache_folder() -> Path:
    """Returns `deepinfer_jax` under XDG_CACHE_HOME, under ~/.cache if that is no absolute path."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "deepinfer_jax"


def cost_key(identity: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a mapping of plain JSON values, whatever its order.

    It must name everything that changes a time: the model, the layout of plans, the draft block,
    the device kind (on CPU its model and the usable cores), the jax and jaxlib versions, the
    kernels, the numerics and the level.
    """
    return hashlib.sha256(_canonical(identity).encode()).hexdigest()


def _canonical(identity: Mapping[str, Any]) -> str:
    return json.dumps(dict(identity), sort_keys=True, allow_nan=False)


def write_cost(path: Path, identity: Mapping[str, Any], cost: StepCost) -> None:
    """Writes a curve and what it belongs to; a reader sees the old file or the new one."""
    record = {"format": _FORMAT, "identity": dict(identity)}
    record |= {name: getattr(cost, name).tolist() for name in _FIELDS}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_cost(path: Path, identity: Mapping[str, Any]) -> StepCost:
    """Reads the curve of exactly this identity.

    Raises:
        InputError: the file is damaged or belongs to another identity.
        OSError: there is none, or it cannot be read.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != _FORMAT:
            raise ValueError(f"not of format {_FORMAT}")
        if _canonical(record["identity"]) != _canonical(identity):
            raise ValueError("it belongs to another model, device or version")
        fields = {name: np.asarray(record[name]) for name in _FIELDS}
        for name in ("step_seconds", "draft_seconds"):
            fields[name] = fields[name].astype(np.float64)
        return StepCost(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} must hold the step times that the engine measured for this model and device, "
            f"and it does not ({error!r}): delete it"
        ) from error


def cached_cost(
    identity: Mapping[str, Any], measure: Callable[[], StepCost], *, folder: Path | None = None
) -> tuple[StepCost, str]:
    """Returns the curve of this identity, measured and saved if no file holds it, and a note.

    The note says where the curve is from and, if it was measured, why and whether it was saved: a
    damaged or foreign file is replaced, and a folder that cannot be written stops nobody.

    Args:
        identity: as in `cost_key`.
        measure: measures the curve; called on a miss only.
        folder: of the file, None for `cache_folder()`.
    """
    try:
        path = (
            cache_folder() if folder is None else folder
        ) / f"step_cost-{cost_key(identity)}.json"
    except RuntimeError as error:  # no home
        return measure(), f"step times measured, not saved: {error}"
    try:
        return read_cost(path, identity), f"step times read from {path}"
    except FileNotFoundError:
        reason = "there was no file"
    except (OSError, InputError) as error:
        reason = str(error)
    cost = measure()
    try:
        write_cost(path, identity, cost)
    except OSError as error:
        return cost, f"step times measured ({reason}), not saved: {error}"
    return cost, f"step times measured ({reason}), saved in {path}"


class Corrections:
    """A start-up curve and what steps that really ran add to it (engine.md 3.6).

    Steps add one slope per padded row: max(0, the median over buckets of (the median of measured
    minus curve) / bucket), over the last 5000 steps and buckets with at least 10 of them. Drafting
    takes the median of its last 9 times for this number of sequences, of the last 9 times of all
    numbers while there are fewer than 5, and the curve while there are fewer than 5 of those.
    """

    def __init__(self, cost: StepCost) -> None:
        """Starts with the curve alone."""
        self.cost = cost
        self.slope = 0.0  # seconds per row of a bucket
        self._largest = int(cost.rows[-1])
        self._pending: list[tuple[int, float, float]] = []
        self._bucket = np.zeros(_WINDOW, np.int64)
        self._residual = np.zeros(_WINDOW)
        self._seen = 0
        self._drafts: dict[int, deque[float]] = {}
        self._all_drafts: deque[float] = deque(maxlen=_DRAFT_WINDOW)

    def observe(self, rows: int, context: int | float, seconds: float) -> None:
        """Notes a step of a busy device; the slope follows every 64 steps.

        Args:
            rows: valid rows; more than the largest bucket do not count, the curve ends there.
            context: tokens per sequence.
            seconds: of the step without drafting.
        """
        if rows > self._largest:
            return
        self._pending.append((rows, context, seconds))
        if len(self._pending) == _REFRESH:
            self._refresh()

    def observe_draft(self, sequences: int, seconds: float) -> None:
        """Notes the seconds of drafting for so many sequences."""
        if sequences not in self._drafts:
            self._drafts[sequences] = deque(maxlen=_DRAFT_WINDOW)
        self._drafts[sequences].append(seconds)
        self._all_drafts.append(seconds)

    def seconds(self, rows: Int[np.ndarray, " n"], context: int | float) -> Float[np.ndarray, " n"]:
        """Returns the seconds expected of steps of so many rows, without drafting."""
        padded = self.cost.rows[self.cost.bucket(rows)]
        return self.cost.seconds(rows, context) + self.slope * padded

    def drafting_seconds(self, sequences: int) -> float:
        """Returns the seconds expected of drafting for so many sequences."""
        for times in (self._drafts.get(sequences, ()), self._all_drafts):
            if len(times) >= _DRAFT_SAMPLES:
                return float(np.median(times))
        return self.cost.drafting_seconds(sequences)

    def expected(
        self, rows: Int[np.ndarray, " n"], sequences: int, context: int | float
    ) -> Float[np.ndarray, " n"]:
        """Returns the seconds expected of steps of so many rows that draft for `sequences`."""
        return self.seconds(rows, context) + self.drafting_seconds(sequences)

    def _refresh(self) -> None:
        rows, context, seconds = np.asarray(self._pending).T
        self._pending.clear()
        place = (self._seen + np.arange(_REFRESH)) % _WINDOW
        rows = rows.astype(np.int64)
        self._bucket[place] = self.cost.bucket(rows)
        self._residual[place] = seconds - self.cost.seconds(rows, context)
        self._seen += _REFRESH
        count = min(self._seen, _WINDOW)
        self.slope = _slope(self.cost.rows, self._bucket[:count], self._residual[:count])


def _slope(
    sizes: Int[np.ndarray, " b"],
    bucket: Int[np.ndarray, " n"],
    residual: Float[np.ndarray, " n"],
) -> float:
    """Returns max(0, the median over well filled buckets of their median residual per row)."""
    ordered = residual[np.lexsort((residual, bucket))]  # by bucket, ascending within it
    counts = np.bincount(bucket, minlength=sizes.size)
    first = np.cumsum(counts) - counts
    kept = counts >= _BUCKET_SAMPLES
    if not kept.any():
        return 0.0
    first, counts = first[kept], counts[kept]
    middle = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    return max(0.0, float(np.median(middle / sizes[kept])))
