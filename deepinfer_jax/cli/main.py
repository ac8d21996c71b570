"""Entry point of `deepinfer-jax`: finds the sub-command's module and imports that one alone."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

# Name -> one line of help. The function is `deepinfer_jax.cli.<name>.<name>`, imported when called;
# a name of two words has an underscore there.
COMMANDS = {
    "generate": "Continue a prompt and stream the text, or answer every line of a file.",
    "score": "Log-probabilities of the tokens of a text, or of every line of a file.",
    "chat": "Talk to a model, or answer one message from a pipe.",
    "serve": "Answer OpenAI's and Anthropic's protocols over HTTP.",
    "bench": "Speed against the number of requests that run together, as table, JSON and PNG.",
    "bench mask": "What grammars cost on the host: time to the first mask, and between masks.",
    "render": "The prompt that a conversation becomes, as text or as token ids.",
    "tokenize": "Token ids of a text, and back.",
    "inspect": "Parts, shapes and bytes of a checkpoint or of a config alone.",
    "convert": "Write a checkpoint as the stacked Orbax tree it is loaded as.",
    "train": "Train nano from packed text, resumably.",
    "train draft": "Train the draft stages of a checkpoint, the rest frozen.",
    "train vision": "Train an image encoder for a checkpoint, the rest frozen.",
    "train temperatures": "Calibrate the confidence of a checkpoint's drafts.",
    "eval": "How often a checkpoint answers held-out items of nano's corpus correctly.",
    "replay": "Run the request of a run record again and compare what comes out.",
    "verify": "Whether a checkpoint has the same bits in any batch, chunking, cache and draft.",
    "plan": "Bytes, exchanges and time of a model on many devices, before there are any.",
    "env": "Versions, devices, flags that matter, and what each extra lacks.",
}

#: Set by a shell that wants to complete a line.
_COMPLETE = "_DEEPINFER_JAX_COMPLETE"
# rich_markup_mode=None below: help without Rich, whose import takes longer than all of the rest.


class _Commands(TyperGroup):
    """The commands; one that a shell completes is imported for its options."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command."""
        if _COMPLETE in os.environ and cmd_name in COMMANDS:
            return get_command(command_app(cmd_name))
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="deepinfer-jax",
    help="Functional JAX inference for DeepSeek-V4.1-Flash.",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def with_config_file(name: str, arguments: list[str]) -> list[str]:
    """Returns arguments with the options of `--config FILE` before them, so that they win.

    The file is TOML: options by name at its top, and in a table of the command's name.
    """
    if not any(one == "--config" or one.startswith("--config=") for one in arguments):
        return arguments
    from deepinfer_jax.cli.config_file import read_options, take_config

    path, rest = take_config(arguments)
    return [*read_options(path, name), *rest]


def command_app(name: str) -> typer.Typer:
    """Returns the sub-command `name` as an app of its own; imports its module."""
    place = name.replace(" ", "_")
    function: Callable[..., object] = getattr(import_module(f"deepinfer_jax.cli.{place}"), place)
    sub_app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    sub_app.command(name)(function)
    return sub_app


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits; an error of this package is one line.

    Exit codes: 0 done, 1 a comparison failed, 2 what was asked for cannot be honoured, 3 the
    checkpoint or its tokenizer is not as it must be, 4 not enough memory, 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    from deepinfer_jax.errors import DeepInferError

    try:
        words = next((n for n in (2, 1) if " ".join(arguments[:n]) in COMMANDS), 0)
        if words:
            name = " ".join(arguments[:words])
            rest = with_config_file(name, arguments[words:])
            command_app(name)(args=rest, prog_name=f"deepinfer-jax {name}")
        else:
            app(args=arguments, prog_name="deepinfer-jax")
    except DeepInferError as error:
        print(f"deepinfer-jax: error: {error}", file=sys.stderr)
        raise SystemExit(_exit_code(error)) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"deepinfer-jax: error: not enough memory: {error}", file=sys.stderr)
        raise SystemExit(4) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _exit_code(error: Exception) -> int:
    from deepinfer_jax.errors import CapacityError, CheckpointError, TokenizerError

    if isinstance(error, CapacityError):
        return 4
    return 3 if isinstance(error, CheckpointError | TokenizerError) else 2


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("deepinfer-jax"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Functional JAX inference for DeepSeek-V4.1-Flash."""


def _add_to_help(name: str, line: str) -> None:
    # The app only lists names; `main` runs the command, so that help imports none of them.
    @app.command(name, help=line, short_help=line)
    def listed() -> None:
        command_app(name)()


for _name, _line in COMMANDS.items():
    _add_to_help(_name, _line)

if __name__ == "__main__":
    main()
