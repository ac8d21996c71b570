"""`deepinfer-jax serve`: an HTTP server that speaks OpenAI's and Anthropic's protocols."""

import contextlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_jax.cli.devices import DistributedOption, MeshOption, enter_devices
from deepinfer_jax.cli.options import (
    ON_MESH,
    RUNTIME,
    DeterminismOption,
    ModelArgument,
    NumericsOption,
    runtime_config,
    with_fields,
)

#: Options that may come from the environment as DEEPINFER_JAX_<NAME>; none changes a number.
_ENV = "DEEPINFER_JAX_"


def _env(name: str) -> str:
    return f"{_ENV}{name.upper()}"


@with_fields(RUNTIME, ON_MESH, drafting=None)
def serve(
    model: ModelArgument = "nano",
    numerics: NumericsOption = "checkpoint",
    determinism: DeterminismOption = "batch",
    mesh: MeshOption = None,
    distributed: DistributedOption = False,
    host: Annotated[
        str, typer.Option(envvar=_env("host"), help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar=_env("port"), help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            envvar=_env("served_model_name"),
            help="What clients call the model; may be given several times.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=_env("api_key"), help="A key that lets clients in; may be given several times."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(envvar=_env("api_key_file"), metavar="FILE", help="Such keys, one a line."),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar=_env("admin_key"), help="Of /abort, /metrics and /server_info."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without a key.")
    ] = False,
    max_waiting: Annotated[
        int,
        typer.Option(envvar=_env("max_waiting"), help="Completions that may wait; then 429."),
    ] = 256,
    max_body_bytes: Annotated[
        int, typer.Option(envvar=_env("max_body_bytes"), help="Largest request; then 413.")
    ] = 32 * 2**20,
    max_images: Annotated[
        int, typer.Option(envvar=_env("max_images"), help="Images of a request; then 400.")
    ] = 64,
    allow_image_urls: Annotated[
        bool,
        typer.Option(
            "--allow-image-urls",
            help="Download images that clients name by URL, from public addresses alone.",
        ),
    ] = False,
    deadline_s: Annotated[
        float | None,
        typer.Option(envvar=_env("deadline_s"), help="Seconds of requests that give none."),
    ] = None,
    stream_stall_timeout_s: Annotated[
        float,
        typer.Option(
            "--stream-stall-timeout",
            envvar=_env("stream_stall_timeout"),
            help="Seconds that a client may leave a stream unread.",
        ),
    ] = 30.0,
    drain_seconds: Annotated[
        float,
        typer.Option(envvar=_env("drain_seconds"), help="For running requests after SIGTERM."),
    ] = 30.0,
    tool_grammar: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="Calls that are held to a grammar: strict (and required ones), or auto (all).",
        ),
    ] = "strict",
    deepseek_api_parity: Annotated[
        bool,
        typer.Option(
            "--deepseek-api-parity",
            help="Ignore temperature with thinking, and top_p, as DeepSeek's API does.",
        ),
    ] = False,
    **fields: Any,
) -> None:
    """Serves MODEL until Ctrl-C or SIGTERM, which let running requests end.

    Routes: /v1/chat/completions, /v1/responses, /v1/messages, /v1/completions, /v1/models,
    /tokenize, /detokenize, /health, /metrics. Options of the server may also be environment
    variables: DEEPINFER_JAX_PORT and so on.
    """
    from rich.console import Console

    require_serve("serve")
    from dataclasses import replace

    from deepinfer_jax.async_llm import AsyncLLM
    from deepinfer_jax.cli.generate import load_with_bar, note_embedded
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.serve.config import ServerConfig
    from deepinfer_jax.serve.memory import share_arenas
    from deepinfer_jax.serve.server import serve as run

    share_arenas()
    config = ServerConfig(
        host=host,
        port=port,
        served_model_name=tuple(served_model_name) if served_model_name else None,
        api_key=(*(api_key or ()), *read_keys(api_key_file)),
        admin_key=admin_key,
        insecure=insecure,
        max_waiting=max_waiting,
        max_body_bytes=max_body_bytes,
        max_images=max_images,
        allow_image_urls=allow_image_urls,
        deadline_s=deadline_s,
        stream_stall_timeout_s=stream_stall_timeout_s,
        drain_seconds=drain_seconds,
        tool_grammar=tool_grammar,
        deepseek_api_parity=deepseek_api_parity,
    )
    job, sizes = enter_devices(mesh, distributed)
    follows = job is not None and job.index > 0
    # The masks of a grammar do not travel between processes.
    runtime = replace(runtime_config(fields), warm_grammars=job is None)
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=follows)
    options = {"numerics": numerics, "determinism": determinism, "mesh": sizes}
    loaded = load_with_bar(console, model, **options)
    note_embedded(console, model)
    if follows:
        LLM(loaded, runtime=runtime).follow()
    else:
        run(AsyncLLM(loaded, runtime=runtime), config, note=_note)


def _note(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever started the server may have closed its end
        print(line, file=sys.stderr, flush=True)


def require_serve(what: str) -> None:
    """Checks that the packages of the extra are installed.

    Raises:
        ConfigError: one is not.
    """
    from deepinfer_jax.errors import ConfigError

    missing = [name for name in ("starlette", "uvicorn", "orjson") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install 'deepinfer-jax[serve]'")


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Returns the keys of a file, one a line; blank lines and those that begin with # are none.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    from deepinfer_jax.errors import ConfigError

    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file must be a readable text file: {error}") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file must hold a key, {os.fspath(path)} holds none")
    return keys
