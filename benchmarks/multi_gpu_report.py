"""What follows from the lines of `benchmarks.multi_gpu`: comparisons, figure, support.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
Line = dict[str, Any]
#: What K3 allows between measured and predicted time, and K2 below one GPU's rate.
WITHIN, ENOUGH = 0.30, 0.80
CAPABILITY = "Several devices (DP, CP, EP)"


def mesh_name(mesh: dict[str, int]) -> str:
    """Returns "dp2 cp2", or "one"."""
    return " ".join(f"{axis}{size}" for axis, size in mesh.items()) or "one"


def derived(records: list[Line]) -> Iterator[tuple[str, Line]]:
    """Yields (name, line) for every mesh whose one-device run is there too."""
    for kind, compare in (("bits of a mesh", _bits), ("step", _scaling)):
        some = [line for line in records if line["point"] == kind and "file" in line]
        ones = {_same(line): line for line in some if not line["mesh"]}
        for line in some:
            if line["mesh"] and _same(line) in ones:
                name = "/".join((kind, *_same(line), mesh_name(line["mesh"])))
                yield name, compare(ones[_same(line)], line)


def _same(line: Line) -> tuple[str, ...]:
    kernels = ",".join(f"{op}={name}" for op, name in sorted(line["kernels"].items()))
    return (line["what"], line["level"], kernels, line.get("case", ""))


def _bits(one: Line, many: Line) -> Line:
    """Returns whether all rows have the bits of one device; void without a noticed difference."""
    with np.load(one["file"]) as a, np.load(many["file"]) as b:
        differing = int((a["digests"] != b["digests"]).sum())
        away = float(np.abs(a["sample"] - b["sample"]).max())
    noticed = min(one["planted_rows_that_differ"], many["planted_rows_that_differ"]) > 0
    sound = noticed and many["experts_are_split"] and one["finite"] and many["finite"]
    return {
        "part": "b",
        "point": "bits against one device",
        "what": many["what"],
        "level": many["level"],
        "kernels": many["kernels"],
        "mesh": many["mesh"],
        "rows": many["rows"],
        "rows_that_differ": differing,
        "largest_difference_seen": away,
        "planted_difference_noticed": noticed,
        "experts_are_split": many["experts_are_split"],
        "is_void": not sound,
        "is_equal": sound and differing == 0,
    }


def _scaling(one: Line, many: Line) -> Line:
    """Returns efficiency against one device, and predictions beside the measurement."""
    sizes = {"er": 1, "dp": 1, "cp": 1} | many["mesh"]
    devices = sizes["er"] * sizes["dp"] * sizes["cp"]
    with np.load(one["file"]) as a, np.load(many["file"]) as b:
        first, same = a["logits"], b["logits"]
    if len(first) != len(same):  # cp decodes more sequences, whose random caches are others
        first = same = first[:0]
    error = np.linalg.norm(first - same, axis=1) / np.linalg.norm(first, axis=1)
    each = many["tokens_per_second"] / devices / one["tokens_per_second"]
    guesses = predictions(one, many)
    line: Line = {
        "part": "c",
        "point": "step against one device",
        "what": many["what"],
        "case": many["case"],
        "level": many["level"],
        "kernels": many["kernels"],
        "mesh": many["mesh"],
        "step_us": many["step_us"],
        "step_us_of_one": one["step_us"],
        "efficiency": round(each, 3),
        "median_relative_error": float(f"{np.median(error):.3g}") if len(error) else None,
        "rows_with_equal_bits": int((first == same).all(axis=1).sum()),
        "rows_compared": len(first),
        "collective_share": many.get("collective_share"),
        "idle_share": many.get("idle_share"),
        "predicted_us": {name: round(us, 1) for name, us in guesses.items()},
        "predicted_over_measured": {
            name: round(us / many["step_us"], 3) for name, us in guesses.items()
        },
    }
    line["within_30_percent"] = {
        name: abs(ratio - 1) <= WITHIN for name, ratio in line["predicted_over_measured"].items()
    }
    if each < ENOUGH:
        names = ("longest_us", "longest_moving_us", "idle_share", "kernel_us", "traced_step_us")
        line["reason"] = {name: many.get(name) for name in names}
        line["reason"]["of_one_gpu"] = {name: one.get(name) for name in names}
    return line


def predictions(one: Line, many: Line) -> dict[str, float]:
    """Returns what `plan` says of a step on a mesh, microseconds: its roofline, and two others.

    Those are given the measured step of one GPU: with what the roofline says the exchange adds, and
    with all that the roofline says the mesh changes.
    """
    plan, own = many["plan"], one["plan"]
    exchange = plan["exchange_us"] + plan["latency_us"]
    base, here = (max(p["memory_us"], p["arithmetic_us"]) for p in (own, plan))
    return {
        "as_shipped": plan["step_us"],
        "one_gpu_plus_exchange": one["step_us"] + exchange,
        "one_gpu_plus_differences": one["step_us"] + here - base + exchange,
    }


def read(path: Path) -> list[Line]:
    """Returns the lines of a result."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def draw(source: Path, target: Path) -> None:
    """Draws bandwidth of collectives, efficiency by mesh, and predictions over measurements."""
    from deepinfer_jax.pictures import new_picture, save_picture

    lines = read(source)
    figure, axes = new_picture((13.0, 4.2), columns=3)
    alone = [x for x in lines if x["point"] == "collective" and "us" in x]
    for kind in sorted({x["kind"] for x in alone}):
        mine = sorted((x["received_bytes"], x["gb_per_second"]) for x in alone if x["kind"] == kind)
        axes[0].plot(*zip(*mine, strict=True), "o-", label=kind)
    axes[0].axhline(450, ls="--", color="#888")
    axes[0].set(xscale="log", yscale="log", xlabel="bytes received by a device, per collective")
    axes[0].set(ylabel="GB/s", title="Collectives of the step (dashed: NVLink)")
    steps = [x for x in lines if x["point"] == "step against one device"]
    names = [f"{x['case']}, {mesh_name(x['mesh'])}, {x['level']}" for x in steps]
    axes[1].barh(names, [x["efficiency"] for x in steps], color="#2a6f97")
    axes[1].axvline(ENOUGH, ls="--", color="#888")
    axes[1].set(xlabel="tokens/s of a device over one GPU alone", title="Efficiency")
    raw = [x for x in lines if x["point"] == "step" and "step_us" in x]
    ones = {_same(x): x for x in raw if not x["mesh"]}
    pairs = {(_same(x), mesh_name(x["mesh"])): (ones[_same(x)], x) for x in raw}
    for index, guess in enumerate(("as_shipped", "one_gpu_plus_differences")):
        found = [pairs[_same(x), mesh_name(x["mesh"])] for x in steps]
        values = [predictions(one, x)[guess] / x["step_us"] for one, x in found]
        places = [place + 0.4 * index for place in range(len(names))]
        axes[2].barh(places, values, height=0.38, label=guess.replace("_", " "))
    axes[2].axvline(1, ls="--", color="#888")
    axes[2].set(xlabel="predicted over measured time", title="plan", yticks=[])
    for axis in (axes[0], axes[2]):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, loc="lower right")
    axes[1].tick_params(axis="y", labelsize=6)
    save_picture(figure, target)


def proven(lines: list[Line]) -> tuple[str, str, list[str]] | None:
    """Returns (device kind, note, meshes) of what the lines prove on real devices, or None.

    A mesh counts where nothing that was tried on it differed, was void or failed to compare.
    """
    found = [x for x in lines if x["point"] == "bits against one device" and not x["small"]]
    found = [x for x in found if x["platform"] not in ("cpu",)]
    by_mesh: dict[str, list[Line]] = {}
    for line in found:
        by_mesh.setdefault(mesh_name(line["mesh"]), []).append(line)
    good = sorted(name for name, some in by_mesh.items() if all(x["is_equal"] for x in some))
    if not good:
        return None
    first = found[0]
    what = sorted({x["what"] for name in good for x in by_mesh[name]})
    rows = sum(x["rows"] for name in good for x in by_mesh[name])
    note = (
        f"{first['devices']} {first['device']} of one host, meshes {', '.join(good)}, level "
        f'"batch" with {PIN_NAME}: bits of one GPU in {rows:,} rows of {", ".join(what)}'
    )
    bad = sorted(set(by_mesh) - set(good))
    return first["device"], note + (f"; not on {', '.join(bad)}" if bad else ""), good


PIN_NAME = "--xla_gpu_autotune_level=0"


def write_support(source: Path, target: Path = ROOT / "support.json") -> str:
    """Enters what the lines prove into support.json; returns what was done.

    Only an H200 has a column. Nothing proven, nothing written.
    """
    found = proven(read(source))
    if found is None:
        return "nothing is proven: support.json stays as it is"
    kind, note, _ = found
    if "H200" not in kind:
        return f"no column of support.json is of {kind!r}: it stays as it is"
    evidence = f"benchmarks/results/{source.name}"
    cell = json.dumps({"status": "limits", "evidence": evidence, "note": note})
    lines = target.read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if json.dumps(CAPABILITY) in line)
    at = next(i for i in range(at, len(lines)) if lines[i].strip().startswith('"h200"'))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines[at] = f'{indent}"h200": {cell},'
    text = "\n".join(lines) + "\n"
    json.loads(text)
    target.write_text(text, encoding="utf-8")
    return f"support.json: {note}"
