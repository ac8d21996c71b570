"""`deepinfer-jax render`: the prompt that a conversation becomes."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from deepinfer_jax.chat.encode import ChatEncoder, RenderedText


def render(
    messages: Annotated[
        str,
        typer.Argument(
            help="A JSON file with a list of messages or a Chat Completions body; - reads stdin."
        ),
    ],
    model: Annotated[
        str, typer.Option(help='A checkpoint folder, a hub id, or "nano" (embedded).')
    ] = "nano",
    thinking: Annotated[
        bool | None,
        typer.Option(help="Whether the answer begins with reasoning; on unless the file says no."),
    ] = None,
    effort: Annotated[
        str | None, typer.Option(help="Reasoning effort: minimal, low, medium, high, xhigh, max.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print the token ids instead.")] = False,
) -> None:
    """Prompt of MESSAGES on stdout. On a terminal, special tokens are coloured."""
    from deepinfer_jax.chat.messages import build_conversation

    arguments = read_messages(messages)
    if thinking is not None:
        arguments["thinking"] = thinking
        if not thinking:
            arguments.pop("reasoning_effort", None)
    if effort is not None:
        arguments["reasoning_effort"] = effort
    conversation = build_conversation(arguments.pop("messages"), **arguments)
    encoder = read_encoder(model)
    if ids:
        typer.echo(json.dumps(list(encoder.encode(conversation))))
    else:
        _print(encoder.render(conversation))


def read_messages(source: str) -> dict[str, Any]:
    """Returns the arguments of `ChatEncoder.prepare` in a JSON file; "-" is stdin.

    Raises:
        InputError: The file is unreadable, no JSON, or neither messages nor a body.
    """
    from deepinfer_jax.chat.request import prompt_arguments
    from deepinfer_jax.errors import InputError

    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        value = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(
            f"MESSAGES must be a readable JSON file or -, got {source!r}: {error}"
        ) from error
    return prompt_arguments(value if isinstance(value, dict) else {"messages": value})


def read_encoder(source: str) -> "ChatEncoder":
    """Returns the prompt encoding of a checkpoint, without reading its weights."""
    from deepinfer_jax.chat.encode import ChatEncoder
    from deepinfer_jax.config.hf import read_config
    from deepinfer_jax.loading import read_tokenizer, resolve_folder

    folder = resolve_folder(source)
    tokenizer = read_tokenizer(folder)
    encoder = ChatEncoder(tokenizer, read_config(folder))
    note_vocabulary(folder, encoder.tokenizer.get_vocab_size())
    return encoder


def note_vocabulary(folder: Path, vocabulary: int) -> None:
    """Says on stderr whose token ids these are, if they are those of the embedded model."""
    from deepinfer_jax.loading import EMBEDDED

    if folder == EMBEDDED:
        typer.echo(
            f"These are ids of nano, which has {vocabulary}. Other checkpoints have other ids: "
            "--model",
            err=True,
        )


def _print(rendered: "RenderedText") -> None:
    from rich.console import Console
    from rich.text import Text

    if not sys.stdout.isatty():
        sys.stdout.write(rendered.text + "\n")
        return
    text = Text(rendered.text)
    for start, end in rendered.special_ranges:
        text.stylize("bold cyan", start, end)
    Console(highlight=False, soft_wrap=True).print(text)
