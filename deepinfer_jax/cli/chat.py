"""`deepinfer-jax chat`: talk to a model, or answer one message from a pipe."""

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.cli.options import DeterminismOption, ModelOption, NumericsOption

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_jax.chat.encode import ChatEncoder
    from deepinfer_jax.chat.session import Generator
    from deepinfer_jax.sampling.params import SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."
# What a terminal would act on, except line ends and tabs.
_CONTROLS = {code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


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
    if message is None:
        repl(talk, system)
    else:
        talk.answer(message)


@dataclass
class Talk:
    """A conversation that grows by `answer`. Reasoning goes to stdout on a terminal only."""

    llm: "Generator"
    encoder: "ChatEncoder"
    params: "SamplingParams"
    options: dict[str, Any]
    console: "Console"  # of stderr
    is_interactive: bool = field(default_factory=lambda: sys.stdout.isatty())
    messages: list[dict[str, Any]] = field(default_factory=list)

    def reset(self, system: str | None) -> None:
        """Forgets everything but the system message."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> None:
        """Streams the answer to a message. The turn is kept only if it is answered to its end.

        Raises:
            InputError: The message cannot be encoded, or the conversation has become too long.
        """
        from deepinfer_jax.chat.session import stream_chat

        turn = [*self.messages, {"role": "user", "content": text}]
        started = time.perf_counter()
        content, reasoning, count, reason = "", "", 0, None
        for delta in stream_chat(self.llm, self.encoder, turn, self.params, **self.options):
            if delta.reasoning:
                self._write_reasoning(delta.reasoning)
            if reasoning and delta.content and not content:
                self._write_reasoning("\n\n")
            self._write(delta.content)
            content, reasoning = content + delta.content, reasoning + delta.reasoning
            count += len(delta.token_ids)
            reason = delta.finish_reason
        self._write("\n")
        if reasoning and not self.is_interactive:
            sys.stderr.write("\n")
        self.console.print(
            f"[dim]{count} tokens in {time.perf_counter() - started:.1f} s, finish: {reason}"
            + (f", seed {self.params.seed}" if self.params.temperature else "")
            + "[/dim]"
        )
        answer = {"role": "assistant", "content": content}
        if reasoning:
            answer["reasoning_content"] = reasoning
        self.messages = [*turn, answer]

    def _write(self, text: str) -> None:
        sys.stdout.write(text.translate(_CONTROLS) if self.is_interactive else text)
        sys.stdout.flush()

    def _write_reasoning(self, text: str) -> None:
        if self.is_interactive:
            self._write_dim(text.translate(_CONTROLS))
        else:
            sys.stderr.write(text)
            sys.stderr.flush()

    def _write_dim(self, text: str) -> None:
        from rich.console import Console
        from rich.text import Text

        Console(soft_wrap=True).print(Text(text, style="dim"), end="")
        sys.stdout.flush()


def repl(talk: Talk, system: str | None) -> None:
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
        if line == "/reset":
            talk.reset(system)
            talk.console.print("The conversation is forgotten.")
        elif line.startswith("/"):
            talk.console.print(f"No command is named {line.split()[0]}. {HELP}", markup=False)
        elif line:
            try:
                talk.answer(line)
            except KeyboardInterrupt:
                talk.console.print("\nStopped; this turn is forgotten.")
            except InputError as error:
                talk.console.print(f"{error}. /reset begins again.", markup=False)
