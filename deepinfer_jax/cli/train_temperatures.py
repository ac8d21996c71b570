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
    plot: Annotated[
        Path | None, typer.Option(help="Also write a reliability diagram (PNG, matplotlib).")
    ] = None,
) -> None:
    """Fit one temperature per draft position on greedy rounds, as CHECKPOINT runs by default."""
    from rich.console import Console

    from deepinfer_jax.loading import load
    from deepinfer_jax.pictures import require_matplotlib
    from deepinfer_jax.speculative.calibration import FILE_NAME, write_temperatures
    from deepinfer_jax.training.draft_calibration import (
        corpus_rounds,
        fit_on_rounds,
        plot_reliability,
    )

    if plot is not None:
        require_matplotlib("--plot")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    # Temperatures of other drafts would keep the checkpoint from loading.
    old = checkpoint / FILE_NAME
    aside = old.rename(old.with_suffix(".old")) if old.exists() else None
    try:
        model = load(checkpoint)
    finally:
        if aside is not None:
            aside.rename(old)
    with console.status("drafting") as status:

        def tick(rounds: int) -> None:
            status.update(f"drafting: {rounds:,} rounds")

        rounds = corpus_rounds(model, split="validation", seed=seed, scale=scale, report=tick)
        found = fit_on_rounds(model, rounds)
    path = write_temperatures(checkpoint, found)
    values = ", ".join(f"{value:.2f}" for value in found.values)
    console.print(
        f"{path}: {values}; calibration error {found.error_before:.3f} -> {found.error_after:.3f} "
        f"on {found.rounds:,} rounds"
    )
    if plot is not None:
        plot_reliability(plot, rounds, found)
        console.print(str(plot))
