"""Parts b and d of `benchmarks.multi_gpu`: bits on meshes, experts that really lie apart, EPLB.

Every point compiles first, and runs on the devices only while it holds the lock.
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import deepinfer_jax as di
from benchmarks import multi_gpu_slice as slices
from benchmarks.multi_gpu_times import seconds_of_step
from benchmarks.network_slice import Case
from benchmarks.turns import Work, turn
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.model import rebalance
from deepinfer_jax.model.cached import init_state, lower_program, make_plan
from deepinfer_jax.model.lowering import abstract_state
from deepinfer_jax.model.placement import cache_partitions
from sharding.eplb.score import imbalance
from sharding.mesh import mesh_sizes

#: Steps of the slice that run with a flipped bit: hundreds of rows, of which some must differ.
PLANTED = 4
Rows = list[tuple[int, int, int]]  # id, position, slot


def digests(rows: Any) -> list[str]:
    """Returns the SHA-256 of every row's bytes, 16 digits."""
    host = np.ascontiguousarray(np.asarray(rows))
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in host]


def planted(params: Any, *, in_expert: bool) -> Any:
    """Returns the parameters with one bit of one weight flipped.

    in_expert: of the last expert of the last layer, which the last device of a mesh holds: it is
    noticed only if rows reach that device and come back. Otherwise of the final norm.
    """

    def flip(leaf: Any) -> Any:
        wide = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        place = (-1, -1, *(0,) * (leaf.ndim - 2)) if in_expert else (0,)
        # the second bit of an FP4 code changes its size; bit 6 of BF16 the larger half of a number
        bit = wide(2 if in_expert else 1 << (6 if leaf.dtype.itemsize == 2 else 22))

        def one(x: Any) -> Any:
            bits = lax.bitcast_convert_type(x, wide)
            return lax.bitcast_convert_type(bits.at[place].set(bits[place] ^ bit), x.dtype)

        return jax.jit(one, out_shardings=leaf.sharding)(leaf)

    if not in_expert:
        return replace(params, norm=flip(params.norm))
    leaves, tree = jax.tree.flatten(params.layers.experts)
    experts = jax.tree.unflatten(tree, [flip(leaves[0]), *leaves[1:]])
    return replace(params, layers=replace(params.layers, experts=experts))


def schedule(config: Any, prompts: dict[int, int], most: int, decode: int = 4) -> list[Rows]:
    """Returns steps of prompts in uneven chunks that share steps, then of one row each.

    prompts: tokens by slot. most: rows of a step.
    """
    rng, top = np.random.default_rng(1), min(config.vocab_size, 100_000) - 20
    ids = {s: np.random.default_rng(s).integers(3, top, n + decode) for s, n in prompts.items()}
    done, steps = dict.fromkeys(prompts, 0), []
    while any(done[slot] < len(ids[slot]) for slot in prompts):
        rows: Rows = []
        for slot, count in prompts.items():
            left = count - done[slot]
            chunk = min(int(rng.integers(1, most // len(prompts) + 1)), left)
            take = chunk if left > 0 else int(done[slot] < len(ids[slot]))
            rows += [(int(ids[slot][p]), p, slot) for p in range(done[slot], done[slot] + take)]
            done[slot] += take
        steps.append(rows)
    return steps


def plan_for(config: Any, rows: Rows, length: int) -> Any:
    """Returns the plan of some rows, the same on all devices."""
    ids, position, slot = map(list, zip(*rows, strict=True))
    plan = make_plan(config, ids, position, slot, length=length)
    mesh = config.execution.mesh
    return plan if mesh is None else jax.device_put(plan, NamedSharding(mesh, PartitionSpec()))


def cached_program(config: Any, params: Any, runtime: Any, plan: Any) -> Any:
    """Returns `prefill` compiled for abstract or concrete parameters; takes the state over."""
    mesh = config.execution.mesh
    if mesh is None:
        state = jax.eval_shape(partial(init_state, config, runtime))
    else:
        state = abstract_state(config, mesh_sizes(mesh), runtime)
        state = slices.with_places(state, cache_partitions(state), mesh)
    return lower_program(params, config, state, plan).compile()


def run_rows(
    program: Any, config: Any, params: Any, runtime: Any, steps: list[Rows], n: int
) -> tuple[list[str], np.ndarray]:
    """Returns (digest of every row's logits, some logits of each), in the order of the steps."""
    state, found, sample = init_state(config, runtime), [], []
    for rows in steps:
        state, out = program(params, state, plan_for(config, rows, n))
        logits = np.asarray(out.logits)[: len(rows)]
        found += digests(logits)
        sample.append(logits[:, :64])
    return found, np.concatenate(sample)


def _differing(one: list[str], other: list[str]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _record(work: Work, task: dict[str, Any], config: Any, found: Any, flipped: Any) -> None:
    """Writes the digests to a file and a line about them."""
    path = work.folder / f"{task['name']}.npz"
    samples = found[1] if found[1] is not None else np.zeros((len(found[0]), 1), np.float32)
    np.savez(path, digests=np.asarray(found[0]), sample=samples)
    noticed = _differing(found[0][: len(flipped[0])], flipped[0])
    line = {"point": "bits of a mesh", "what": task["what"], "level": task["level"]}
    kernels = {"kernels": dict(config.execution.kernels)}
    figures = {"rows": len(found[0]), "planted_rows_that_differ": noticed}
    work.put(line | kernels | figures | {"finite": bool(np.isfinite(samples).all())} | task["split"]
             | {"file": str(path)})  # fmt: skip


def _slice(work: Work, task: dict[str, Any], most: int) -> tuple[Any, Any, list[Rows]]:
    """Returns config, runtime and steps of at most `most` rows of the slice."""
    mesh = tuple(task["mesh"].items())
    config = slices.slice_config(slices.Setting(task["level"], task["kernels"], mesh, work.small))
    # A step of the real sizes takes XLA a second: few steps.
    prompts = {1: 75, 2: 21, 4: 9, 5: 30} if work.small else {1: 220, 2: 60, 5: 9}
    longest = 128 if work.small else 1024
    runtime = di.RuntimeConfig(max_seqs=5, max_len=longest, max_tokens_per_step=most)
    return config, runtime, schedule(config, prompts, most, decode=4 if work.small else 2)


def slice_bits(work: Work, task: dict[str, Any]) -> None:
    """The eight-layer slice through the cached form: prefill in chunks, then decode."""
    length = 48 if work.small else 256
    config, runtime, steps = _slice(work, task, length)
    plan = plan_for(config, steps[0], length)
    with work.phase("compile"):
        program = cached_program(config, slices.abstract_slice(config), runtime, plan)
    with work.phase("waiting and turn"), turn(work.lock):
        with work.phase("weights"):
            params = jax.block_until_ready(slices.slice_params(config))
        split = slices.split_report(params.layers.experts, slices.sizes_of(config))
        run = partial(run_rows, program, config, runtime=runtime, steps=steps, n=length)
        with work.phase("run"):
            found = run(params=params)
        with work.phase("planted run"):
            flipped = run(params=planted(params, in_expert=True), steps=steps[:PLANTED])
    _record(work, task | {"split": split}, config, found, flipped)


def bucket_bits(work: Work, task: dict[str, Any]) -> None:
    """The slice on one device: the same steps in programs of two lengths, as buckets have them."""
    short, long = (48, 96) if work.small else (256, 512)  # blocks of a GPU have 256 rows
    config, runtime, steps = _slice(work, task, short)
    with work.phase("compile"), ThreadPoolExecutor(2) as pool:
        programs = list(
            pool.map(
                lambda n: cached_program(
                    config, slices.abstract_slice(config), runtime, plan_for(config, steps[0], n)
                ),
                (short, long),
            )
        )
    with turn(work.lock):
        params = slices.slice_params(config)
        one, other = (
            run_rows(program, config, params, runtime, steps, n)
            for program, n in zip(programs, (short, long), strict=True)
        )
    line = {"point": "bits of two program lengths", "what": task["what"], "level": task["level"]}
    line |= {"lengths": [short, long], "rows": len(one[0])}
    line |= {"rows_that_differ": _differing(one[0], other[0])}
    line |= {"largest_difference_seen": float(np.abs(one[1] - other[1]).max())}
    work.put(line | {"kernels": dict(config.execution.kernels)})


def nano_bits(work: Work, task: dict[str, Any]) -> None:
    """Nano whole, through `load`: pure forms, cached rows, or the engine with drafts."""
    model = di.load("nano", determinism=task["level"], mesh=task["mesh"] or None)
    config, params = model.config, model.params
    split = slices.split_report(params.layers.experts, slices.sizes_of(config))
    task = task | {"split": split}
    if task["kind"] == "cached":
        runtime = di.RuntimeConfig(max_seqs=5, max_len=128, max_tokens_per_step=64)
        steps = schedule(config, {1: 37, 2: 21, 4: 9, 5: 50}, 64, decode=8)
        with work.phase("compile"):
            program = cached_program(config, params, runtime, plan_for(config, steps[0], 64))
        run = partial(run_rows, program, config, runtime=runtime, steps=steps, n=64)
        with work.phase("waiting and turn"), turn(work.lock):
            found = run(params=params)
            _record(work, task, config, found, run(params=planted(params, in_expert=False)))
        return
    with work.phase("compile"):
        ready = (_forms if task["kind"] == "forms" else _engine)(model)
    with work.phase("waiting and turn"), turn(work.lock):
        found = ready(params)
        _record(work, task, config, found, ready(planted(params, in_expert=False)))


def _forms(model: Any) -> Callable[[Any], Any]:
    """Returns what runs score, hidden_states and draft, compiled side by side."""
    config = model.config
    ids = np.random.default_rng(0).integers(3, config.vocab_size - 20, 43)

    def drafted(params: Any) -> Any:
        found = di.draft(params, config, ids[:23])
        return found.logits, found.token_ids[:, None], found.confidence_logit[:, None]

    forms = (
        lambda params: (di.score(params, config, ids),),
        lambda params: tuple(di.hidden_states(params, config, ids[:19])),
        drafted,
    )
    with ThreadPoolExecutor(len(forms)) as pool:
        programs = list(pool.map(lambda form: jax.jit(form).lower(model.params).compile(), forms))

    def run(params: Any) -> Any:
        leaves = [leaf for program in programs for leaf in program(params)]
        return [one for leaf in leaves for one in digests(leaf)], None

    return run


def _engine(model: Any) -> Callable[[Any], Any]:
    """Returns what runs six requests that share a prompt, with drafts of three and logit hashes."""
    config = model.config

    def some(count: int, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(3, config.vocab_size - 20, count).tolist()

    shared = some(140, 0)
    prompts = [shared + some(n, n) for n in (3, 17, 30)] + [some(n, n) for n in (1, 9, 61)]
    runtime = di.RuntimeConfig(
        max_seqs=4,
        max_len=256,
        max_tokens_per_step=48,
        record="logits",
        draft_policy="fixed",
        draft_length=3,
    )
    engine = Engine(model, runtime)
    layouts = engine.layouts
    with ThreadPoolExecutor(len(layouts)) as pool:
        list(pool.map(engine.device.compile, layouts))

    def run(params: Any) -> Any:
        if params is not engine.model.params:
            engine.replace_params(params)
        found: list[str] = []
        for part in (range(1), range(1, len(prompts))):
            requests = [
                engine.submit(
                    prompts[i],
                    di.SamplingParams(
                        temperature=0.8 * (i % 2),
                        seed=i,
                        max_tokens=12,
                        logprobs=2,
                        ignore_eos=True,
                        detokenize=False,
                    ),
                )
                for i in part
            ]
            engine.drain()
            for one in (request.output() for request in requests):
                record: Any = one.record
                words = [repr(one.token_ids), np.asarray(one.logprobs).tobytes().hex()]
                words += [repr(value) for value in record.outputs[0].logit_hashes]
                found += [hashlib.sha256(word.encode()).hexdigest()[:16] for word in words]
        if not sum(engine.stats().verified):
            raise RuntimeError("nothing was drafted")
        return found, None

    return run


def eplb_bits(work: Work, task: dict[str, Any]) -> None:
    """Nano at level "batch" with extra slots: rows before and after experts moved at random."""
    loaded: Any = di.load("nano", determinism="batch", mesh=task["mesh"])
    config = loaded.config
    ranks = mesh_sizes(config.execution.mesh).expert_parallel
    held = rebalance.with_extras(loaded.params, config, ranks)
    runtime = di.RuntimeConfig(max_seqs=5, max_len=128, max_tokens_per_step=64)
    steps = schedule(config, {1: 37, 2: 21, 4: 9, 5: 50}, 64, decode=2)
    program = cached_program(config, held, runtime, plan_for(config, steps[0], 64))
    run = partial(run_rows, program, config, runtime=runtime, steps=steps, n=64)
    with turn(work.lock):
        before = run(params=held)[0]
        layouts, rng = rebalance.layouts_of(held.layers), np.random.default_rng(0)
        wanted = np.stack([rng.permutation(layout) for layout in layouts])
        after = run(params=rebalance.place_experts(held, config, wanted))[0]
    work.put(
        {
            "point": "bits across a re-placement",
            "what": "nano",
            "level": "batch",
            "slots": int(layouts.shape[1]),
            "moved_slots": int((wanted != layouts).sum()),
            "rows": len(before),
            "rows_that_differ": _differing(before, after),
        }
    )


def eplb_times(work: Work, task: dict[str, Any]) -> None:
    """The slice under a skewed router: imbalance and step time before and after re-placement."""
    mesh = tuple(task["mesh"].items())
    setting = slices.Setting(task["level"], task["kernels"], mesh, work.small, layers=4)
    config = slices.slice_config(setting)
    sizes, experts = slices.sizes_of(config), config.moe.n_routed_experts
    extras = max(sizes.expert_parallel, experts // 8)
    rows = (8 if work.small else 128) * sizes.cp
    case = Case("decode", rows, 256 if work.small else 16384, rows)
    program = slices.compiled_step(config, case, extras=extras, counts=True)
    hot, strength = experts // 8, 0.4
    bias = np.zeros((config.num_hidden_layers, experts), np.float32)
    bias[:, hot : 2 * hot] = strength  # beside the first ones, of which the extras are copies

    def window(params: Any, first: int) -> tuple[list[str], np.ndarray]:
        state, bits, seen = slices.cache_of(config, case), [], []
        for number in range(2 if work.small else 8):
            given = slices.rows_of(config, case, seed=first + number)
            state, logits, counts = program(params, state, *given)
            bits += digests(logits)
            seen.append(np.asarray(counts).sum(axis=0))
        return bits, np.stack(seen)

    def step_seconds(params: Any) -> list[float]:
        held = [slices.cache_of(config, case)]
        given = slices.rows_of(config, case, seed=200)
        return seconds_of_step(program, params, held, given, loops=2 if work.small else 20)

    def mean_imbalance(seen: np.ndarray, layouts: np.ndarray) -> float:
        ranks = sizes.expert_parallel
        found = [imbalance(seen[:, i], layout, ranks) for i, layout in enumerate(layouts)]
        return round(float(np.mean(found)), 3)

    with turn(work.lock):
        params = slices.slice_params(config, extras, bias=bias)
        _, load = window(params, 100)
        bits_before, held_out = window(params, 200)
        before = step_seconds(params)
        old = rebalance.layouts_of(params.layers)
        decisions = rebalance.decide_layers(params, config, load)
        wanted = np.stack([one.layout for one in decisions])
        begin = time.perf_counter()
        params = rebalance.place_experts(params, config, wanted)
        jax.block_until_ready(params.layers.experts)
        moving = time.perf_counter() - begin
        bits_after, _ = window(params, 200)
        after = step_seconds(params)
    work.put(
        {
            "point": "EPLB",
            "what": "slice",
            "level": task["level"],
            "kernels": dict(config.execution.kernels),
            "skew": f"router bias +{strength} for experts {hot}..{2 * hot - 1} of {experts}",
            "case": f"decode of {rows} rows a replica, {case.context} tokens each",
            "extras": extras,
            "hot_share_of_rows": round(float(load[:, :, hot : 2 * hot].sum() / load.sum()), 3),
            "imbalance_before": mean_imbalance(held_out, old),
            "imbalance_after": mean_imbalance(held_out, wanted),
            "moved_slots": int((wanted != old).sum()),
            "moving_seconds_with_compilation": round(moving, 2),
            "step_us_before": round(min(before) * 1e6, 1),
            "step_us_after": round(min(after) * 1e6, 1),
            "rows": len(bits_before),
            "rows_that_differ": _differing(bits_before, bits_after),
        }
    )
