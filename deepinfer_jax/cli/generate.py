"""`deepinfer-jax generate`: continue a prompt, printing text as it is produced."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_jax.loading import Model


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    model: Annotated[
        str, typer.Option(help='A checkpoint folder, a hub id, or "nano" (embedded).')
    ] = "nano",
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to generate.")] = 32,
    numerics: Annotated[
        Literal["checkpoint", "float32"],
        typer.Option(help="The checkpoint's rounding points, or plain float32."),
    ] = "checkpoint",
    determinism: Annotated[
        Literal["off", "run", "batch"], typer.Option(help="Which bits are promised.")
    ] = "batch",
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random seed; drawn and shown if not given.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end-of-text token.")] = False,
    bos: Annotated[
        bool, typer.Option(help="Put the begin-of-text token first, as in training.")
    ] = True,
) -> None:
    """Continuation of PROMPT. Text goes to stdout, everything else to stderr."""
    from rich.console import Console

    from deepinfer_jax.llm import LLM
    from deepinfer_jax.sampling.params import SamplingParams
    from deepinfer_jax.sampling.random import fresh_seed

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    started = time.perf_counter()
    llm = LLM(
        load_with_bar(console, model, numerics=numerics, determinism=determinism),
    )
    loaded = time.perf_counter()
    note_embedded(console, model)
    params = SamplingParams(
        temperature=temperature,
        seed=fresh_seed() if seed is None else seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    ids = llm.encode(prompt)
    if bos:
        ids = [llm.model.config.bos_token_id, *ids]
    count, first, reason = 0, None, None
    for delta in llm.stream(ids, params):
        first = first or time.perf_counter()
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        count += len(delta.token_ids)
        reason = delta.finish_reason
    sys.stdout.write("\n")
    ended = time.perf_counter()
    first = first or ended
    console.print(
        f"load {loaded - started:.1f} s, first token (with compilation) {first - loaded:.1f} s, "
        f"{count} tokens in {ended - loaded:.1f} s, finish: {reason}"
        + (f", seed {params.seed}" if temperature else "")
    )


def note_embedded(console: "Console", source: str) -> None:
    """Says what the embedded model can do, if that is the source."""
    if source == "nano":
        console.print(
            "[dim]nano is trained on synthetic text alone: short stories and questions about them, "
            "JSON extraction, sums, lists, code traces, recall and tool calls.[/dim]"
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
