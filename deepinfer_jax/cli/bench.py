"""`deepinfer-jax bench`: speed against the number of requests that run together."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.cli.options import (
    RUNTIME,
    DeterminismOption,
    ModelArgument,
    NumericsOption,
    runtime_config,
    with_fields,
)

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_jax.cli.bench_points import Point


@with_fields(RUNTIME)
def bench(
    model: ModelArgument = "nano",
    numerics: NumericsOption = "checkpoint",
    determinism: DeterminismOption = "batch",
    concurrency: Annotated[
        str, typer.Option(metavar="LIST", help="Requests that run together, as in 1,4,16.")
    ] = "1,4,16,64",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompts.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, help="Requests of a point, times its concurrency.")
    ] = 2,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Measure this server, which runs MODEL, instead."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DEEPINFER_JAX_API_KEY", help="Of that server.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the points to a file.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw throughput, speed and latency (two pictures)."),
    ] = None,
    **fields: Any,
) -> None:
    """Measures MODEL with 1, 4, 16, ... greedy requests of random tokens at a time.

    Each point is a line of a table: tokens/s of all requests, of one of them, and
    latencies. An engine with drafts is measured with and without them. Random tokens are
    the worst case of drafts: their figures are floors.
    """
    from rich.console import Console

    from deepinfer_jax.cli.bench_points import draw
    from deepinfer_jax.errors import InputError
    from deepinfer_jax.pictures import require_matplotlib

    counts = read_counts(concurrency)
    if png is not None:
        require_matplotlib("--png")
    for path in (to, png):
        if path is not None and not path.resolve().parent.is_dir():
            raise InputError(f"the folder of {path} must exist")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if url is None:
        points, facts = _of_engine(
            console, model, numerics, determinism, counts, prompt_tokens, max_tokens, rounds, fields
        )
    else:
        points, facts = _of_server(model, url, api_key, counts, prompt_tokens, max_tokens, rounds)
    _print(points)
    if to is not None:
        record = {
            "model": model,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            **facts,
            "points": [point.as_dict() for point in points],
        }
        to.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if png is not None:
        draw(points, f"{model}, {prompt_tokens} + {max_tokens} tokens", png)


def read_counts(text: str) -> list[int]:
    """Returns the numbers of a list such as "1,4,16".

    Raises:
        InputError: it is none.
    """
    from deepinfer_jax.errors import InputError

    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InputError(f"--concurrency must be numbers above 0, as in 1,4,16, got {text!r}")
    return counts


def _of_engine(
    console: "Console",
    model: str,
    numerics: str,
    determinism: str,
    counts: list[int],
    prompt_tokens: int,
    max_tokens: int,
    rounds: int,
    fields: dict[str, Any],
) -> "tuple[list[Point], dict[str, Any]]":
    from dataclasses import asdict, replace

    from deepinfer_jax.cli.bench_points import engine_point, random_prompts
    from deepinfer_jax.cli.generate import load_with_bar
    from deepinfer_jax.engine.engine import Engine
    from deepinfer_jax.environment import provenance
    from deepinfer_jax.sampling.params import SamplingParams

    loaded = load_with_bar(console, model, numerics=numerics, determinism=determinism)
    runtime = replace(runtime_config(fields), max_seqs=max(counts), record=None)
    engine = Engine(loaded, runtime)
    console.print("compiling")
    engine.warm_up()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    series = {"no drafts": replace(params, max_draft=0)}
    if engine.drafts.verified.size:
        series = {"drafts": params} | series
    points = []
    for name, one in series.items():
        for count in counts:
            # New prompts for each point: none is in the prefix cache.
            prompts = random_prompts(
                count * rounds, prompt_tokens, loaded.config.vocab_size, seed=len(points)
            )
            console.print(f"{name}: {count} together")
            points.append(
                engine_point(
                    engine,
                    prompts,
                    one,
                    concurrency=count,
                    requests=count * rounds,
                    series=name,
                )
            )
    facts = {"environment": provenance(), "runtime": asdict(runtime), "numerics": numerics}
    return points, facts | {"determinism": determinism}


def _of_server(
    model: str,
    url: str,
    key: str | None,
    counts: list[int],
    prompt_tokens: int,
    max_tokens: int,
    rounds: int,
) -> "tuple[list[Point], dict[str, Any]]":
    from deepinfer_jax.cli.bench_points import random_prompts, server_point
    from deepinfer_jax.cli.render import read_encoder

    vocab = read_encoder(model).config.vocab_size
    points = []
    for number, count in enumerate(counts):
        prompts = random_prompts(count * rounds, prompt_tokens, vocab, seed=number)
        points.append(
            server_point(
                url.rstrip("/"),
                model,
                prompts,
                concurrency=count,
                requests=count * rounds,
                max_tokens=max_tokens,
                key=key,
            )
        )
    return points, {"url": url}


def _print(points: "list[Point]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "together", "tokens/s", "of a request", "first token ms", "next token ms")
    for one in points:
        table.add_row(
            one.series,
            str(one.concurrency),
            f"{one.tokens_per_s:.1f}",
            f"{one.tokens_per_s_per_request:.1f}",
            _range(one.first_token_ms),
            _range(one.between_ms),
        )
    Console().print(table)


def _range(values: dict[str, float]) -> str:
    return f"{values['p50']:.1f} (p99 {values['p99']:.1f})" if values else "-"
