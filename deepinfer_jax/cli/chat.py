"""`deepinfer-jax chat`: talk to a model, or answer one message from a pipe."""

import sys
from typing import Annotated, Any

import typer

from deepinfer_jax.cli.options import DeterminismOption, ModelOption, NumericsOption
from deepinfer_jax.cli.talk import COMMANDS, Message, Talk

HELP = "/help lists commands, /exit or Ctrl-D ends, Ctrl-C stops an answer."


def chat(
    model: ModelOption = "nano",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model reason before it answers.")] = True,
    effort: Annotated[
        str | None, typer.Option(help="Reasoning effort: minimal, low, medium, high, xhigh, max.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Probability mass to sample from.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random seed; drawn and shown if not given.")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Shown with the first message; several may be given."),
    ] = None,
    numerics: NumericsOption = "checkpoint",
    determinism: DeterminismOption = "batch",
) -> None:
    """Conversation with a model.

    On a terminal it goes on until /exit; otherwise stdin is one message. If stdout is no terminal,
    it gets the answer alone, and reasoning goes to stderr.
    """
    from rich.console import Console

    from deepinfer_jax import LLM
    from deepinfer_jax.chat.encode import ChatEncoder
    from deepinfer_jax.chat.messages import build_conversation
    from deepinfer_jax.cli.generate import load_with_bar, note_embedded
    from deepinfer_jax.errors import InputError
    from deepinfer_jax.sampling.params import SamplingParams
    from deepinfer_jax.sampling.random import fresh_seed

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=fresh_seed() if seed is None else seed,
    )
    is_terminal = sys.stdin.isatty()
    message = None if is_terminal else sys.stdin.read().strip()
    if message == "":
        raise InputError("chat answers the message on stdin, and it is empty: write one to it")
    options: dict[str, Any] = {"thinking": thinking, "reasoning_effort": effort}
    build_conversation(message or "x", **options)  # what is wrong shows before weights are read
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    llm = LLM(load_with_bar(console, model, numerics=numerics, determinism=determinism))
    encoder = ChatEncoder(llm.model.tokenizer, llm.model.config)
    note_embedded(console, model)
    talk = Talk(llm=llm, encoder=encoder, params=params, options=options, console=console)
    talk.reset(system)
    for name in image or ():
        talk.attach(name)
    if message is None:
        repl(talk)
    else:
        talk.answer(message)


def repl(talk: Talk) -> None:
    """Reads messages and commands until /exit or the end of input."""
    import contextlib

    from deepinfer_jax.errors import InputError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` line editing and history)

    talk.console.print(HELP)
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:  # ends an answer, not the program
            talk.console.print()
            continue
        except EOFError:
            talk.console.print()
            return
        if line == "/exit":
            return
        try:
            if line.startswith("/"):
                _obey(talk, line)
            elif line:
                talk.answer(line)
            while results := _ask_results(talk):
                talk.go_on([*talk.messages, *results])
        except KeyboardInterrupt:
            talk.console.print("\nStopped; this turn is forgotten.")
            _close_calls(talk)
        except InputError as error:
            talk.console.print(f"{error}. /reset begins again.", markup=False)
            _close_calls(talk)


def _obey(talk: Talk, line: str) -> None:
    """Runs a command."""
    name, _, argument = line.partition(" ")
    name = {"/clear": "/reset"}.get(name, name)
    if name == "/help":
        for command, (arguments, what, _) in COMMANDS.items():
            talk.console.print(f"{command} {arguments}".ljust(22) + what, markup=False)
        talk.console.print("/exit".ljust(22) + "ends")
    elif name in COMMANDS:
        said = COMMANDS[name][2](talk, argument.strip())
        if said:
            talk.console.print(said, markup=False)
    else:
        talk.console.print(f"No command is named {name}. {HELP}", markup=False)


def _ask_results(talk: Talk) -> list[Message]:
    """Returns what the user gives as results of the tool calls that are open, if there are any.

    Raises:
        KeyboardInterrupt: the user gives none.
    """
    results: list[Message] = []
    for call in talk.open_calls:
        function = call["function"]
        try:
            text = input(f"result of {function['name']} {function['arguments']}> ")
        except EOFError as error:
            raise KeyboardInterrupt from error
        results.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return results


def _close_calls(talk: Talk) -> None:
    """Forgets a turn whose tool calls got no results: nothing else may follow it."""
    while talk.open_calls:
        place = next(
            n for n in reversed(range(len(talk.messages))) if talk.messages[n]["role"] == "user"
        )
        talk.messages = talk.messages[:place]
