"""`deepinfer-jax train draft`: train the draft stages of a checkpoint, everything else frozen."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def train_draft(
    target: Annotated[
        str, typer.Option(help='Whose draft stages are trained: a folder, "nano", or a hub id.')
    ],
    data: Annotated[Path, typer.Option(help="Packed sequences (.npz) of the target's tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder of the log, saved states and the checkpoint.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole training.")],
    head: Annotated[
        Literal["markov", "rnn", "none"] | None,
        typer.Option(help="What a draft knows of those before it; none given: as in TARGET."),
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Drafts of a round; none given: as in TARGET.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin with random stages, not with TARGET's.")
    ] = False,
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
    """Train the `mtp.*` tensors of TARGET and write OUT/checkpoint, the rest of it unchanged.

    TARGET is any DeepSeek-V4.1 checkpoint that this package loads, if it has draft stages and no
    image biases of its own; DATA holds sequences of its tokenizer (`training.data.save_packed`).
    What the stages see of TARGET is computed within each step, from the batch at hand: no features
    are stored, so the data may be of any size.

    With another --head or --block the config.json of OUT/checkpoint says so, and dspark_target.json
    there names the target: the drafts load with no other. Tensors that TARGET has too are taken
    over, those of a head that it does not have begin at random. Fit temperatures afterwards (`train
    temperatures`): those of TARGET belong to its own drafts.
    """

    from rich.console import Console

    from deepinfer_jax.cli.train import progress_bar
    from deepinfer_jax.loading import load, resolve_folder
    from deepinfer_jax.model.draft import draft_settings
    from deepinfer_jax.speculative.calibration import FILE_NAME
    from deepinfer_jax.speculative.pairing import write_target
    from deepinfer_jax.training import data as data_files
    from deepinfer_jax.training import draft as drafts
    from deepinfer_jax.training import loop as loops
    from deepinfer_jax.training.draft_loss import DraftLossSettings
    from deepinfer_jax.training.export import export_checkpoint
    from deepinfer_jax.training.state import (
        OptimiserSettings,
        initial_state,
        settings_record,
    )

    loops.saved_run(out, resume)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    packed = data_files.load_packed(data)
    source = resolve_folder(target)
    model = load(source, numerics="float32", determinism="off")
    config = drafts.with_draft_settings(model.config, head=head, block=block)
    drafts.check_data(packed, model.params, config)
    drafts.check_exportable(model.params)
    loss = DraftLossSettings(
        anchors=anchors or max(1, length // 4), seed=seed, position_scale=position_scale
    )
    settings = OptimiserSettings(steps=steps, peak_rate=lr, warmup_steps=warmup, loss=loss)
    stages = drafts.initial_draft(model.params, model.config, config, seed=seed, fresh=fresh)
    state = initial_state(stages, settings)
    notes = {"seed": seed, "data": data.name, "batch": batch, "length": length}
    notes |= {"anchors": loss.anchors, "target": drafts.target_digest(model.params)}
    chosen = draft_settings(config)
    notes |= {"head": chosen.dspark_head, "block": chosen.dspark_block_size, "fresh": fresh}
    if resume:
        state, found = loops.resume(out, state, notes)
        console.print(f"resumed after step {int(state.step)}" if found else "no saved state yet")
    with progress_bar(console, steps, ("loss", "acceptance", "accepted_length")) as tick:
        state = loops.run_steps(
            state,
            drafts.compiled_draft_step(model.params, config, settings),
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
        config,
        out / "checkpoint",
        tokenizer_from=None if model.tokenizer is None else source,
    )
    (folder / FILE_NAME).unlink(missing_ok=True)  # of the drafts that were there before
    write_target(folder, model.params, config)
    size = sum(path.stat().st_size for path in folder.iterdir())
    console.print(f"{folder}: step {int(state.step)}, {size / 1e6:.2f} MB")
