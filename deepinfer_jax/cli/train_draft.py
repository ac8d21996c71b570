"""`deepinfer-jax train draft`: train the draft stages of a checkpoint, everything else frozen."""

from pathlib import Path
from typing import Annotated

import typer


def train_draft(
    target: Annotated[Path, typer.Option(help="The checkpoint whose draft stages are trained.")],
    data: Annotated[Path, typer.Option(help="Packed sequences (.npz) of the target's tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder of the log, saved states and the checkpoint.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole training.")],
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop this run after so many seconds.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 2048,
    anchors: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks of a sequence and step; none: a quarter of LENGTH."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest saved state in OUT.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the data order and of the blocks.")] = 0,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 2e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")] = 100,
    position_scale: Annotated[
        float, typer.Option(min=0.1, help="Block position k weighs exp(-(k - 1) / scale).")
    ] = 4.0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states.")] = 500,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between log lines.")] = 10,
) -> None:
    """Train the `mtp.*` tensors of TARGET and write OUT/checkpoint, the rest of it unchanged."""
    from rich.console import Console

    from deepinfer_jax.cli.train import progress_bar
    from deepinfer_jax.errors import ConfigError
    from deepinfer_jax.loading import load
    from deepinfer_jax.speculative.calibration import FILE_NAME
    from deepinfer_jax.training import data as data_files
    from deepinfer_jax.training import draft as drafts
    from deepinfer_jax.training import loop as loops
    from deepinfer_jax.training.draft_loss import DraftLossSettings
    from deepinfer_jax.training.export import export_checkpoint
    from deepinfer_jax.training.state import OptimiserSettings, newest_state, settings_record

    if newest_state(out) is not None and not resume:
        raise ConfigError(f"{out} holds saved states: add --resume, or choose another folder")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    packed = data_files.load_packed(data)
    model = load(target, numerics="float32", determinism="off")
    drafts.check_data(packed, model.params, model.config)
    drafts.check_exportable(model.params)
    loss = DraftLossSettings(
        anchors=anchors or max(1, length // 4), seed=seed, position_scale=position_scale
    )
    settings = OptimiserSettings(steps=steps, peak_rate=lr, warmup_steps=warmup, loss=loss)
    state = drafts.draft_state(model.params, model.config, settings)
    notes = {"seed": seed, "data": data.name, "batch": batch, "length": length}
    notes |= {"anchors": loss.anchors, "target": drafts.target_digest(model.params)}
    if resume:
        state, found = loops.resume(out, state)
        changed = {k: found.get(k) for k in notes if found and found.get(k) != notes[k]}
        if changed:
            raise ConfigError(f"--resume continues with the same options: the run had {changed}")
        console.print(f"resumed after step {int(state.step)}" if found else "no saved state yet")
    with progress_bar(console, steps, ("loss", "acceptance", "accepted_length")) as tick:
        state = loops.run_steps(
            state,
            drafts.compiled_draft_step(model.params, model.config, settings),
            data_files.packed_batches(packed, batch=batch, length=length, seed=seed),
            loops.LoopSettings(
                steps=steps, seconds=seconds, save_every=save_every, log_every=log_every
            ),
            folder=out,
            record=settings_record(settings) | notes,
            report=tick,
        )
    folder = export_checkpoint(
        drafts.with_draft(model.params, state.params),
        model.config,
        out / "checkpoint",
        tokenizer_from=None if model.tokenizer is None else target,
    )
    (folder / FILE_NAME).unlink(missing_ok=True)  # of the drafts that were there before
    size = sum(path.stat().st_size for path in folder.iterdir())
    console.print(f"{folder}: step {int(state.step)}, {size / 1e6:.2f} MB")
