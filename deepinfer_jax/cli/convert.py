"""`deepinfer-jax convert`: write a checkpoint as the Orbax tree it is loaded as."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import jax
    from rich.console import Console

    from deepinfer_jax.checkpoint.loader import Progress


def convert(
    source: Annotated[
        str, typer.Argument(help='A checkpoint folder, a hub id, or "nano" (embedded).')
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write; new or empty.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace TARGET if it is a converted checkpoint.")
    ] = False,
) -> None:
    """Write SOURCE as a converted checkpoint, which loads faster. TARGET appears when complete."""
    from rich.console import Console

    from deepinfer_jax.checkpoint.convert import check_target, is_converted, save_converted
    from deepinfer_jax.checkpoint.loader import load_params
    from deepinfer_jax.config.hf import read_config
    from deepinfer_jax.errors import CheckpointError
    from deepinfer_jax.loading import resolve_folder

    folder = resolve_folder(source)
    if is_converted(folder):
        raise CheckpointError(
            f"convert reads a checkpoint in Hugging Face layout, {folder} is converted already: "
            "copy the folder instead."
        )
    if folder.resolve().is_relative_to(target.resolve()):
        raise CheckpointError(
            f"TARGET must not contain SOURCE, received {target} for {folder}: choose another "
            "folder."
        )
    check_target(target, overwrite=overwrite)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    config = read_config(folder)
    started = time.perf_counter()
    with _bar(console, "reading") as tick:
        # Tables are the largest leaves: mapped, they go from file to file without a copy.
        params = load_params(
            folder, config, progress=tick, engram="mapped", placement=_host_placement
        )
    with _bar(console, "hashing and writing") as tick:
        written = save_converted(
            params, config, target, tokenizer_from=folder, overwrite=overwrite, progress=tick
        )
    size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    seconds = time.perf_counter() - started
    console.print(f"{written}: {size / 1e6:,.1f} MB on disk, {seconds:.1f} s")


def _host_placement(spec: object, shape: tuple[int, ...]) -> "jax.sharding.Sharding":
    import jax

    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])


@contextmanager
def _bar(console: "Console", label: str) -> "Iterator[Progress]":
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn

    columns = (label, BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, _: bar.update(task, completed=done, total=total)
