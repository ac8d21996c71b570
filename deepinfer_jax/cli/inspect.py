"""`deepinfer-jax inspect`: what a checkpoint, a config or a preset consists of."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.config.model import ModelConfig

if TYPE_CHECKING:
    from rich.tree import Tree


def inspect(
    source: Annotated[
        str,
        typer.Argument(
            help='A checkpoint folder, a config.json, "nano" (embedded), or the name of a preset.'
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Parts, counts, bytes and layer roles; for a checkpoint folder also whether it is complete."""
    record = collect(source)
    if json:
        from json import dumps

        typer.echo(dumps(record, indent=2))
    else:
        _print_record(record)
    coverage = record["coverage"]
    if coverage is not None and not coverage["is_complete"]:
        raise typer.Exit(1)


def collect(source: str) -> dict[str, Any]:
    """Returns everything that `inspect` prints, as plain values.

    Raises:
        ConfigError: The source is no folder, file or preset, or its config cannot be honoured.
        CheckpointError: A file of the folder is damaged.
    """
    from deepinfer_jax.checkpoint.inventory import count_summary, tensor_inventory
    from deepinfer_jax.config.roles import layer_roles

    config, folder = resolve_config(source)
    inventory = tensor_inventory(config)
    parts: dict[str, list[Any]] = {}
    for tensor in inventory.values():
        parts.setdefault(part_of(tensor.name), []).append(tensor)
    return {
        "source": source,
        "model_type": config.model_type,
        "totals": asdict(count_summary(inventory)),
        "parts": {name: asdict(count_summary(tensors)) for name, tensors in parts.items()},
        "layers": [asdict(role) for role in layer_roles(config)],
        "coverage": None if folder is None else _coverage(folder, config),
    }


def part_of(name: str) -> str:
    """Returns the part of the model that a tensor belongs to, as a path of its tree."""
    first, _, rest = name.partition(".")
    if first in ("vision", "aligner") or first.startswith("image_"):
        return "vision/" + {"vision": "encoder", "aligner": "projector"}.get(first, "image vectors")
    if first not in ("layers", "mtp"):
        return {"embed": "embedding", "head": "head"}.get(first, "final norm and mix")
    suffix = rest.partition(".")[2]
    group = "backbone" if first == "layers" else "draft stages"
    kinds = (
        ("engram.embed", "Engram tables"),
        ("engram", "Engram projections"),
        ("ffn.experts", "routed experts"),
        ("ffn.shared_experts", "shared experts"),
        ("ffn.gate", "router"),
        ("attn.compressor", "compressors"),
        ("attn.indexer", "indexers"),
        ("attn.", "attention"),
        ("hc_", "residual mixing"),
    )
    kind = next((label for prefix, label in kinds if suffix.startswith(prefix)), None)
    return f"{group}/{kind or ('norms' if 'norm' in suffix else 'projections and heads')}"


def resolve_config(source: str) -> tuple[ModelConfig, Path | None]:
    """Returns (config, folder if it has weights) of a folder, a file, "nano" or a preset.

    Raises:
        ConfigError: it is none of them, or its config cannot be honoured.
    """
    from deepinfer_jax.config.hf import read_config
    from deepinfer_jax.config.presets import PRESETS, preset
    from deepinfer_jax.errors import ConfigError

    if source == "nano":
        from deepinfer_jax.loading import EMBEDDED

        return read_config(EMBEDDED), EMBEDDED
    path = Path(source)
    if path.is_dir():
        config = read_config(path)
        return config, path if any(path.glob("*.safetensors*")) else None
    if path.is_file():
        return read_config(path), None
    if source.lower() in PRESETS:
        return preset(source), None
    raise ConfigError(
        f"a model is a checkpoint folder, a config.json, nano or a preset "
        f"({', '.join(PRESETS)}): "
        f"received {source!r}, which is none of them. Check the path."
    )


def _coverage(folder: Path, config: ModelConfig) -> dict[str, Any]:
    from deepinfer_jax.checkpoint.coverage import compare
    from deepinfer_jax.checkpoint.safetensors import open_store

    store = open_store(folder)
    coverage = compare(store, config)
    return {
        "is_complete": coverage.is_complete,
        "tensors": len(store),
        "expected": coverage.expected,
        "ignored": len(coverage.ignored),
        "report": coverage.report(),
    }


def _print_record(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    totals = record["totals"]
    console.print(f"[bold]{escape(record['source'])}[/]  {record['model_type']}")
    rows = [
        ("elements", f"{totals['elements']:,}"),
        *((f"  {dtype}", f"{count:,}") for dtype, count in totals["elements_by_dtype"].items()),
        ("scale elements", f"{totals['scale_elements']:,}"),
        ("tensors", f"{totals['tensors']:,}"),
        *((f"  {dtype}", f"{count:,}") for dtype, count in totals["tensors_by_dtype"].items()),
        ("payload bytes", f"{totals['nbytes']:,}"),
    ]
    console.print(_table(("total", "count"), rows))
    console.print(_part_tree(record["parts"]))
    console.print(_table(_ROLE_COLUMNS, map(_role_row, _merge(record["layers"]))))
    coverage = record["coverage"]
    if coverage is None:
        console.print("no weights were read")
    elif coverage["is_complete"]:
        console.print(
            f"[green]complete[/]: {coverage['expected']:,} tensors as the config implies, "
            f"{coverage['ignored']:,} ignored copies"
        )
    else:
        console.print(
            f"[red]incomplete[/]: {coverage['tensors']:,} tensors, "
            f"{coverage['expected']:,} expected"
        )
        console.print(escape(coverage["report"]))


def _part_tree(parts: dict[str, dict[str, Any]]) -> "Tree":
    from rich.tree import Tree

    total = sum(part["nbytes"] for part in parts.values())
    groups: dict[str, list[str]] = {}
    for name in parts:
        groups.setdefault(name.partition("/")[0], []).append(name)
    root = Tree("[bold]parts[/] (payload bytes, tensors, elements)")
    for group, members in groups.items():
        own = [parts[name] for name in members]
        branch = root.add(_part_line(group, own, total))
        if members != [group]:
            for name in members:
                branch.add(_part_line(name.partition("/")[2], [parts[name]], total))
    return root


def _part_line(name: str, parts: list[dict[str, Any]], total: int) -> str:
    nbytes, tensors, elements = (
        sum(part[key] for part in parts) for key in ("nbytes", "tensors", "elements")
    )
    share = 100 * nbytes / total if total else 0.0
    return f"{name}: {nbytes:,} bytes ({share:.2f} %), {tensors:,} tensors, {elements:,} elements"


_ROLE_COLUMNS = ("layers", "ratio", "mode", "kv from", "index k", "top-k", "rotary", "extra")


def _merge(layers: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Returns runs (first, last, role) of neighbouring layers of equal role."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for role in layers:
        layer = role["layer"]
        same = {key: value for key, value in role.items() if key != "layer"}
        if runs and runs[-1][2] == same:
            runs[-1] = (runs[-1][0], layer, same)
        else:
            runs.append((layer, layer, same))
    return runs


def _role_row(run: tuple[int, int, dict[str, Any]]) -> tuple[str, ...]:
    first, last, role = run
    flags = {
        "has_engram": "Engram",
        "is_candidate_source": "candidate source",
        "uses_candidates": "candidates",
        "is_tap": "draft tap",
        "hash_routed": "hash routed",
    }
    sources = ("kv_source", "index_k_source", "topk_source")
    return (
        str(first) if first == last else f"{first}-{last}",
        str(role["ratio"]),
        role["mode"],
        *("-" if role[key] is None else str(role[key]) for key in sources),
        "YaRN" if role["uses_yarn"] else "plain",
        ", ".join(label for key, label in flags.items() if role[key]),
    )


def _table(columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Any:
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
