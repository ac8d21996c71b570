"""`deepinfer-jax score`: how probable a model finds the tokens of given texts."""

import json
import sys
from itertools import batched
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_jax.cli.options import (
    RUNTIME,
    BosOption,
    DeterminismOption,
    ModelOption,
    NumericsOption,
    runtime_config,
    with_fields,
)


@with_fields(RUNTIME)
def score(
    text: Annotated[str | None, typer.Argument(help="Text to score.")] = None,
    model: ModelOption = "nano",
    numerics: NumericsOption = "checkpoint",
    determinism: DeterminismOption = "batch",
    bos: BosOption = True,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help='Score its JSON lines: "prompt", "token_ids" or "messages", and "id" if wanted.',
        ),
    ] = None,
    top_logprobs: Annotated[
        int, typer.Option(min=0, help="Also that many best tokens at each place.")
    ] = 0,
    **fields: Any,
) -> None:
    """Log-probabilities of TEXT's tokens after the first, as a JSON object on stdout.

    With --input it prints one object a line, in the order of the input.
    """
    from rich.console import Console

    from deepinfer_jax.cli.generate import load_with_bar
    from deepinfer_jax.errors import InputError
    from deepinfer_jax.jobs.lines import (
        Task,
        describe_score,
        dump,
        parse_line,
        read_lines,
        score_line,
    )
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.sampling.params import SamplingParams

    if (text is None) == (source is None):
        raise InputError("score takes TEXT or --input, one of them")
    if source is not None and not source.is_file():
        raise InputError(f"--input must be a file, got {source}")
    runtime = runtime_config(fields)
    params = SamplingParams(max_tokens=0, prompt_logprobs=top_logprobs, seed=0)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    llm = LLM(
        load_with_bar(console, model, numerics=numerics, determinism=determinism), runtime=runtime
    )
    if text is not None:
        ids = [llm.model.config.bos_token_id] * bos + llm.encode(text)
        (output,) = llm.generate([ids], params)
        sys.stdout.write(json.dumps(describe_score(output)) + "\n")
        return
    assert source is not None
    for lines in batched(read_lines(source), runtime.max_seqs):
        parsed = [parse_line(llm, line, params, bos=bos, is_fixed=True) for line in lines]
        tasks = [item for item in parsed if isinstance(item, Task)]
        outputs = iter(llm.generate([task.token_ids for task in tasks], params))
        for item in parsed:
            record = score_line(item, next(outputs)) if isinstance(item, Task) else item
            sys.stdout.write(dump(record).decode("ascii"))
        sys.stdout.flush()
