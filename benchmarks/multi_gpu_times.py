"""Parts a and c of `benchmarks.multi_gpu`: collectives alone, and steps of the slice on meshes."""

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from benchmarks import multi_gpu_slice as slices
from benchmarks.network_slice import Case
from benchmarks.traces import kernels_by_device, length_and_gaps
from benchmarks.turns import Work, turn
from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.model.placement import padded_abstract, partitions_like
from deepinfer_jax.model.roofline import HARDWARE, decode_cost, prefill_cost
from sharding.collectives import collectives_of
from sharding.footprint import describe
from sharding.mesh import AXES, build_mesh, mesh_sizes

NVLINK = 450e9  # bytes/s that a device receives at most
#: Parts of names, in small letters, of what moves rows between devices.
MOVERS = (
    "nccl", "allreduce", "all-reduce", "all-to-all", "alltoall", "all-gather", "allgather",
    "collective", "permute", "p2p",
)  # fmt: skip
#: Collectives of a jaxpr.
KINDS = ("all_to_all", "all_gather", "ppermute", "pmax", "psum", "pmin")


def cases_of(small: bool, cp: int) -> list[Case]:
    """Returns decode with a fixed number of rows a device, and one prompt a replica."""
    if small:
        return [Case("decode 8 a device", 8 * cp, 256, 8 * cp), Case("prefill", 64, 64, 1)]
    return [
        Case("decode 32 a device", 32 * cp, 16384, 32 * cp),
        Case("decode 128 a device", 128 * cp, 16384, 128 * cp),
        Case("prefill", 8192, 8192, 1),
    ]


def seconds_of_step(
    program: Any, params: Any, held: list[Any], given: Any, *, loops: int, repeats: int = 3
) -> list[float]:
    """Returns seconds of a step, one figure for each loop of steps that pass the state on.

    held: the state alone, replaced by that after the last step.
    """
    held[0] = program(params, held[0], *given)[0]
    jax.block_until_ready(held)
    spans = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(loops):
            held[0] = program(params, held[0], *given)[0]
        jax.block_until_ready(held)
        spans.append((time.perf_counter() - begin) / loops)
    return spans


def warm(work: Work, task: dict[str, Any]) -> None:
    """Makes weights and caches once on every mesh, so that their programs are in JAX's cache.

    That of a folder (JAX_COMPILATION_CACHE_DIR); without one nothing is won.
    """
    begin = time.perf_counter()
    if jax.config.jax_compilation_cache_dir and not work.small:
        with turn(work.lock):
            for mesh in task["meshes"]:
                setting = slices.Setting("off", "fast", tuple(mesh.items()), layers=4)
                config = slices.slice_config(setting)
                params = slices.slice_params(config)
                for case in cases_of(work.small, slices.sizes_of(config).cp):
                    jax.block_until_ready(slices.cache_of(config, case))
                del params
    work.put({"point": "warm", "warm_seconds": round(time.perf_counter() - begin, 1)})


def throughput(work: Work, task: dict[str, Any]) -> None:
    """One case on one mesh: step time, share of collectives, idle time, what `plan` says."""
    mesh = tuple(task["mesh"].items())
    setting = slices.Setting(task["level"], task["kernels"], mesh, work.small, layers=4)
    config = slices.slice_config(setting)
    cases = cases_of(work.small, slices.sizes_of(config).cp)
    case = next(case for case in cases if case.name == task["case"])
    line = {"point": "step", "what": "slice", "level": task["level"], "case": case.name}
    line["kernels"] = dict(config.execution.kernels)
    begin = time.perf_counter()
    with work.phase("compile"):
        program = slices.compiled_step(config, case)
    line["compile_seconds"] = round(time.perf_counter() - begin, 1)
    line["plan"] = predicted(config, case)
    if time.time() > work.until:
        work.put(line | {"skipped": "out of time"})
        return
    with work.phase("waiting and turn"), turn(work.lock):
        begin = time.perf_counter()
        with work.phase("weights"):
            params = jax.block_until_ready(slices.slice_params(config))
        line |= _measured(work, task, config, program, params, case)
        line["point_seconds"] = round(time.perf_counter() - begin, 1)
    work.put(line)


def _measured(
    work: Work, task: dict[str, Any], config: Any, program: Any, params: Any, case: Case
) -> dict[str, Any]:
    with work.phase("caches"):
        given, held = slices.rows_of(config, case), [slices.cache_of(config, case)]
    with work.phase("first step"):
        held[0], logits, _ = program(params, held[0], *given)
        first = np.asarray(logits)[: case.rows, :1024]
    if not np.isfinite(first).all():
        raise RuntimeError("logits are not finite, so that nothing was timed")
    path = work.folder / f"{task['name']}.{case.name.replace(' ', '_')}.npz"
    np.savez(path, logits=first)
    decodes = case.sequences > 1
    loops = (20 if decodes else 4) if not work.small else 2
    with work.phase("timed steps"):
        spans = seconds_of_step(program, params, held, given, loops=loops)
    rows = case.rows * slices.sizes_of(config).data_parallel
    found = {
        "file": str(path),
        "rows": rows,
        "context": case.context,
        "step_us": round(min(spans) * 1e6, 1),
        "spread": round(max(spans) / min(spans), 3),
        "tokens_per_second": round(rows / min(spans), 1),
        "collectives": dict(Counter(one.label for one in collectives_of(program.as_text()))),
    }
    with work.phase("profile"):
        return found | profiled(program, params, held, given, steps=3)


def profiled(program: Any, params: Any, held: list[Any], given: Any, steps: int) -> dict[str, Any]:
    """Returns what kernels took in a trace of some steps, a mean over the devices.

    The time of a collective's kernel includes waiting for the others, so that its least time over
    the devices is given too. `idle_share` is of the time from the first to the last kernel. XLA
    runs no command buffers while it is traced.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0 if jax.default_backend() != "cpu" else 2
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                held[0] = program(params, held[0], *given)[0]
            jax.block_until_ready(held)
        devices = list(kernels_by_device(Path(folder)))
    if not devices:
        return {"profile": "the trace holds no operations of a device"}
    names: dict[str, float] = defaultdict(float)
    moving, busy, whole = [], [], []
    for events in devices:
        for name, start, stop in events:
            names[name[:60]] += (stop - start) / 1e3 / steps / len(devices)
        moved = sum(b - a for name, a, b in events if _moves(name))
        moving.append(moved / 1e3 / steps)
        length, gaps = length_and_gaps((a, b) for _, a, b in events)
        whole.append(length / 1e3 / steps)
        busy.append(whole[-1] - gaps.sum() / 1e3 / steps)
    longest = sorted(names.items(), key=lambda pair: -pair[1])
    return {
        "profile": "jax.profiler trace",
        "traced_step_us": round(float(np.mean(whole)), 1),
        "kernel_us": round(float(np.mean(busy)), 1),
        "idle_share": round(1 - float(np.sum(busy) / np.sum(whole)), 3),
        "collective_us": round(float(np.mean(moving)), 1),
        "collective_us_least": round(float(np.min(moving)), 1),
        "collective_share": round(float(np.sum(moving) / np.sum(whole)), 3),
        "longest_us": {name: round(us, 1) for name, us in longest[:10]},
        "longest_moving_us": {name: round(us, 1) for name, us in longest if _moves(name)},
    }


def _moves(name: str) -> bool:
    return any(part in name.lower() for part in MOVERS)


def predicted(config: Any, case: Case) -> dict[str, float]:
    """Returns what `deepinfer-jax plan` says of a step on H200s, microseconds."""
    sizes = slices.sizes_of(config)
    params = padded_abstract(abstract_params(config), sizes)
    held = describe(params, partitions_like(params, config), sizes)
    given = (config, sizes, held, HARDWARE["H200"])
    if case.sequences > 1:
        cost = decode_cost(*given, tokens=case.rows // sizes.cp, context=case.context)
    else:
        cost = prefill_cost(*given, tokens=case.rows)
    return {
        "step_us": round(cost.seconds * 1e6, 1),
        "memory_us": round(cost.memory_seconds * 1e6, 1),
        "arithmetic_us": round(cost.arithmetic_seconds * 1e6, 1),
        "exchange_us": round(cost.exchange_seconds * 1e6, 1),
        "latency_us": round(cost.latency_seconds * 1e6, 1),
        "received_bytes": round(cost.inside + cost.outside),
    }


Collective = tuple[str, tuple[str, ...], str, tuple[int, ...]]  # kind, axes, dtype, local shape


def traced_collectives(config: Any, case: Case) -> Counter[Collective]:
    """Returns how often each collective stands in the traced step, by what a device gives to it."""
    params = slices.abstract_slice(config)
    state, rows = slices.abstract_cache(config, case), slices.rows_of(config, case)
    jaxpr = jax.make_jaxpr(slices.row_step(config, params, case))(params, state, *rows)
    found: Counter[Collective] = Counter()
    waiting = [jaxpr.jaxpr]
    while waiting:
        for eqn in waiting.pop().eqns:
            kind = next((k for k in KINDS if eqn.primitive.name.startswith(k)), None)
            if kind is not None:
                axes: Any = eqn.params.get("axis_name", eqn.params.get("axes"))
                axes = axes if isinstance(axes, tuple) else (axes,)
                for leaf in eqn.invars:
                    given: Any = leaf.aval
                    found[kind, axes, str(given.dtype), given.shape] += 1
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "jaxpr")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    waiting.append(inner)
    return found


def collectives(work: Work, task: dict[str, Any]) -> None:
    """The collectives of a decode and a prefill step alone: time, and bytes received over it.

    Sizes below 4 KiB stand for each other: one of 64 bytes is measured for them.
    """
    mesh = tuple(task["mesh"].items())
    config = slices.slice_config(slices.Setting("off", "load", mesh, work.small, layers=4))
    ranks, grid = slices.sizes_of(config).devices, build_mesh(dict(mesh))
    wanted: dict[Collective, dict[str, int]] = {}
    for case in cases_of(work.small, slices.sizes_of(config).cp):
        for (kind, _, dtype, shape), times in traced_collectives(config, case).items():
            small = np.prod(shape) * np.dtype(dtype).itemsize < 4096 and kind[0] == "a"
            one = (kind, AXES, "uint8", (ranks, 32)) if small else (kind, AXES, dtype, shape)
            uses = wanted.setdefault(one, {})
            uses[case.name] = uses.get(case.name, 0) + times
    for kind in {one[0] for one in wanted if one[0][0] == "a"}:  # how far links go
        for size in (2**14,) if work.small else (2**20, 2**26, 2**28):
            wanted.setdefault((kind, AXES, "uint8", (ranks, size // ranks)), {})
    order = sorted(wanted.items(), key=str)
    with ThreadPoolExecutor(4) as pool:
        coming = [pool.submit(_ready, work, grid, one) for one, _ in order]
        found = [future.exception() or future.result() for future in coming]
    with turn(work.lock):
        for (one, uses), run in zip(order, found, strict=True):
            line = {"point": "collective", "kind": one[0], "dtype": one[2]}
            line |= {"shape": list(one[3]), "times_in_step": uses}
            try:
                if isinstance(run, BaseException):
                    raise run
                work.put(line | run())
            except Exception as error:  # the others still count
                work.put(line | {"error": f"{type(error).__name__}: {error}"[:600]})


def _ready(work: Work, grid: Any, one: Collective) -> Callable[[], dict[str, Any]]:
    """Returns what checks and times one collective, compiled.

    That of a gather includes copying a part of the result, which the next one gives.
    """
    kind, axes, dtype, shape = one
    ranks, times = mesh_sizes(grid).of(axes), 5 if work.small else 41

    def body(x: Any) -> Any:
        rank = lax.axis_index(axes)

        def again(_: Any, x: Any) -> Any:
            if kind == "all_to_all":
                return lax.all_to_all(x, axes, 0, 0)
            if kind == "all_gather":  # of the next rank's part, so that none is left out
                return lax.all_gather(x, axes)[(rank + 1) % ranks]
            if kind == "ppermute":
                pairs = [(r, (r + 1) % ranks) for r in range(ranks)]
                return lax.ppermute(x, axes, pairs)
            reduce = {"pmax": lax.pmax, "pmin": lax.pmin, "psum": lax.psum}[kind]
            return reduce(x ^ rank.astype(x.dtype), axes)

        return lax.fori_loop(0, times, again, x)

    spec = PartitionSpec(AXES)
    run = jax.jit(
        jax.shard_map(
            lambda x: body(x[0])[None], mesh=grid, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
    place = jax.sharding.NamedSharding(grid, spec)
    count = int(np.prod(shape))
    make = jax.jit(
        lambda: jnp.stack(
            [(jnp.arange(count) * 31 + 17 * d) % 251 for d in range(grid.size)]
        ).reshape(-1, *shape).astype(dtype),
        out_shardings=place,
    )  # fmt: skip
    compiled = run.lower(jax.ShapeDtypeStruct((grid.size, *shape), dtype, sharding=place)).compile()
    compiled_make = make.lower().compile()

    def measure() -> dict[str, Any]:
        x = compiled_make()
        found, start = np.asarray(compiled(x)[..., :64]), np.asarray(x[..., :64])
        if kind == "all_to_all":  # an odd number of them is one
            expected = start.swapaxes(0, 1)
        elif kind in ("all_gather", "ppermute"):
            expected = np.roll(start, times if kind == "ppermute" else -times, axis=0)
        else:
            expected = np.broadcast_to(found[:1], found.shape)
        if not np.array_equal(found, expected):
            raise RuntimeError("other values than NumPy's, so that nothing was timed")
        spans = []
        for _ in range(4):
            begin = time.perf_counter()
            jax.block_until_ready(compiled(x))
            spans.append((time.perf_counter() - begin) / times)
        sent = count * np.dtype(dtype).itemsize
        share = (ranks - 1) / ranks if kind == "all_to_all" else ranks - 1
        received = sent * share if kind in ("all_to_all", "all_gather") else sent
        rate = received / min(spans)
        return {
            "ranks": ranks,
            "received_bytes": int(received),
            "us": round(min(spans) * 1e6, 2),
            "gb_per_second": round(rate / 1e9, 3),
            "of_nvlink": round(rate / NVLINK, 4),
        }

    return measure
