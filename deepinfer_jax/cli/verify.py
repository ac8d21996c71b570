"""`deepinfer-jax verify`: whether a checkpoint has the same bits in any company, here."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deepinfer_jax.cli.options import ModelArgument, NumericsOption

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.invariance.report import Report


def verify(
    model: ModelArgument = "nano",
    numerics: NumericsOption = "checkpoint",
    level: Annotated[
        Literal["off", "run", "batch"],
        typer.Option(
            help='Determinism level that the model is loaded with; only "batch" promises.'
        ),
    ] = "batch",
    cases: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Cases as in 'chunks;random=50;engine: together', NAME=RUNS for so many runs; "
            "all by default. 'list' names them.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of tokens and of what is random.")] = 0,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Begin no case after that time."),
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of a cache block; few by default.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report to a file.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Compare with a report that somebody else wrote with --json."
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw which positions of which case differ.")
    ] = None,
) -> None:
    """Runs MODEL in adverse company and compares every bit with the lone run.

    With --against: says whether the two runs are comparable, then whether their bits match, and if
    not where. Exit code 0: all bits are equal; 1: some are not, here or against a comparable
    report, and it is said where; 2: usage.
    """
    from rich.console import Console

    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.errors import ConfigError
    from deepinfer_jax.invariance.fingerprint import read_report
    from deepinfer_jax.invariance.runner import CASES, select_cases
    from deepinfer_jax.pictures import require_matplotlib

    if cases == "list":
        typer.echo("\n".join(CASES))
        return
    names = None if cases is None else [name.strip() for name in cases.split(";") if name.strip()]
    select_cases(names)
    _check_files(to, png)
    theirs = None if against is None else read_report(against)
    if png is not None:
        require_matplotlib("--png")
    if level != "batch":
        typer.echo(f'level "{level}" promises no equal bits: expect differences', err=True)
    runtime = RuntimeConfig()
    if block_tokens is not None:
        runtime = RuntimeConfig(block_tokens=block_tokens)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    report = run(console, model, numerics, level, runtime, names, seed, budget)
    Console(highlight=False).print(report.table())
    if to is not None:
        to.write_text(report.to_json(), encoding="utf-8")
        console.print(f"written: {to}")
    if png is not None:
        report.plot(png)
        console.print(f"written: {png}")
    if not any(row.skipped is None for row in report.rows):
        raise ConfigError("no case ran: raise --budget, or name others with --cases")
    console.print(summary(report))
    is_broken = theirs is not None and compare(theirs, report)
    if is_broken or not report.is_equal:
        raise typer.Exit(1)


def run(
    console: "Console",
    source: str,
    numerics: str,
    level: str,
    runtime: "RuntimeConfig",
    names: list[str] | None,
    seed: int,
    budget: float | None,
) -> "Report":
    """Loads the model and verifies it, with the running case on a terminal."""
    from deepinfer_jax.cli.generate import load_with_bar
    from deepinfer_jax.determinism import determinism_report
    from deepinfer_jax.invariance.runner import verify_invariance

    model = load_with_bar(console, source, numerics=numerics, determinism=level)
    for name, (held, reason) in determinism_report(model, runtime).items():
        console.print(f"{name} {'claimed' if held else 'not claimed'}: {reason}", markup=False)
    with console.status("") as status:
        return verify_invariance(
            model,
            runtime,
            cases=names,
            seed=seed,
            budget_s=budget,
            progress=lambda name: status.update(f"running: {name}"),
        )


def compare(theirs: dict[str, Any], report: "Report") -> bool:
    """Prints how a report compares with another; returns whether promised bits differ."""
    from deepinfer_jax.invariance.fingerprint import compare_reports

    found = compare_reports(theirs, json.loads(report.to_json()))
    for line in found.lines():
        typer.echo(line)
    return found.is_broken


def summary(report: "Report") -> str:
    """Returns one line: how many positions of how many cases differ."""
    ran = [row for row in report.rows if row.skipped is None and not row.expects_difference]
    positions, wrong = (
        sum(getattr(row, name) for row in ran) for name in ("positions", "differing")
    )
    failed = [row.name for row in report.rows if not row.is_right]
    text = f"{positions} positions of {len(ran)} cases in {report.seconds:.0f} s: " + (
        f"{wrong} differ" if wrong else "all bits equal"
    )
    return text if not failed else f"{text}; failed: {', '.join(failed)}"


def _check_files(*paths: Path | None) -> None:
    from deepinfer_jax.errors import ConfigError

    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(
                f"a file is written into an existing folder, got {path}: make it first"
            )
