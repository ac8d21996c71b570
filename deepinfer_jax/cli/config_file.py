"""`--config FILE`: options of a command from a TOML file."""

from pathlib import Path
from typing import Any

from deepinfer_jax.errors import InputError


def take_config(arguments: list[str]) -> tuple[Path, list[str]]:
    """Returns the file of the one `--config` among arguments, and the others.

    Raises:
        InputError: there are several, or it has no value.
    """
    paths, rest, pending = [], [], False
    for one in arguments:
        if pending:
            paths.append(one)
            pending = False
        elif one == "--config":
            pending = True
        elif one.startswith("--config="):
            paths.append(one.removeprefix("--config="))
        else:
            rest.append(one)
    if pending or len(paths) != 1:
        raise InputError(f"--config takes one FILE, once; got {paths or 'none'}")
    return Path(paths[0]), rest


def read_options(path: Path, command: str) -> list[str]:
    """Returns a file's options as arguments.

    Options stand at the top of the file, for whichever command, and in a table of the command's
    name, which wins. A list is an option given several times; true and false are --x and --no-x.

    Raises:
        InputError: it cannot be read, or holds something that is no option's value.
    """
    import tomllib

    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--config must be a readable TOML file, {path}: {error}") from error
    top = {name: value for name, value in found.items() if not isinstance(value, dict)}
    own = found.get(command, {})
    if not isinstance(own, dict):
        raise InputError(f"{path}: {command} must be a table of options, got {own!r}")
    arguments: list[str] = []
    for name, value in (top | own).items():
        arguments += _as_arguments(path, name, value)
    return arguments


def _as_arguments(path: Path, name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [option if value else f"--no-{option.removeprefix('--')}"]
    if isinstance(value, list):
        return [part for one in value for part in _as_arguments(path, name, one)]
    if not isinstance(value, str | int | float):
        raise InputError(f"{path}: {name} must be a text, number, true, false or a list of them")
    return [f"{option}={value}"]
