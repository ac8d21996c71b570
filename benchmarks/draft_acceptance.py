"""How many drafts does greedy verification accept, and does their confidence mean what it says?

    python -m benchmarks.draft_acceptance CHECKPOINT [--scale 1] [--seed 1]

Prompts of the test split, temperature 0, all drafts verified, through the pure cached functions.
One JSON line per task and one for all: accepted length (drafts + 1, mean over rounds; the mean over
tasks for all), acceptance of each position given the ones before it, and the calibration error of
prefix survival before and after sequential temperature scaling. Temperatures are those beside the
checkpoint, else they are fitted on the validation split. First, the tokens of some prompts are
compared with plain greedy decoding; a difference ends the run.
"""

import argparse
import json
import time

import jax
import numpy as np

import deepinfer_jax as di
from deepinfer_jax.loading import resolve_folder
from deepinfer_jax.speculative.calibration import calibration_errors, read_temperatures
from deepinfer_jax.training.corpus import TASKS
from deepinfer_jax.training.draft_calibration import (
    MAX_TOKENS,
    CorpusRounds,
    corpus_rounds,
    fit_on_rounds,
)


def check_tokens(model: di.Model, found: CorpusRounds, prompts: int) -> int:
    """Compares completions with plain greedy decoding and returns how many were compared.

    Raises:
        SystemExit: They differ.
    """
    tasks = found.prompt_task.tolist()
    chosen = [n for n, task in enumerate(tasks) if n - tasks.index(task) < prompts]
    rules = di.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    plain = di.LLM(model).generate([found.prompts[n] for n in chosen], rules)
    for number, output in zip(chosen, plain, strict=True):
        expected, got = list(output.token_ids), list(found.completions[number])
        if expected != got:
            raise SystemExit(f"prompt {number}: plain greedy {expected}, drafted {got}")
    return len(chosen)


def figures(found: CorpusRounds, rows: np.ndarray, temperature: np.ndarray) -> dict:
    """Returns the figures of some rounds."""
    accepted, observed = found.accepted[rows], found.observed[rows]
    labels = found.confidence_logit[rows], accepted, observed
    before, alone_before = calibration_errors(*labels, np.ones_like(temperature))
    after, alone_after = calibration_errors(*labels, temperature)
    reached = [(accepted >= k) & (observed > k) for k in range(len(temperature))]
    return {
        "rounds": len(accepted),
        "accepted_length": round(float(accepted.mean()) + 1, 3),
        "position_acceptance": [
            round(float((accepted[r] > k).mean()), 3) if r.any() else None
            for k, r in enumerate(reached)
        ],
        "error_before": round(before, 4),
        "error_after": round(after, 4),
        "position_error_before": [round(value, 4) for value in alone_before],
        "position_error_after": [round(value, 4) for value in alone_after],
    }


def main() -> None:
    """Runs the rounds and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--scale", type=float, default=1.0, help="times the prompts of each task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checked", type=int, default=2, help="prompts of a task to compare")
    chosen = parser.parse_args()
    model = di.load(chosen.checkpoint)
    started = time.perf_counter()
    found = corpus_rounds(model, split="test", seed=chosen.seed, scale=chosen.scale)
    seconds = time.perf_counter() - started
    compared = check_tokens(model, found, chosen.checked)
    fitted = read_temperatures(resolve_folder(chosen.checkpoint), model.params, model.config)
    source = "file" if fitted else "validation split"
    if fitted is None:
        fitted = fit_on_rounds(
            model, corpus_rounds(model, split="validation", seed=0, scale=chosen.scale)
        )
    temperature = np.asarray(fitted.values)
    lengths = []
    for number, task in enumerate(TASKS):
        line = {"benchmark": "draft_acceptance", "task": task}
        line |= {"prompts": int((found.prompt_task == number).sum())}
        line |= figures(found, found.task == number, temperature)
        lengths.append(line["accepted_length"])
        print(json.dumps(line))
    line = {"benchmark": "draft_acceptance", "task": "all", "prompts": len(found.prompts)}
    line |= figures(found, np.ones(len(found.task), bool), temperature)
    line |= {
        "accepted_length_over_rounds": line["accepted_length"],
        "accepted_length": round(float(np.mean(lengths)), 3),
        "temperatures": [round(value, 3) for value in fitted.values],
        "temperatures_from": source,
        "fitted_rounds": fitted.rounds,
        "tokens": sum(map(len, found.completions)),
        "compared_with_plain": compared,
        "seed": chosen.seed,
        "seconds": round(seconds, 1),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "execution": f"{model.config.execution.numerics}/{model.config.execution.determinism}",
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
