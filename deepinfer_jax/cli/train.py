"""`deepinfer-jax train`: train a model from random weights, resumably."""

from pathlib import Path
from typing import Annotated, Any

import typer

NANO_TOKENIZER = Path(__file__).parent.parent / "data" / "nano"


def train(
    target: Annotated[
        str, typer.Argument(metavar="MODEL", help='"nano"; for its drafts see "train draft".')
    ],
    out: Annotated[Path, typer.Option(help="Folder of the log, saved states and the checkpoint.")],
    data: Annotated[
        Path, typer.Option(help="Packed sequences (.npz); written first if --items is given.")
    ],
    items: Annotated[
        int | None, typer.Option(min=1, help="Draw so many items of the corpus into DATA first.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the whole training; none: only write DATA.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop this run after so many seconds.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 2048,
    devices: Annotated[
        int, typer.Option(min=1, help="Devices of this machine that share a batch.")
    ] = 1,
    long_data: Annotated[
        Path | None,
        typer.Option(help="Packed longer sequences, taken at every LONG_EVERY-th step."),
    ] = None,
    long_every: Annotated[int, typer.Option(min=2, help="See --long-data.")] = 4,
    init: Annotated[
        str | None,
        typer.Option(help="Checkpoint whose weights to begin with; random if not given."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest saved state in OUT.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of parameters and of the data order.")] = 0,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 2e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")] = 100,
    index_loss: Annotated[float, typer.Option(min=0, help="Weight of the indexers' KL.")] = 0.1,
    rounded: Annotated[
        bool,
        typer.Option("--rounded", help="Round activations as checkpoint arithmetic does."),
    ] = False,
    remat: Annotated[
        bool, typer.Option(help="Recompute layers in the backward pass; less memory, slower.")
    ] = True,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saved states.")] = 500,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between log lines.")] = 10,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer; the embedded one if not given.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Write loss.png (matplotlib).")] = False,
) -> None:
    """Train MODEL on packed text and write OUT/checkpoint in the released layout."""

    from rich.console import Console

    from deepinfer_jax.errors import ConfigError
    from deepinfer_jax.loading import load
    from deepinfer_jax.pictures import require_matplotlib
    from deepinfer_jax.training import data as data_files
    from deepinfer_jax.training import loop as loops
    from deepinfer_jax.training.config import nano_config
    from deepinfer_jax.training.export import export_checkpoint
    from deepinfer_jax.training.init import init_params, stored_params
    from deepinfer_jax.training.losses import LossSettings
    from deepinfer_jax.training.state import OptimiserSettings, initial_state

    if batch % devices:
        raise ConfigError(f"--devices must divide --batch: {devices} does not divide {batch}")
    if target != "nano":
        raise ConfigError(f'train knows "nano", and "draft" as its first word; got {target!r}')
    if steps is None and items is None:
        raise ConfigError("the schedule needs --steps; --seconds may stop a run before its end")
    if items is not None and data.exists():
        raise ConfigError(
            f"--items writes {data}, which exists: leave it out, or name another file"
        )
    if plot:
        require_matplotlib("--plot")
    loops.saved_run(out, resume)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    tokenizer = tokenizer or NANO_TOKENIZER
    if items is not None:
        with console.status(f"drawing {items:,} items"):
            packed = data_files.pack_corpus(tokenizer, items=items, length=length, seed=seed)
            data_files.save_packed(data, packed)
        kept = int((packed.ids != packed.special["pad_token_id"]).sum())
        size = data.stat().st_size
        console.print(f"{data}: {packed.ids.shape}, {kept:,} tokens, {size / 1e6:.1f} MB")
        if steps is None:
            return
    assert steps is not None
    packed = data_files.load_packed(data)
    config = nano_config(len(packed.token_map), packed.compressed_vocab_size, **packed.special)
    settings = OptimiserSettings(
        steps=steps,
        peak_rate=lr,
        warmup_steps=warmup,
        loss=LossSettings(index_coefficient=index_loss, remat=remat, rounded=rounded),
    )
    token_map = data_files.packed_token_map(packed, config.vocab_size)
    notes = {"seed": seed, "data": data.name, "batch": batch, "length": length, "devices": devices}
    if init is None:
        params = init_params(config, seed, token_map)
    else:
        params = stored_params(load(init, determinism="run"), config)
        notes |= {"init": init}
    state = initial_state(params, settings)
    if long_data is not None:
        notes |= {"long_data": long_data.name, "long_every": long_every}
    if resume:
        state, found = loops.resume(out, state, notes)
        console.print(f"resumed after step {int(state.step)}" if found else "no saved state yet")
    batch_at = data_files.packed_batches(packed, batch=batch, length=length, seed=seed)
    if long_data is not None:
        more = data_files.load_packed(long_data)
        size = more.ids.shape[1]
        count = max(1, batch * length // size)
        longer = data_files.packed_batches(more, batch=count, length=size, seed=seed)
        batch_at = data_files.alternating(batch_at, longer, long_every)
    bounds = loops.LoopSettings(
        steps=steps, seconds=seconds, save_every=save_every, log_every=log_every
    )
    with progress_bar(console, steps, ("token_loss", "index_loss")) as tick:
        state = loops.train(
            state,
            config,
            batch_at,
            settings,
            bounds,
            devices=devices,
            folder=out,
            record=notes,
            report=tick,
        )
    folder = export_checkpoint(state.params, config, out / "checkpoint", tokenizer_from=tokenizer)
    size = sum(path.stat().st_size for path in folder.iterdir())
    console.print(f"{folder}: step {int(state.step)}, {size / 1e6:.2f} MB")
    if plot:
        console.print(str(loops.plot_log(out)))


def progress_bar(console: Any, steps: int, names: tuple[str, ...]) -> Any:
    """Returns a context that gives the report function of a progress bar; names: metrics shown."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    @contextmanager
    def shown() -> Any:
        columns = (
            "training",
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("training", total=steps, text="")

            def tick(step: int, values: dict[str, float]) -> None:
                figures = " ".join(f"{name} {values[name]:.3f}" for name in names)
                text = f"{figures} {values['tokens_per_second']:,.0f} tokens/s"
                bar.update(task, completed=step, text=text)

            yield tick

    return shown()
