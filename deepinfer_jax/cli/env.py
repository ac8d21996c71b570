"""`deepinfer-jax env`: the record of `deepinfer_jax.environment`, as tables or JSON."""

from typing import Annotated, Any, get_args

import typer


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Versions, devices, flags that change numerics, promises, kernels, Ascend, missing extras."""
    from deepinfer_jax.backends import ascend_report
    from deepinfer_jax.environment import collect
    from deepinfer_jax.numerics.selection import kernel_report

    record = collect() | {"determinism": _promises(), "kernels": kernel_report()}
    record["ascend"] = ascend_report()
    if as_json:
        import json

        typer.echo(json.dumps(record, indent=2))
        return
    _print_tables(record)


def _promises() -> dict[str, dict[str, list[Any]]]:
    """Returns what each level promises here with default options: [held, reason] by promise."""
    from deepinfer_jax.config.model import DeterminismLevel, ExecutionConfig
    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.determinism import report

    found = {}
    for level in get_args(DeterminismLevel):
        execution = ExecutionConfig(numerics="checkpoint", determinism=level)
        promises = report(execution, RuntimeConfig())
        found[level] = {name: list(held) for name, held in promises.items()}
    return found


def _print_tables(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    _print_rows(console, "versions", record["versions"])
    _print_rows(console, "platform", record["platform"])
    devices = {
        f"{device['platform']}:{device['id']}": f"{device['kind']}"
        + (f" (sm {device['compute_capability']})" if device["compute_capability"] else "")
        for device in record["devices"]
    }
    _print_rows(console, f"devices (default backend {record['backend']})", devices)
    _print_rows(console, "environment variables", record["environment_variables"])
    flags = {flag["name"]: flag["value"] for flag in record["numerics_flags"]}
    _print_rows(console, "flags that change numerics", flags)
    for level, promises in record["determinism"].items():
        lines = {
            n: ("held: " if held else "not held: ") + why for n, (held, why) in promises.items()
        }
        _print_rows(console, f'determinism="{level}"', lines)
    _print_kernels(console, record["kernels"])
    _print_rows(console, "Ascend", record["ascend"])
    cache = record["compilation_cache"]
    _print_rows(
        console, "compilation cache", {"directory": cache["directory"], "enabled": cache["enabled"]}
    )
    missing = {
        name: "complete" if not extra["missing"] else "lacks " + ", ".join(extra["missing"])
        for name, extra in record["extras"].items()
    }
    _print_rows(console, "extras", missing)
    for warning in record["warnings"]:
        console.print(f"[bold red]warning:[/] {escape(warning)}")


def _print_kernels(console: Any, kernels: dict[str, Any]) -> None:
    lines = {}
    for row in kernels["ops"]:
        pallas = row["pallas"] or "raises"
        others = ", ".join(
            f"{entry['implementation']} ({entry['arch']}: {entry['status']})"
            for entry in row["entries"]
        )
        lines[row["op"]] = (
            f'None: {row["default"]}; "pallas": {pallas}; exist: xla, {others}; '
            f"tiles {row['tiles_sha256'][:12]}"
        )
    _print_rows(console, f"kernels on {kernels['device_kind']!r}", lines)


def _print_rows(console: Any, title: str, rows: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(escape(name), "[dim]not set[/]" if value is None else escape(str(value)))
    console.print(f"[bold]{escape(title)}[/]")
    console.print(table)
    console.print()
