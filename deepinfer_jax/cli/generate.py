"""`deepinfer-jax generate`: continue a prompt, or answer every line of a file."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.cli.devices import DistributedOption, MeshOption, enter_devices
from deepinfer_jax.cli.options import (
    ON_MESH,
    RUNTIME,
    SAMPLING,
    BosOption,
    DeterminismOption,
    ModelOption,
    NumericsOption,
    observed,
    runtime_config,
    sampling_params,
    with_fields,
)

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_jax.engine.engine import Engine
    from deepinfer_jax.grammar.spec import Grammar
    from deepinfer_jax.jobs.run import JobProgress
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.loading import Model
    from deepinfer_jax.sampling.params import SamplingParams
    from deepinfer_jax.vision.image import ImageInput

_REPORT_S = 5.0  # between lines of progress, where there is no bar


@with_fields(SAMPLING, RUNTIME, ON_MESH, temperature=0.0, max_tokens=32)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    model: ModelOption = "nano",
    numerics: NumericsOption = "checkpoint",
    determinism: DeterminismOption = "batch",
    mesh: MeshOption = None,
    distributed: DistributedOption = False,
    bos: BosOption = True,
    source: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE", help="Answer its JSON lines instead of PROMPT."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Where answers go; continued if it exists."),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text is JSON of this JSON schema.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="The whole text matches this.")
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The text is of this grammar, in Lark or GBNF."),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Shown where PROMPT has the image token, or before it; several may be given.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print the engine's counters at the end, on stderr.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a profile of the run, for Perfetto.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the engine's steps, for Perfetto.")
    ] = None,
    **fields: Any,
) -> None:
    """Continuation of PROMPT. Text goes to stdout, everything else to stderr.

    With --input and --output it is a job. A line of the input is a JSON object:
    "prompt", "token_ids" or "messages", an "id" if wanted, and sampling fields
    of its own. A job that was stopped is continued by the same command, and
    every line is answered once.

    With --distributed every process of a job is given the same options; the
    first answers, and the others run what it does.
    """
    from rich.console import Console

    from deepinfer_jax.errors import InputError
    from deepinfer_jax.llm import LLM

    if (prompt is None) == (source is None):
        raise InputError("generate takes PROMPT or --input, one of them")
    if (source is None) != (target is None):
        raise InputError("--input and --output go together: give both")
    if source is not None and not source.is_file():
        raise InputError(f"--input must be a file, got {source}")
    if source is not None and image:
        raise InputError("--image goes with PROMPT: leave it out with --input")
    if source is not None and as_json:
        raise InputError("--output is JSON anyway: leave --json out")
    constraint = _grammar(schema, regex, grammar)
    params, runtime = sampling_params(fields, grammar=constraint), runtime_config(fields)
    if source is None and not as_json and (params.logprobs, params.prompt_logprobs) != (None, None):
        raise InputError("log-probabilities are printed with --json: add it")
    job, sizes = enter_devices(mesh, distributed)
    if job is not None:  # nothing here shows records, whose hash of the weights a job takes early
        runtime = replace(runtime, record=None)
    follows = job is not None and job.index > 0
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=follows)
    started = time.perf_counter()
    options = {"numerics": numerics, "determinism": determinism, "mesh": sizes}
    llm = LLM(load_with_bar(console, model, **options), runtime=runtime)
    note_embedded(console, model)
    seconds = time.perf_counter() - started
    with llm:
        if follows:
            llm.follow()
            return
        if job is not None:
            llm.stats()  # makes the engine: the other processes end with it
        with observed(llm, stats=stats, profile=profile, trace=trace):
            if source is not None and target is not None:
                _run_job(console, llm, source, target, params, bos)
            elif prompt is not None:
                ids, images = llm.read_prompt(prompt, [Path(name) for name in image or ()])
                ids = [llm.model.config.bos_token_id] * bos + ids
                _answer(console, llm, ids, images, params, as_json, seconds)


def _grammar(schema: Path | None, regex: str | None, grammar: Path | None) -> "Grammar | None":
    """Returns the grammar of the options; None if there is none.

    Raises:
        InputError: there are two, a file cannot be read, or what is in it is malformed.
    """
    from deepinfer_jax.errors import InputError
    from deepinfer_jax.grammar.spec import Grammar

    if sum(one is not None for one in (schema, regex, grammar)) > 1:
        raise InputError("--schema, --regex and --grammar exclude each other: give one")
    if regex is not None:
        return Grammar.regex(regex)
    path = schema or grammar
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be a text file: {error}") from error
    return Grammar.json_schema(text) if schema else Grammar.ebnf(text)


def _answer(
    console: "Console",
    llm: "LLM",
    ids: list[int],
    images: "tuple[ImageInput, ...]",
    params: "SamplingParams",
    as_json: bool,
    load_s: float,
) -> None:
    """Prints the completions of one prompt: text as it comes, if there is one text."""
    from deepinfer_jax.jobs.lines import describe_output
    from deepinfer_jax.sampling.random import fresh_seed

    params = replace(params, seed=fresh_seed() if params.seed is None else params.seed)
    began = time.perf_counter()
    first: float | None = None
    if as_json or params.n > 1:
        (output,) = llm.generate([ids], params, images=[images])
        if as_json:
            sys.stdout.write(json.dumps(describe_output(output)) + "\n")
        for index, one in enumerate(() if as_json else output.outputs, 1):
            sys.stdout.write(one.text + "\n")
            sys.stdout.flush()
            console.print(f"[dim]{index} of {params.n}, finish: {one.finish_reason}[/dim]")
        count = sum(len(one.token_ids) for one in output.outputs)
        reason, first = output.finish_reason, began + output.metrics.first_token_s
    else:
        count, reason = 0, None
        for delta in llm.stream(ids, params, images=images):
            first = first or time.perf_counter()
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            count += len(delta.token_ids)
            reason = delta.finish_reason
        sys.stdout.write("\n")
    ended = time.perf_counter()
    console.print(
        f"load {load_s:.1f} s, first token (with compilation) {(first or ended) - began:.1f} s, "
        f"{count} tokens in {ended - began:.1f} s, finish: {reason}"
        + (f", seed {params.seed}" if params.temperature else "")
    )


def _run_job(
    console: "Console", llm: "LLM", source: Path, target: Path, params: "SamplingParams", bos: bool
) -> None:
    from deepinfer_jax.jobs.run import run_job

    try:
        state = run_job(llm, source, target, params, bos=bos, report=_reporter(console))
    except KeyboardInterrupt:
        console.print("interrupted; the same command continues")
        raise typer.Exit(130) from None
    console.print(
        f"{target}: {state.done} of {state.total} lines answered, {state.done - state.before} now"
        + (f", {state.failed} of them with errors" if state.failed else "")
    )


def _reporter(console: "Console") -> "Callable[[JobProgress, Engine], None]":
    """Returns what prints progress: one line that is rewritten on a terminal, a few elsewhere."""
    began = shown = 0.0
    before = 0

    def report(state: "JobProgress", engine: "Engine") -> None:
        nonlocal began, shown, before
        now, tokens = time.perf_counter(), engine.counters["tokens"]
        if not began:
            began, before, shown = now, tokens, now
            console.print(f"{state.before} of {state.total} lines answered, seed {state.seed}")
        if now - shown < (0.2 if console.is_terminal else _REPORT_S):
            return
        shown = now
        speed = (tokens - before) / max(now - began, 1e-3)
        text = f"{state.done} of {state.total} lines answered, {speed:.0f} tokens/s"
        console.print(text, end="\r" if console.is_terminal else "\n")

    return report


def note_embedded(console: "Console", source: str) -> None:
    """Says what the embedded model can do, if that is the source."""
    if source == "nano":
        console.print(
            "[dim]nano is trained on synthetic text alone: short stories and questions about them, "
            "JSON extraction, sums, lists, code traces, recall, tool calls and questions about "
            "drawings.[/dim]"
        )


def load_with_bar(console: "Console", source: str, **options: Any) -> "Model":
    """Returns the loaded model, with a bar of bytes read."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn

    from deepinfer_jax.loading import load

    with Progress(
        "loading",
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("loading", total=None)
        return load(
            source,
            progress=lambda done, total, _: bar.update(task, completed=done, total=total),
            **options,
        )
