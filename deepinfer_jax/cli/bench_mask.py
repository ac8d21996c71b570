"""`deepinfer-jax bench mask`: what grammars cost on the host, without any model running."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.cli.options import ModelArgument

if TYPE_CHECKING:
    from deepinfer_jax.cli.mask_points import MaskPoint


def bench_mask(
    model: ModelArgument = "nano",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Files as MaskBench has them (schema, tests); seven schemas of ours without.",
        ),
    ] = None,
    schemas: Annotated[int, typer.Option(min=1, help="Files of FOLDER that are drawn.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 7,
    to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all schemas to a file.")
    ] = None,
) -> None:
    """Compiles JSON schemas for the tokenizer of MODEL and replays their instances.

    "first" is the time to the first mask of a schema, "next" that to take a token and
    make the mask behind it. A schema is right if all its instances are told apart.
    """
    from rich.console import Console

    from deepinfer_jax.cli.mask_points import as_record, measure, own_cases, read_cases, summary
    from deepinfer_jax.cli.render import read_encoder
    from deepinfer_jax.environment import provenance
    from deepinfer_jax.errors import InputError
    from deepinfer_jax.grammar.vocabulary import grammar_vocabulary

    if to is not None and not to.resolve().parent.is_dir():
        raise InputError(f"the folder of {to} must exist")
    if data is not None and not data.is_dir():
        raise InputError(f"--data must be a folder, got {data}")
    cases = own_cases() if data is None else read_cases(data, schemas, seed)
    encoder = read_encoder(model)
    vocabulary = grammar_vocabulary(encoder.tokenizer, encoder.config)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    points = []
    for point in measure(cases, vocabulary, encoder.tokenizer):
        points.append(point)
        if len(points) % 100 == 0:
            console.print(f"{len(points)} of {len(cases)} schemas")
    found = summary(points)
    _print(points if data is None else [], found)
    if to is not None:
        record: dict[str, Any] = {"model": model, "vocabulary": encoder.config.vocab_size, **found}
        record |= {"environment": provenance(), "points": [as_record(point) for point in points]}
        to.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _print(points: "list[MaskPoint]", found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from deepinfer_jax.cli.mask_points import as_record

    console = Console()
    if points:
        table = Table("schema", "first ms", "next us p50", "p99", "verdict")
        for point in points:
            times = as_record(point)["mask_us"]
            verdict = point.refused or ("right" if point.is_right else "wrong")
            spread = [f"{times[name]:.1f}" if times else "-" for name in ("p50", "p99")]
            table.add_row(point.name, f"{point.first_ms:.1f}", *spread, verdict)
        console.print(table)
    console.print(
        f"{found['schemas']} schemas: {found['right']} right, {found['refused']} refused, "
        f"{found['accept_invalid']} accept an invalid instance, {found['reject_valid']} reject a "
        "valid one"
    )
    for name, unit in (("first_ms", "ms"), ("mask_us", "us")):
        spread = ", ".join(f"{key} {value:g}" for key, value in found[name].items())
        console.print(f"{name.split('_')[0]}: {spread or 'none'} {unit}")
