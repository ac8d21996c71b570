"""`deepinfer-jax plan`: what a model needs on a mesh, and what its step costs there."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_jax.cli.devices import read_sizes
from deepinfer_jax.cli.plan_images import image_plan, print_images
from deepinfer_jax.config.model import ModelConfig

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_jax.model.roofline import Hardware
    from sharding.footprint import Footprint
    from sharding.mesh import MeshSizes

#: Device counts of the scaling table.
SCALE = (8, 16, 32, 64, 128, 256, 512)
#: Tokens of a device in its decode rows.
DECODE_TOKENS = (16, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a plan is for."""

    config: ModelConfig
    sizes: "MeshSizes"
    hardware: "Hardware"
    context: int
    prompt: int
    max_seqs: int


def plan(
    model: Annotated[
        str, typer.Option(help='A preset, a checkpoint folder, a config.json, or "nano".')
    ] = "deepseek-v4.1-flash",
    devices: Annotated[str, typer.Option(help="COUNTxKIND: H100, H200, B200 or GB200.")] = "8xH200",
    mesh: Annotated[
        str | None, typer.Option(help='Sizes as "er=1,dp=8,cp=1"; dp over all if not given.')
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a sequence that is decoded.")] = 32768,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt that is prefilled.")] = 4096,
    max_seqs: Annotated[int, typer.Option(help="Sequences in the caches of all devices.")] = 128,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile both steps on emulated devices.")
    ] = False,
    scaling: Annotated[
        bool, typer.Option("--scaling", help=f"A table over {SCALE[0]} to {SCALE[-1]} devices.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Write the scaling as PNG.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bytes of every device, collectives of a step, and the roofline of prefill and decode.

    Nothing is allocated, and no such device has to be there. Times are formulas.
    """
    from rich.console import Console

    from deepinfer_jax.pictures import require_matplotlib

    if picture is not None:
        require_matplotlib("--picture")
    setting = _setting(model, devices, mesh, context, prompt, max_seqs)
    console = Console(highlight=False, soft_wrap=True, quiet=json)
    record = collect(setting)
    _print_bytes(console, setting, record)
    _print_steps(console, setting, record)
    print_images(console, record["images"])
    if compile:
        record["compiled"] = _compiled(console, setting)
    if scaling or picture is not None:
        record["scaling"] = scaling_rows(setting)
        _print_scaling(console, setting, record["scaling"])
    if picture is not None:
        _draw(setting, record["scaling"], picture)
        console.print(f"{picture}: tokens per second and device over the number of devices")
    if json:
        from json import dumps

        typer.echo(dumps(record, indent=2))
    if any(one["faults"] for one in record.get("compiled", [])):
        raise typer.Exit(1)


def _setting(
    model: str, devices: str, mesh: str | None, context: int, prompt: int, max_seqs: int
) -> Setting:
    """Returns what the options ask for.

    Raises:
        ConfigError: an option that cannot be honoured.
    """
    from deepinfer_jax.cli.inspect import resolve_config
    from deepinfer_jax.errors import ConfigError
    from deepinfer_jax.model.placement import check_mesh
    from deepinfer_jax.model.roofline import HARDWARE
    from sharding.errors import ShardingError
    from sharding.mesh import MeshSizes, mesh_sizes

    match = re.fullmatch(r"(\d+)x(\w+)", devices)
    if match is None or match[2] not in HARDWARE or int(match[1]) < 1:
        raise ConfigError(
            f"--devices is COUNTxKIND with a kind of {', '.join(HARDWARE)}, got {devices!r}: "
            "for example 8xH200"
        )
    config, count = resolve_config(model)[0], int(match[1])
    try:
        sizes = MeshSizes(dp=count) if mesh is None else mesh_sizes(read_sizes(mesh))
    except ShardingError as error:
        raise ConfigError(f"--mesh: {error}") from error
    if sizes.devices != count:
        raise ConfigError(
            f"the sizes of --mesh multiply to the number of devices, got {mesh!r} for {count}"
        )
    check_mesh(config, sizes)
    if min(context, prompt, max_seqs) < 1:
        raise ConfigError(
            "--context, --prompt and --max-seqs are at least 1, got "
            f"{context}, {prompt} and {max_seqs}"
        )
    numerics = "checkpoint" if config.model_type == "deepseek_v41" else "float32"
    config = replace(config, execution=replace(config.execution, numerics=numerics))
    return Setting(
        config=config,
        sizes=sizes,
        hardware=HARDWARE[match[2]],
        context=context,
        prompt=prompt,
        max_seqs=max_seqs,
    )


def collect(setting: Setting) -> dict[str, Any]:
    """Returns bytes, exchanges and costs of a setting as plain values."""
    from deepinfer_jax.model.roofline import exchange_bytes

    params, state = footprints(setting)
    held = {name: device for name, (device, _) in state.groups(1).items()}
    images = image_plan(setting.config, setting.hardware, _runtime(setting))
    if images:
        held["encoded images"] = images["pool_bytes"]
    ranks, layers = setting.sizes.expert_parallel, setting.config.num_hidden_layers
    return {
        "mesh": asdict(setting.sizes),
        "devices": setting.hardware.name,
        "bytes": {
            "parameters": _by_part(params),
            "state": held,
            "parameters_total": params.device,
            "state_total": sum(held.values()),
            "device_memory": setting.hardware.memory,
        },
        "exchange_bytes_per_row": layers * exchange_bytes(setting.config, ranks, 1)
        if ranks > 1
        else 0.0,
        "steps": _steps(setting, params),
        "images": images,
    }


def _by_part(params: "Footprint") -> dict[str, int]:
    """Returns the bytes of a device by what is split alike: experts, Engram tables, other parts."""
    found: dict[str, int] = {}
    for leaf in params.leaves:
        parts = leaf.name.split(".")
        kind = parts[0]
        if "experts" in parts:
            kind = "draft experts" if kind == "draft" else "experts"
        elif "tables" in parts:
            kind = "engram tables"
        elif kind == "layers":
            kind = "attention, shared experts, mHC"
        found[kind] = found.get(kind, 0) + leaf.device
    return found


def footprints(setting: Setting) -> tuple["Footprint", "Footprint"]:
    """Returns the bytes of parameters and of the cache; allocates nothing."""
    from deepinfer_jax.checkpoint.abstract import abstract_params
    from deepinfer_jax.model.lowering import abstract_state
    from deepinfer_jax.model.placement import cache_partitions, padded_abstract, partitions_like
    from sharding.footprint import describe

    config, sizes = setting.config, setting.sizes
    params = padded_abstract(abstract_params(config), sizes)
    state = abstract_state(config, sizes, _runtime(setting))
    return (
        describe(params, partitions_like(params, config), sizes),
        describe(state, cache_partitions(state), sizes),
    )


def _runtime(setting: Setting) -> Any:
    from deepinfer_jax.config.runtime import RuntimeConfig

    longest = min(max(setting.context, setting.prompt), setting.config.max_position_embeddings)
    return RuntimeConfig(
        max_seqs=setting.max_seqs, max_len=longest, max_tokens_per_step=setting.prompt
    )


def _steps(setting: Setting, params: "Footprint") -> list[dict[str, Any]]:
    """Returns decode and prefill costs; the closed forms are those of V4.1."""
    from deepinfer_jax.model.roofline import decode_cost, prefill_cost

    if setting.config.model_type != "deepseek_v41":
        return []
    given = (setting.config, setting.sizes, params, setting.hardware)
    costs = [
        (
            f"decode, {tokens} rows a device",
            decode_cost(*given, tokens=tokens, context=setting.context),
        )
        for tokens in DECODE_TOKENS
    ]
    costs.append((f"prefill of {setting.prompt}", prefill_cost(*given, tokens=setting.prompt)))
    return [
        {"step": name, "seconds": one.seconds, "tokens_per_second": one.tokens_per_second}
        | asdict(one)
        for name, one in costs
    ]


def scaling_rows(setting: Setting) -> list[dict[str, Any]]:
    """Returns decode and prefill over the numbers of `SCALE`, in two ways to use the devices.

    "one group": experts over all devices. "replicas": over one link domain, copies of it beside.
    """
    from sharding.mesh import MeshSizes

    found, domain = [], setting.hardware.domain
    for count in SCALE:
        ways = {"one group": MeshSizes(dp=count)}
        if count > domain:
            ways["replicas"] = MeshSizes(er=count // domain, dp=domain)
        for way, sizes in ways.items():
            one = replace(setting, sizes=sizes)
            params, _ = footprints(one)
            found += [
                {"devices": count, "way": way, "parameter_bytes": params.device, **step}
                for step in _steps(one, params)
            ]
    return found


def _compiled(console: "Console", setting: Setting) -> list[dict[str, Any]]:
    """Compiles a decode and a prefill step on emulated devices, and prints what they exchange."""
    from deepinfer_jax.checkpoint.abstract import abstract_params
    from deepinfer_jax.model.lowering import emulate_devices, lower_step

    emulate_devices(setting.sizes.devices)
    params, found = abstract_params(setting.config), []
    for name, rows in (("decode", setting.max_seqs), ("prefill", setting.prompt)):
        one = lower_step(setting.config, params, setting.sizes, _runtime(setting), rows)
        console.print(
            f"\n{name} of {one.rows} rows compiled for {setting.sizes.devices} emulated devices: "
            f"traced in {one.trace_seconds:.1f} s, compiled in {one.compile_seconds:.1f} s; "
            f"arguments {one.argument_bytes / 1e9:.2f} GB a device"
        )
        for each in one.collectives:
            console.print(f"  {each.label:<44} {each.bytes:>12,} bytes")
        for fault in one.faults:
            console.print(f"  [red]sums floats across devices[/red]: {fault}")
        found.append(
            {
                "step": name,
                "rows": one.rows,
                "trace_seconds": one.trace_seconds,
                "compile_seconds": one.compile_seconds,
                "argument_bytes": one.argument_bytes,
                "collectives": [
                    {"what": each.label, "bytes": each.bytes, "where": each.where}
                    for each in one.collectives
                ],
                "faults": [str(fault) for fault in one.faults],
            }
        )
    return found


def _print_bytes(console: "Console", setting: Setting, record: dict[str, Any]) -> None:
    from sharding.mesh import describe_sizes

    held, sizes = record["bytes"], setting.sizes
    console.print(
        f"{setting.config.model_type} on {sizes.devices} {setting.hardware.name}: "
        f"{describe_sizes(sizes)}; experts over {sizes.expert_parallel}, attention replicas "
        f"{sizes.data_parallel}"
    )
    for kind in ("parameters", "state"):
        for name, size in held[kind].items():
            if size >= 1e6:
                console.print(f"  {kind + ': ' + name:<44}{size / 1e9:>10.3f} GB a device")
    total, memory = held["parameters_total"] + held["state_total"], held["device_memory"]
    fits = "fits" if total <= 0.9 * memory else "does NOT fit with 10 % left for temporaries"
    console.print(f"  {'sum':<44}{total / 1e9:>10.3f} GB of {memory / 1e9:.0f} GB: {fits}")


def _print_steps(console: "Console", setting: Setting, record: dict[str, Any]) -> None:
    if not record["steps"]:
        console.print("no closed forms of a step exist for this model type")
        return
    console.print(
        f"exchange: {record['exchange_bytes_per_row'] / 1e6:.2f} MB a row and step, there and back"
        f"; no float is added across devices"
    )
    console.print(
        f"formulas, not measurements (context {setting.context}): ms = max(memory, arithmetic) + "
        "exchange + latency"
    )
    for one in record["steps"]:
        parts = [one[f"{name}_seconds"] for name in ("memory", "arithmetic", "exchange", "latency")]
        words = "  ".join(f"{1e3 * part:8.2f}" for part in parts)
        console.print(
            f"  {one['step']:<28}{1e3 * one['seconds']:9.2f} ms = max({words[:18]}) + {words[20:]}"
            f"  {one['tokens_per_second']:>9,.0f} tokens/s a device"
        )


def _print_scaling(console: "Console", setting: Setting, rows: Sequence[dict[str, Any]]) -> None:
    console.print(f"\nscaling on {setting.hardware.name} (formulas): tokens/s a device")
    steps = list(dict.fromkeys(row["step"] for row in rows))
    console.print(
        f"  {'devices':>7} {'experts':<10} {'GB':>6}" + "".join(f"{s:>26}" for s in steps)
    )
    for count in SCALE:
        for way in dict.fromkeys(row["way"] for row in rows if row["devices"] == count):
            mine = [row for row in rows if row["devices"] == count and row["way"] == way]
            numbers = "".join(f"{row['tokens_per_second']:>26,.0f}" for row in mine)
            size = mine[0]["parameter_bytes"] / 1e9
            console.print(f"  {count:>7} {way:<10} {size:>6.1f}{numbers}")


def _draw(setting: Setting, rows: Sequence[dict[str, Any]], path: Path) -> None:
    from deepinfer_jax.pictures import new_picture, save_picture

    figure, axis = new_picture((7.0, 4.2))
    for step in dict.fromkeys(row["step"] for row in rows):
        for way, style in (("one group", "-o"), ("replicas", "--s")):
            mine = [row for row in rows if row["step"] == step and row["way"] == way]
            points = ([r["devices"] for r in mine], [r["tokens_per_second"] for r in mine])
            axis.plot(*points, style, label=f"{step}, {way}")
    axis.set(xscale="log", yscale="log", xlabel="devices", ylabel="tokens/s a device (formulas)")
    axis.set_xticks(SCALE, [str(count) for count in SCALE])
    axis.set_title(f"{setting.config.model_type} on {setting.hardware.name}")
    axis.legend(fontsize=7)
    save_picture(figure, path)
