"""`deepinfer-jax train vision`: train an image encoder for a checkpoint, everything else frozen."""

from pathlib import Path
from typing import Annotated

import typer


def train_vision(
    target: Annotated[str, typer.Option(help='Who learns to see: a folder, "nano", or a hub id.')],
    out: Annotated[Path, typer.Option(help="Folder of the log, saved states and the checkpoint.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole training.")],
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop this run after so many seconds.")
    ] = None,
    drawings: Annotated[int, typer.Option(min=1, help="Different drawings.")] = 100_000,
    batch: Annotated[int, typer.Option(min=1, help="Drawings a step.")] = 256,
    answers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Drawings of a step that TARGET answers about; none given: all of them."
        ),
    ] = None,
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Begin with TARGET's encoder, not with random values.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that draw; none given: one a CPU.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest saved state in OUT.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of parameters, drawings and their order.")] = 0,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")] = 100,
    rounded: Annotated[
        bool,
        typer.Option("--rounded", help="Round activations as checkpoint arithmetic does."),
    ] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states.")] = 200,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between log lines.")] = 20,
) -> None:
    """Teach TARGET to answer questions about drawings and write OUT/checkpoint.

    Encoder, projector and image vectors are trained from random values, or from TARGET's own; the
    files with the weights of the language model are copied unchanged, so that answers to text stay
    what they are. The drawings are a function of the seed; `deepinfer-jax eval` has its own.
    """
    import os

    from rich.console import Console

    from deepinfer_jax.cli.train import progress_bar
    from deepinfer_jax.errors import CheckpointError, ConfigError
    from deepinfer_jax.loading import load, resolve_folder
    from deepinfer_jax.model.vision.encode import vision_params
    from deepinfer_jax.training import loop as loops
    from deepinfer_jax.training import vision as seeing
    from deepinfer_jax.training.corpus.template import IMAGE
    from deepinfer_jax.training.drawings import DRAWING_TASKS
    from deepinfer_jax.training.state import (
        OptimiserSettings,
        initial_state,
        settings_record,
    )
    from deepinfer_jax.training.vision_data import make_vision_data, vision_batches
    from deepinfer_jax.training.vision_export import export_vision

    saved = loops.saved_run(out, resume)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    source = resolve_folder(target)
    model = load(source, numerics="float32", determinism="off")
    if model.tokenizer is None:
        raise CheckpointError(f"training needs the tokenizer.json of the target, {source} has none")
    config = seeing.with_vision(model.config, model.tokenizer.token_to_id(IMAGE))
    if go_on and model.config.vision != config.vision:
        raise ConfigError(f"--go-on begins with nano's encoder, and {source} has another or none")
    held = vision_params(model.params) if go_on else None
    settings = OptimiserSettings(steps=steps, peak_rate=lr, warmup_steps=warmup, loss=None)
    with console.status(f"drawing {drawings:,} pictures"):
        data = make_vision_data(
            config,
            model.tokenizer,
            drawings=drawings,
            seed=seed,
            workers=workers or os.cpu_count() or 1,
        )
    learner = seeing.initial_learner(config, seed, len(data.ids), held)
    if held is not None and saved is None:
        with console.status("fitting the read-out"):
            learner = seeing.fitted(learner, config, data)
    state = initial_state(learner, settings)
    notes = {"seed": seed, "drawings": drawings, "batch": batch, "rounded": rounded}
    notes |= {"answers": answers, "go_on": go_on}
    if resume:
        state, found = loops.resume(out, state, notes)
        console.print(f"resumed after step {int(state.step)}" if found else "no saved state yet")
    with progress_bar(console, steps, ("token_loss", "readout_loss", *DRAWING_TASKS)) as tick:
        state = loops.run_steps(
            state,
            seeing.compiled_vision_step(
                model.params,
                config,
                settings,
                data,
                ramp=1 if go_on else seeing.RAMP_STEPS,
                rounded=rounded,
            ),
            vision_batches(data, batch=batch, seed=seed, answers=answers),
            loops.LoopSettings(
                steps=steps, seconds=seconds, save_every=save_every, log_every=log_every
            ),
            folder=out,
            record=settings_record(settings) | notes,
            report=tick,
        )
    folder = export_vision(state.params.vision, config, source, out / "checkpoint")
    size = sum(path.stat().st_size for path in folder.iterdir())
    console.print(f"{folder}: step {int(state.step)}, {size / 1e6:.2f} MB")
