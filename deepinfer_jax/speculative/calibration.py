"""Sequential temperature scaling of draft confidences (engine.md 3.4), on the host in float64.

One temperature per draft position, fitted left to right on rounds that verified all drafts, so that
the survival of a prefix means what it says. It changes which drafts are worth verifying, never a
token. `confidence.calibrated_confidence` applies the temperatures on the device.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.model.draft import draft_params, draft_settings
from deepinfer_jax.model.params import DraftParams
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.speculative.confidence import LOGIT_LIMIT
from deepinfer_jax.speculative.pairing import plain_digest

FILE_NAME = "dspark_temperatures.json"
BINS = 15
_GRID = np.geomspace(0.1, 10.0, 41)
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperatures:
    """Fitted temperatures and what they belong to.

    values: one per draft position. identity: of the draft stages (`draft_identity`). verification:
    the rule whose verdicts they were fitted on. rounds: how many. error_before, error_after: the
    calibration error on these rounds, all positions pooled.
    """

    values: tuple[float, ...]
    identity: str
    verification: str
    rounds: int
    error_before: float
    error_after: float


def prefix_survival(
    logit: Float[np.ndarray, "n k"], temperature: Float[np.ndarray, " k"]
) -> Float[np.ndarray, "n k"]:
    """Returns the estimated chance that the first 1..k drafts are all accepted, float64."""
    quotient = np.clip(np.asarray(logit, np.float64) / temperature, -LOGIT_LIMIT, LOGIT_LIMIT)
    return np.cumprod(1.0 / (1.0 + np.exp(-quotient)), axis=1)


def prefix_labels(
    accepted: Int[np.ndarray, " n"], observed: Int[np.ndarray, " n"], positions: int
) -> tuple[Bool[np.ndarray, "n k"], Bool[np.ndarray, "n k"]]:
    """Returns (the first 1..k drafts were all accepted, the position counts).

    Args:
        accepted: leading drafts of each round that were accepted.
        observed: positions of each round that count: those after an accepted end do not.
        positions: k.
    """
    place = np.arange(1, positions + 1)
    return accepted[:, None] >= place, place <= observed[:, None]


def calibration_error(
    estimate: Float[np.ndarray, "..."], outcome: Bool[np.ndarray, "..."], *, bins: int = BINS
) -> float:
    """Returns the expected calibration error over equal bins of the estimates in [0, 1].

    The mean over samples of |mean estimate - mean outcome| of the sample's bin; 0 without samples.
    """
    if not estimate.size:
        return 0.0
    expected, found, count = reliability(estimate, outcome, bins=bins)
    return float(np.abs((expected - found) * count).sum() / estimate.size)


def reliability(
    estimate: Float[np.ndarray, "..."], outcome: Bool[np.ndarray, "..."], *, bins: int = BINS
) -> tuple[Float[np.ndarray, " b"], Float[np.ndarray, " b"], Int[np.ndarray, " b"]]:
    """Returns (mean estimate, mean outcome, samples) of the equal bins of [0, 1] that have any."""
    flat = estimate.reshape(-1)
    place = np.minimum((flat * bins).astype(int), bins - 1)
    count = np.bincount(place, minlength=bins)
    used = count > 0
    sums = (
        np.bincount(place, weights=values, minlength=bins)[used]
        for values in (flat, outcome.reshape(-1))
    )
    expected, found = (total / count[used] for total in sums)
    return expected, found, count[used]


def calibration_errors(
    logit: Float[np.ndarray, "n k"],
    accepted: Int[np.ndarray, " n"],
    observed: Int[np.ndarray, " n"],
    temperature: Float[np.ndarray, " k"],
) -> tuple[float, tuple[float, ...]]:
    """Returns the error of prefix survival: (all positions pooled, each position alone).

    Arguments as `fit_temperatures` and `prefix_survival`.
    """
    survival = prefix_survival(logit, temperature)
    outcome, counts = prefix_labels(accepted, observed, logit.shape[1])
    columns = zip(survival.T, outcome.T, counts.T, strict=True)
    alone = tuple(calibration_error(s[c], y[c]) for s, y, c in columns)
    return calibration_error(survival[counts], outcome[counts]), alone


def fit_temperatures(
    logit: Float[np.ndarray, "n k"],
    accepted: Int[np.ndarray, " n"],
    observed: Int[np.ndarray, " n"],
) -> Float[np.ndarray, " k"]:
    """Returns one temperature per position, each the best of 41 values in [0.1, 10].

    Position k minimises the calibration error of the survival of its prefix, the temperatures of
    the positions before it being fixed. Of equal ones the nearest to 1 wins.

    Args:
        logit: confidence logits of every draft, of rounds that verified all drafts.
        accepted: leading drafts of each round that were accepted.
        observed: positions of each round that count.

    Raises:
        InputError: There are no rounds, or a logit is not finite.
    """
    if not logit.size or not np.isfinite(logit).all():
        raise InputError(
            "temperatures are fitted on the finite confidence logits of at least one round, got "
            f"{logit.shape[0]} rounds: collect rounds with drafts first"
        )
    outcome, counts = prefix_labels(accepted, observed, logit.shape[1])
    chosen = np.ones(logit.shape[1])
    order = _GRID[np.argsort(np.abs(np.log(_GRID)), kind="stable")]
    for k in range(logit.shape[1]):
        kept = counts[:, k]

        def error(value: float, k: int = k, kept: np.ndarray = kept) -> float:
            tried = np.append(chosen[:k], value)
            return calibration_error(
                prefix_survival(logit[kept, : k + 1], tried)[:, k], outcome[kept, k]
            )

        chosen[k] = min(order, key=error)  # the first of equal ones
    return chosen


def draft_identity(params: AnyParams, config: ModelConfig) -> str:
    """Returns a SHA-256 that changes whenever the draft stages are trained again."""
    specs, held = spec_tree(config).draft, draft_params(params)
    return plain_digest(_without_experts(specs), _without_experts(held))


def _without_experts(draft: DraftParams) -> DraftParams:
    """Returns the draft stages without the leaves that kernels may have rearranged."""
    return replace(draft, stages=replace(draft.stages, experts=None))


def write_temperatures(folder: Path, temperatures: Temperatures) -> Path:
    """Writes `dspark_temperatures.json` beside a checkpoint and returns its path."""
    path = folder / FILE_NAME
    record = {"format": _FORMAT} | asdict(temperatures)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def read_temperatures(folder: Path, params: AnyParams, config: ModelConfig) -> Temperatures | None:
    """Returns the temperatures beside a checkpoint, None if it has none (all are 1 then).

    Raises:
        CheckpointError: The file is damaged, or belongs to other draft stages.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("format") != _FORMAT:
            raise ValueError(f"not of format {_FORMAT}")
        found = Temperatures(**record | {"values": tuple(map(float, record["values"]))})
        if not all(0 < value < np.inf for value in found.values):
            raise ValueError(f"temperatures must be above 0, got {found.values}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} must hold the temperatures that `train temperatures` writes, and it "
            f"cannot be read ({error}): delete it or write it again"
        ) from error
    size = draft_settings(config).dspark_block_size
    if found.identity != draft_identity(params, config) or len(found.values) != size:
        raise CheckpointError(
            f"temperatures belong to the draft stages they were fitted on, {path} to others: "
            "delete it or fit them again with `train temperatures`"
        )
    return found
