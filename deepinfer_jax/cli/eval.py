"""`deepinfer-jax eval`: how often a checkpoint answers held-out items of the corpus correctly."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deepinfer_jax.cli.options import DeterminismOption, ModelArgument, NumericsOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deepinfer_jax.config.model import Replay
    from deepinfer_jax.loading import Model
    from deepinfer_jax.training.evaluate import Answer, Row


def eval(
    model: ModelArgument = "nano",
    numerics: NumericsOption = "checkpoint",
    determinism: DeterminismOption = "batch",
    tasks: Annotated[
        str | None,
        typer.Option(help="Rows or tasks, as in story,needle-1k,loops,perplexity; all by default."),
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Items of every row.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the items, and of sampled answers.")] = 0,
    compare: Annotated[
        Literal["checkpoint", "float32"] | None,
        typer.Option(help="Answer again in this arithmetic; count greedy verdicts that change."),
    ] = None,
    replay: Annotated[
        Literal["off", "mask", "compact"],
        typer.Option(help="What late layers see of a prompt: all, or its end."),
    ] = "off",
    workers: Annotated[int, typer.Option(min=1, help="Batches that run at the same time.")] = 2,
    to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything to a file.")
    ] = None,
) -> None:
    """Table of MODEL on the test split of nano's corpus; every answer is scored exactly.

    Models that see are also asked about drawings: vision_colour, vision_shape and so on.
    """
    from rich.console import Console

    from deepinfer_jax.errors import ConfigError
    from deepinfer_jax.training.evaluate import choose_rows

    rows = choose_rows(None if tasks is None else tasks.split(","), n)
    if compare == numerics:
        raise ConfigError(f"--compare names the other arithmetic, got {compare!r} for both")
    if to is not None and not to.parent.is_dir():
        raise ConfigError(f"--json writes into an existing folder, got {to}: make it first")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    record = collect(
        console,
        model,
        rows,
        numerics=numerics,
        determinism=determinism,
        compare=compare,
        replay=replay,
        seed=seed,
        workers=workers,
        were_named=tasks is not None,
    )
    Console(highlight=False).print(make_table(record))
    console.print(summary_line(record))
    if to is not None:
        to.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"written: {to}")


def collect(
    console: "Console",
    source: str,
    rows: "tuple[Row, ...]",
    *,
    numerics: str,
    determinism: str,
    compare: str | None,
    replay: "Replay",
    seed: int,
    workers: int,
    were_named: bool = True,
) -> dict[str, Any]:
    """Returns everything that `eval` prints or writes, as plain values; arguments as there.

    were_named: whether somebody asked for these rows one by one (`seen_rows`).
    """
    from deepinfer_jax.cli.generate import load_with_bar
    from deepinfer_jax.training import evaluate

    def answer(arithmetic: str) -> "tuple[Model, list[Answer]]":
        model = load_with_bar(console, source, numerics=arithmetic, determinism=determinism)
        asked = seen_rows(model, rows, were_named=were_named)
        run = answers_with_bar(console, model, asked, replay=replay, seed=seed, workers=workers)
        return model, run

    started = time.perf_counter()
    model, answers = answer(numerics)
    perplexity = None
    for row in rows:
        if row.name == evaluate.PERPLEXITY.name:
            with console.status("perplexity of stories"):
                perplexity = asdict(evaluate.story_perplexity(model, row, seed))
    compared = None
    if compare is not None:
        flips = evaluate.flips(answers, answer(compare)[1])
        compared = {
            "numerics": compare,
            "items": sum(not a.is_sampled for a in answers),
            "flips": [{numerics: asdict(a), compare: asdict(b)} for a, b in flips],
        }
    return {
        "source": source,
        "split": evaluate.SPLIT,
        "seed": seed,
        "numerics": numerics,
        "determinism": determinism,
        "replay": replay,
        "rows": [asdict(row) | {"rate": row.rate} for row in evaluate.summarise(answers)],
        "perplexity": perplexity,
        "compare": compared,
        "seconds": round(time.perf_counter() - started, 1),
        "answers": [asdict(a) for a in answers],
    }


def seen_rows(model: "Model", rows: "tuple[Row, ...]", *, were_named: bool) -> "tuple[Row, ...]":
    """Returns the rows that a model can be asked: none about drawings if it does not see.

    Raises:
        ConfigError: such rows were named, and it does not.
    """
    from deepinfer_jax.errors import ConfigError
    from deepinfer_jax.training.drawings import DRAWING_TASKS

    blind = [row.name for row in rows if row.task in DRAWING_TASKS]
    if model.config.vision is not None or not blind:
        return rows
    if were_named:
        raise ConfigError(
            f"tasks {blind} ask about images, and {model.source} has no image encoder: leave them "
            "out, or train one with `train vision`"
        )
    return tuple(row for row in rows if row.name not in blind)


def answers_with_bar(
    console: "Console",
    model: "Model",
    rows: "tuple[Row, ...]",
    *,
    replay: "Replay",
    seed: int,
    workers: int,
) -> "list[Answer]":
    """Returns the answers of all rows that ask for any, with a bar of items."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from deepinfer_jax.llm import LLM
    from deepinfer_jax.training import evaluate

    llm = LLM(model)
    asked = [row for row in rows if row.name != evaluate.PERPLEXITY.name]
    trials = [trial for row in asked for trial in evaluate.make_trials(llm, row, seed)]
    label = f"answering ({model.config.execution.numerics})"
    columns = (label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=len(trials))
        return evaluate.run_trials(
            model,
            trials,
            workers=workers,
            replay=replay,
            report=lambda done: bar.advance(task, done),
        )


def make_table(record: dict[str, Any]) -> "Table":
    """Returns the table of a record: a line a row, perplexity and changed verdicts below."""
    from rich.table import Table

    table = Table("row", box=None, pad_edge=False)
    for title in ("items", "correct", "%", "mean tokens"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in record["rows"]:
        note = f"valid calls {row['valid_calls']} of {row['calls']}" if row["calls"] else ""
        table.add_row(
            row["name"],
            str(row["count"]),
            str(row["correct"]),
            f"{100 * row['rate']:.1f}",
            f"{row['mean_tokens']:.1f}",
            note,
        )
    if found := record["perplexity"]:
        table.add_row(
            "perplexity",
            str(found["stories"]),
            *("", "", ""),
            f"{found['perplexity']:.3f} a token, "
            f"{found['bits_per_character']:.3f} bits a character",
        )
    if found := record["compare"]:
        note = f"changed from {record['numerics']} to {found['numerics']}"
        table.add_row("flips", str(found["items"]), str(len(found["flips"])), "", "", note)
    return table


def summary_line(record: dict[str, Any]) -> str:
    """Returns what was evaluated, in one line."""
    return (
        f"{record['source']}, {record['split']} split, seed {record['seed']}, "
        f"{record['numerics']} arithmetic, level {record['determinism']}: {record['seconds']} s"
    )
