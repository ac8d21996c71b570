"""`deepinfer-jax tokenize`: token ids of a text, and back."""

import json
import sys
from typing import Annotated

import typer


def tokenize(
    text: Annotated[
        str | None,
        typer.Argument(help="Text to encode; without it (and without --decode), stdin."),
    ] = None,
    decode: Annotated[
        str | None, typer.Option(metavar="IDS", help='Ids to turn into text: "1, 2, 3" or [1, 2].')
    ] = None,
    pieces: Annotated[
        bool, typer.Option("--pieces", help="One line per token: id, tab, its text in JSON.")
    ] = False,
    model: Annotated[
        str, typer.Option(help='A checkpoint folder, a hub id, or "nano" (embedded).')
    ] = "nano",
) -> None:
    """Token ids of TEXT as a JSON list on stdout.

    This is the raw encoding of `generate`: the spelling of a special token becomes that token. In
    a chat it does not (`render --ids`).
    """
    from deepinfer_jax.cli.render import note_vocabulary
    from deepinfer_jax.errors import InputError, TokenizerError
    from deepinfer_jax.loading import read_tokenizer, resolve_folder

    if text is not None and decode is not None:
        raise InputError("tokenize takes TEXT or --decode, got both: leave one out")
    folder = resolve_folder(model)
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise TokenizerError(f"tokenize needs tokenizer.json, and {folder} has none")
    note_vocabulary(folder, tokenizer.get_vocab_size())
    if decode is None:
        raw = sys.stdin.read() if text is None else text
        try:
            raw.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"TEXT must be valid UTF-8, got {raw!r}: {error}") from error
        ids = list(tokenizer.encode(raw, add_special_tokens=False).ids)
    else:
        ids = _parse_ids(decode, tokenizer.get_vocab_size())
    if pieces:
        for token in ids:
            piece = tokenizer.decode([token], skip_special_tokens=False)
            typer.echo(f"{token}\t{json.dumps(piece, ensure_ascii=False)}")
    elif decode is None:
        typer.echo(json.dumps(ids))
    else:
        typer.echo(tokenizer.decode(ids, skip_special_tokens=False))


def _parse_ids(text: str, vocabulary: int) -> list[int]:
    from deepinfer_jax.errors import InputError

    try:
        ids = [int(word) for word in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError as error:
        raise InputError(f"--decode takes integers, got {text!r}: {error}") from error
    outside = [token for token in ids if not 0 <= token < vocabulary]
    if outside:
        raise InputError(
            f"--decode takes ids of this tokenizer, 0..{vocabulary - 1}, got {outside}: name the "
            "checkpoint they belong to with --model"
        )
    return ids
