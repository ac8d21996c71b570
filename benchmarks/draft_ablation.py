"""Does nano show what the DSpark paper says of heads, block sizes and confidence? (issue 6, F6)

    python -m benchmarks.draft_ablation markov=FOLDER none=FOLDER rnn=FOLDER block3=FOLDER \
        [--scale 0.25] [--plot PNG]

Checkpoints of one backbone with different draft stages, trained alike (`train draft --fresh`), on
prompts of the test split at temperature 0 through the pure functions. First, completions of all
variants are compared: drafts change no token. One JSON line per variant: accepted length (drafts +
1, mean over tasks) and acceptance per position given the ones before. Then the sweep of the first
variant, one line per point: rows verified and tokens gained a round if a round verifies the drafts
whose estimated survival reaches a threshold, and if it verifies a fixed number. The estimates use
temperatures fitted on the validation split. The last line says which claims hold.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import deepinfer_jax as di
from deepinfer_jax.pictures import new_picture, require_matplotlib, save_picture
from deepinfer_jax.speculative.calibration import fit_temperatures, prefix_survival
from deepinfer_jax.training.corpus import TASKS
from deepinfer_jax.training.draft_calibration import CorpusRounds, corpus_rounds

THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def accepted_length(found: CorpusRounds) -> float:
    """Returns drafts + 1 of a round, averaged over the rounds of a task, then over tasks."""
    tasks = [found.accepted[found.task == number] for number in range(len(TASKS))]
    return float(np.mean([rounds.mean() for rounds in tasks if len(rounds)])) + 1.0


def by_position(found: CorpusRounds) -> list[float | None]:
    """Returns the share of drafts accepted at each position that a round reached."""
    size = found.confidence_logit.shape[1]
    reached = [(found.accepted >= k) & (found.observed > k) for k in range(size)]
    return [
        round(float((found.accepted[rounds] > k).mean()), 3) if rounds.any() else None
        for k, rounds in enumerate(reached)
    ]


def sweep(found: CorpusRounds, temperature: np.ndarray) -> list[dict]:
    """Returns (rule, at, verified rows and tokens of a round) for thresholds and fixed lengths."""
    survival = prefix_survival(found.confidence_logit, temperature)
    size = survival.shape[1]
    points = []
    for rule, values in (("threshold", THRESHOLDS), ("fixed", range(size + 1))):
        for value in values:
            if rule == "threshold":
                length = (survival >= value).sum(axis=1)  # survival of prefixes only falls
            else:
                length = np.full(len(survival), value)
            verified = 1.0 + float(np.minimum(length, found.observed).mean())
            tokens = 1.0 + float(np.minimum(length, found.accepted).mean())
            points.append(
                {"rule": rule, "at": value, "verified": round(verified, 3)}
                | {"tokens": round(tokens, 3), "wasted_share": round(1 - tokens / verified, 3)}
            )
    return points


def gain_over_fixed(points: list[dict]) -> float:
    """Returns the least advantage in tokens of a threshold over fixed lengths of equal rows.

    Fixed lengths between two whole ones are mixtures of them. The ends, where both rules verify
    everything or nothing, are left out.
    """
    fixed = [(p["verified"], p["tokens"]) for p in points if p["rule"] == "fixed"]
    rows, tokens = (np.asarray(values) for values in zip(*sorted(fixed), strict=True))
    inner = [
        p["tokens"] - float(np.interp(p["verified"], rows, tokens))
        for p in points
        if p["rule"] == "threshold" and rows[0] + 0.1 < p["verified"] < rows[-1] - 0.1
    ]
    return min(inner)


def plot(path: Path, lines: list[dict], points: list[dict]) -> None:
    """Writes the figure: acceptance per position of every variant, and the sweep."""
    figure, axes = new_picture((10, 4), columns=2)
    for line in lines:
        places = range(1, len(line["position_acceptance"]) + 1)
        axes[0].plot(places, line["position_acceptance"], marker="o", label=line["variant"])
    axes[0].set(xlabel="draft position", ylabel="accepted, given the ones before", ylim=(0, 1))
    axes[0].legend()
    for rule in ("threshold", "fixed"):
        chosen = [point for point in points if point["rule"] == rule]
        axes[1].plot(
            [p["verified"] for p in chosen], [p["tokens"] for p in chosen], marker="o", label=rule
        )
    axes[1].set(xlabel="rows verified a round", ylabel="tokens a round")
    axes[1].legend()
    save_picture(figure, path)


def main() -> None:
    """Runs all variants, prints the table and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--scale", type=float, default=0.25, help="times the prompts of each task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=None)
    chosen = parser.parse_args()
    if chosen.plot is not None:
        require_matplotlib("--plot")
    lines, completions, points = [], None, []
    for variant in chosen.variants:
        name, folder = variant.split("=", 1)
        model = di.load(folder)
        found = corpus_rounds(model, split="test", seed=chosen.seed, scale=chosen.scale)
        if completions is not None and found.completions != completions:
            raise SystemExit(f"{name}: other tokens than the first variant; drafts changed them")
        if completions is None:
            completions = found.completions
            labels = corpus_rounds(model, split="validation", seed=0, scale=chosen.scale)
            temperature = fit_temperatures(
                labels.confidence_logit, labels.accepted, labels.observed
            )
            points = sweep(found, temperature)
        lines.append(
            {"benchmark": "draft_ablation", "variant": name, "rounds": len(found.accepted)}
            | {"block": found.confidence_logit.shape[1]}
            | {"accepted_length": round(accepted_length(found), 3)}
            | {"position_acceptance": by_position(found)}
        )
        print(json.dumps(lines[-1]), flush=True)
    for point in points:
        print(json.dumps({"benchmark": "draft_ablation", "sweep": chosen.variants[0]} | point))
    length = {line["variant"]: line["accepted_length"] for line in lines}
    claims: dict = {"threshold_gain_over_fixed": round(gain_over_fixed(points), 3)}
    for better, worse in (("markov", "none"), ("rnn", "none"), ("markov", "block3")):
        if better in length and worse in length:
            claims[f"{better}_over_{worse}"] = round(length[better] / length[worse], 3)
    print(json.dumps({"benchmark": "draft_ablation", "claims": claims}))
    if chosen.plot is not None:
        plot(chosen.plot, lines, points)


if __name__ == "__main__":
    main()
