"""How many of 20 seeded demo prompts does a checkpoint answer well? JSON lines, the last one a sum:

    python -m benchmarks.demo_prompts [--model nano] [--seeds 10]

A demo prompt is what examples/02_demo.py shows for a seed: a story to continue, whose text must not
contradict itself, and a record to extract, which must be exact.
"""

import argparse
import json
from dataclasses import asdict

import jax

from deepinfer_jax.llm import LLM
from deepinfer_jax.loading import load
from deepinfer_jax.training.evaluate import demo_rows, make_trials, run_trials


def main(arguments: list[str] | None = None) -> None:
    """Answers the prompts of the seeds and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    model = load(chosen.model)
    llm = LLM(model)
    rows = demo_rows()
    trials = [t for row in rows for s in range(chosen.seeds) for t in make_trials(llm, row, s)]
    answers = run_trials(model, trials, workers=chosen.workers)
    for answer in answers:
        print(json.dumps(asdict(answer)))
    passed = {row.name: sum(a.correct for a in answers if a.row == row.name) for row in rows}
    print(
        json.dumps(
            {
                "benchmark": "demo_prompts",
                "model": chosen.model,
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
                "prompts": len(answers),
                "passed": sum(passed.values()),
                "passed_by_row": passed,
            }
        )
    )


if __name__ == "__main__":
    main()
