"""`deepinfer-jax train temperatures`: calibrate the confidence of a checkpoint's drafts."""

from pathlib import Path
from typing import Annotated

import typer


def train_temperatures(
    checkpoint: Annotated[
        Path, typer.Argument(help="The checkpoint; the file is written beside its weights.")
    ],
    scale: Annotated[
        float, typer.Option(min=0.01, help="Times the default number of prompts (536).")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the validation prompts.")] = 0,
) -> None:
    """Fit one temperature per draft position on greedy rounds, as CHECKPOINT runs by default."""
    from rich.console import Console

    from deepinfer_jax.loading import load
    from deepinfer_jax.speculative.calibration import write_temperatures
    from deepinfer_jax.training.draft_calibration import fit_on_corpus

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    model = load(checkpoint)
    with console.status("drafting") as status:

        def tick(rounds: int) -> None:
            status.update(f"drafting: {rounds:,} rounds")

        found = fit_on_corpus(model, seed=seed, scale=scale, report=tick)
    path = write_temperatures(checkpoint, found)
    values = ", ".join(f"{value:.2f}" for value in found.values)
    console.print(
        f"{path}: {values}; calibration error {found.error_before:.3f} -> {found.error_after:.3f} "
        f"on {found.rounds:,} rounds"
    )
