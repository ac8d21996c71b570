"""Runs on emulated devices, in a process of its own: `python mesh_runs.py NAME ARGUMENTS`.

Each prints one JSON object. Devices are emulated by a flag that must be set before jax starts.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from math import ceil

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import install_import_hook

with install_import_hook("deepinfer_jax", "beartype.beartype"):
    import deepinfer_jax as di
    from deepinfer_jax.checkpoint.convert import save_converted
    from deepinfer_jax.model import cached, forward
    from deepinfer_jax.model import rebalance as rebalance_of
    from deepinfer_jax.model.cached import make_plan
    from deepinfer_jax.model.on_mesh import over_mesh, program_over
    from deepinfer_jax.model.placement import cache_partitions, partitions_like
    from deepinfer_jax.numerics.lint import lint_hlo
from sharding import gather
from sharding.collectives import collectives_of
from sharding.exchange import exchange
from sharding.footprint import describe
from sharding.mesh import AXES, EXPERT_AXES, build_mesh, mesh_sizes


def bits(array):
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8).tobytes()


def token_ids(config, count, seed=0):
    return np.random.default_rng(seed).integers(3, config.vocab_size - 20, count, dtype=np.int32)


def forms(model):
    """Logits, hidden states and a draft round of a sequence, one after the other."""
    ids = token_ids(model.config, 43)
    found = [di.score(model.params, model.config, ids)]
    found += di.hidden_states(model.params, model.config, ids[:19])
    if model.config.draft is not None:
        round_ = di.draft(model.params, model.config, ids[:23])
        found += [round_.logits, round_.token_ids, round_.confidence_logit]
    return b"".join(map(bits, found))


def cached_rows(model):
    """Logits of four sequences in uneven chunks that share steps, then 8 steps of one row each."""
    config, rng = model.config, np.random.default_rng(1)
    runtime = di.RuntimeConfig(max_seqs=5, max_len=128, max_tokens_per_step=64)
    state = di.init_state(config, runtime)
    prompts = {1: 37, 2: 21, 4: 9, 5: 50}
    ids = {slot: token_ids(config, n + 8, slot).tolist() for slot, n in prompts.items()}
    done, found = dict.fromkeys(prompts, 0), {}
    while any(done[slot] < len(ids[slot]) for slot in prompts):
        rows = []
        for slot, count in prompts.items():
            left = count - done[slot]
            take = min(int(rng.integers(1, 20)), left) if left > 0 else done[slot] < len(ids[slot])
            rows += [(ids[slot][p], p, slot) for p in range(done[slot], done[slot] + take)]
            done[slot] += int(take)
        plan = make_plan(config, *map(list, zip(*rows, strict=True)), length=80)
        state, out = di.prefill(model.params, config, state, plan)
        logits = np.asarray(out.logits)
        found |= {(slot, p): logits[i] for i, (_, p, slot) in enumerate(rows)}
    return b"".join(bits(found[key]) for key in sorted(found))


def engine_runtime(config, **options):
    """With drafts of three, where there are any, and logit hashes."""
    return di.RuntimeConfig(
        max_seqs=4,
        max_len=256,
        max_tokens_per_step=48,
        record="logits",
        **({"draft_policy": "fixed", "draft_length": 3} if config.draft else {}),
        **options,
    )


def engine(model):
    """What `answers` returns for an engine of its own."""
    with di.LLM(model, runtime=engine_runtime(model.config)) as llm:
        return answers(llm)


def answers(llm):
    """Tokens, log-probabilities and records of requests that share a prompt, with drafts."""
    config = llm.model.config
    shared = token_ids(config, 140).tolist()
    prompts = [shared + token_ids(config, n, n).tolist() for n in (3, 17, 30)]
    prompts += [token_ids(config, n, n).tolist() for n in (1, 9, 61)]
    params = [
        di.SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=12, logprobs=2, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts[:1], params[:1], progress=False)
    outputs += llm.generate(prompts[1:], params[1:], progress=False)
    stats = llm.stats()
    assert max(one.cached_tokens for one in outputs) >= 128, "no prefix was reused"
    assert config.draft is None or sum(stats.verified) > 0, "nothing was drafted"
    found = []
    for one in outputs:
        found.append((one.token_ids, bits(one.logprobs).hex(), repr(one.top_logprobs)))
        hashes = one.record.outputs[0].logit_hashes
        assert hashes is not None
        found += [hashes, one.record.model["weights_sha256"]]
    return repr(found).encode()


def equal(source, numerics, kind, *meshes):
    """Which meshes give the bits of one device, and that expert weights are really split."""
    run = {"forms": forms, "cached": cached_rows, "engine": engine}[kind]
    one = di.load(source, numerics=numerics)
    expected = run(one)
    result = {}
    for mesh in meshes:
        model = di.load(source, numerics=numerics, mesh=json.loads(mesh))
        result[mesh] = run(model) == expected
    return result


def counted(llm):
    """Returns (`answers`, the programs that they compiled) of an engine that is warmed up first."""
    compiled, engine = [], llm.engine

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    assert not engine.has_work
    found = answers(llm)
    return found, len(compiled)


def held_bytes(tree):
    """Bytes of some arrays on the first device."""
    device = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def engine_program(source, mesh):
    """Bytes that an engine holds and exchanges on a mesh, and what it compiles while it runs."""
    model, sizes = di.load(source, mesh=json.loads(mesh)), mesh_sizes(json.loads(mesh))
    config, found = model.config, {}
    with di.LLM(model, runtime=engine_runtime(config)) as llm:
        params, layout = llm.engine.device.params, llm.engine.layouts[-1]
        text = llm.engine.device.compile(layout).as_text()
        said = describe(params, partitions_like(params, config), sizes)
        found["held"], found["said"] = held_bytes(params), said.device
        _, found["compiled"] = counted(llm)
    moved = collectives_of(text)
    found["kinds"] = sorted({one.kind for one in moved})
    found["adds"] = sorted({d for c in moved if c.kind == "all-reduce" for d, _ in c.result})
    found["lint"] = [str(f) for f in lint_hlo(text) if f.rule == "float-collective"]
    gathered = [one for one in moved if one.kind == "all-gather"]
    found["gathered"] = [[d, list(shape)] for one in gathered for d, shape in one.result]
    tables = config.engram.engram_layer_ids
    found["exchanged"] = sum(one.bytes for one in moved if one.kind == "all-to-all")
    # parallelism.md 7, A': rows as FP8 codes, scales, an id and a weight; answers as BF16. Here id
    # and weight take 4 bytes each, and a byte says that the slot holds a row.
    width, top, rows = config.hidden_size, config.moe.num_experts_per_tok, config.execution.row_tile
    slots = slots_of(rows * top, sizes.expert_parallel)
    experts = slots * (width + width // 32 + 6 + 3 + 2 * width)
    # Engram: an id there and a row back, float32 where a small model was expanded.
    row = np.prod(params.engram.tables[0].shape[1:]) * 4
    lookups = slots_of(rows * config.engram.columns, sizes.devices) * (4 + row)
    found["by_formula"] = 2 * experts + len(tables) * int(lookups)  # backbone and draft stages
    found["window"] = config.attention.head_dim + config.attention.head_dim // 32
    found["rows"] = rows * sizes.of(("er", "dp", "cp"))
    return found


def slots_of(items, ranks):
    """Slots of one round of an exchange, on all ranks together."""
    return ranks * ceil(1.25 * items / ranks / 8) * 8


def footprint(source, mesh):
    """Bytes that the first device really holds, against `describe`; experts over their group."""
    model, sizes = di.load(source, mesh=json.loads(mesh)), mesh_sizes(json.loads(mesh))
    state = di.init_state(model.config, di.RuntimeConfig(max_seqs=8, max_len=128))
    said = [
        describe(model.params, partitions_like(model.params, model.config), sizes, "params."),
        describe(state, cache_partitions(state), sizes, "state."),
    ]
    held = [held_bytes(tree) for tree in (model.params, state)]
    experts, total = said[0].matching("experts")
    return {
        "held": held,
        "said": [one.device for one in said],
        "experts": experts,
        "experts_total": total,
        "ranks": sizes.expert_parallel,
    }


def loading(source, mesh, folder):
    """Weights from files and from a converted checkpoint, on a mesh, are those of one device."""
    one = di.load(source)
    save_converted(one, one.config, folder, tokenizer_from=source)
    unlike, placed = [], 0
    for given in (source, folder):
        many = di.load(given, mesh=json.loads(mesh))
        stages = many.params.draft.stages
        params = replace(
            many.params, draft=replace(many.params.draft, stages=replace(stages, replicas=None))
        )
        pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(params), strict=True)
        for expected, found in pairs:
            kept = np.asarray(found)[tuple(slice(size) for size in expected.shape)]
            if bits(kept) != bits(expected):
                unlike.append(str(expected.shape))
            wanted = found.sharding.shard_shape(found.shape)
            placed += wanted == found.addressable_shards[0].data.shape
    return {"unlike": unlike, "placed": placed, "leaves": 2 * len(jax.tree.leaves(one.params))}


def program(source, mesh):
    """Collectives and findings of the lint in a forward pass, and how often it compiles."""
    model = di.load(source, mesh=json.loads(mesh))
    ids = token_ids(model.config, 43)
    run = program_over(forward.score_ids, model.config, model.params, 1)
    text = run.lower(model.params, ids).compile().as_text()
    held = {tuple(leaf.shape) for leaf in jax.tree.leaves(model.params.layers.experts)}
    found = collectives_of(text)
    gathered = [one for one in found if one.kind == "all-gather"]
    over_mesh(forward.score_ids, model.config, model.params, ids)
    over_mesh(forward.score_ids, model.config, model.params, ids)
    return {
        "kinds": sorted({one.kind for one in found}),
        "adds_floats": [one.label for one in found if one.adds_floats],
        "lint": [str(f) for f in lint_hlo(text) if f.rule == "float-collective"],
        "gathers_weights": [
            one.label for one in gathered for _, shape in one.result if shape in held
        ],
        "exchanged": sorted(
            {
                (dtype, shape[-1], len(one.result))
                for one in found
                if one.kind == "all-to-all"
                for dtype, shape in one.result
                if len(shape) == 3
            }
        ),
        "compiled": run._cache_size(),
    }


def rebalance(source, mesh, extras):
    """Experts move between steps, with and without extras: bits stay, and programs too."""
    model = di.load(source, mesh=json.loads(mesh))
    config, slots = model.config, 3
    ids = {slot: token_ids(config, 40, slot).tolist() for slot in range(1, slots + 1)}

    def rows(params, config, between):
        state = di.init_state(config, di.RuntimeConfig(max_seqs=slots, max_len=64))
        found = []
        for step in range(8):
            at = range(5 * step, 5 * step + 5)
            given = [(ids[slot][p], p, slot) for slot in ids for p in at]
            plan = make_plan(config, *map(list, zip(*given, strict=True)), length=32)
            state, out = di.decode(params, config, state, plan)
            found.append(bits(np.asarray(out.logits)[: len(given)]))
            params = between(step, params)
        return found, params

    one = di.load(source)
    expected, _ = rows(one.params, one.config, lambda step, params: params)
    params = rebalance_of.with_extras(model.params, config, int(extras)) if extras else model.params
    counts = [np.asarray(rebalance_of.expert_rows(params, config, ids[slot])) for slot in ids]
    window = np.stack([*counts, *counts, *counts, *counts])
    first = rebalance_of.layouts_of(params.layers)
    rng, moved = np.random.default_rng(0), []

    def between(step, params):
        held = rebalance_of.layouts_of(params.layers)
        if step == 1:
            found = rebalance_of.decide_layers(params, config, window, threshold=-10.0)
            layouts = np.stack([one.layout for one in found])
        elif step == 4:
            layouts = np.stack([rng.permutation(layout) for layout in held])
        else:
            return params
        moved.append(int((layouts != held).sum()))
        after = rebalance_of.place_experts(params, config, layouts)
        same = np.array_equal(rebalance_of.layouts_of(after.layers), layouts)
        assert same, "maps are not those of the layouts"
        return after

    found, params = rows(params, config, between)
    total = int(window.sum())
    return {
        "equal": found == expected,
        "moved": moved,
        "slots": first.shape[1],
        "rows": [total, 4 * slots * 40 * config.num_hidden_layers * config.moe.num_experts_per_tok],
    }


def moving(source, mesh, extras):
    """An engine that places experts again while it serves: bits, moves, and what is compiled."""
    expected = engine(di.load(source))
    model = di.load(source, mesh=json.loads(mesh))
    before = di.score(model.params, model.config, [3, 4, 5])
    runtime = engine_runtime(
        model.config, rebalance_steps=3, rebalance_gain=0.0, redundant_experts=int(extras)
    )

    with di.LLM(model, runtime=runtime) as llm:
        found, count = counted(llm)
        stats, text = llm.stats(), llm.stats().prometheus()
        assert f"deepinfer_experts_moved_slots_total {stats.experts.moved_slots}" in text
        experts = llm.engine.device.params.layers.experts
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(experts))
        ranks = mesh_sizes(json.loads(mesh)).expert_parallel
        is_split = total == ranks * held_bytes(experts)
        llm.replace_params(model.params)  # they lie as at first, and nothing was recorded of them
        assert llm.stats().experts.steps == 0
        again = answers(llm)
    after = di.score(model.params, model.config, [3, 4, 5])  # the model's own experts stayed
    return {
        "equal": found == again == expected,
        "compiled": count,
        "model_is_whole": bits(before) == bits(after),
        "is_split": is_split,
        **{name: getattr(stats.experts, name) for name in (
            "steps", "imbalance", "gain", "decisions", "placed_layers", "moved_slots")},
    }  # fmt: skip


def exchanges():
    """Every scheme of caps, routing and ranks gives each item its own answer, bit for bit."""
    rng, wrong, cases = np.random.default_rng(0), [], 0
    table = rng.normal(size=(16, 5)).astype(np.float32)
    spec, split = jax.P(EXPERT_AXES), jax.P(AXES)
    for mesh in ({"dp": 8}, {"dp": 2, "cp": 4}, {"er": 2, "dp": 2, "cp": 2}, {"er": 8}):
        ranks = mesh_sizes(mesh).expert_parallel
        for cap in (1, 8, 64):

            def body(table, ids, x, valid, cap=cap):
                held = table.shape[0]
                items = {"x": x[0], "row": ids[0] % held}

                def serve(got, present):
                    return got["x"] * table[got["row"]]

                return exchange(serve, items, ids[0] // held, valid[0], axes=EXPERT_AXES, cap=cap)[
                    None
                ]

            run = jax.jit(
                jax.shard_map(
                    body,
                    mesh=build_mesh(mesh),
                    in_specs=(spec, split, split, split),
                    out_specs=split,
                    check_vma=False,
                )
            )
            for routing in ("uniform", "one expert", "one rank", "nothing"):
                ids = rng.integers(0, 16, (8, 24)).astype(np.int32)
                ids = {"one expert": ids * 0 + 5, "one rank": ids % (16 // ranks)}.get(routing, ids)
                valid = (rng.random((8, 24)) < 0.8) & (routing != "nothing")
                x = rng.normal(size=(8, 24, 5)).astype(np.float32)
                x[:, 0, 0] = -0.0
                expected = np.where(valid[..., None], x * table[ids], np.float32(0))
                cases += 1
                if bits(run(table, ids, x, valid)) != bits(expected):
                    wrong.append([mesh, cap, routing])
    return {"cases": cases, "wrong": wrong}


def gathering():
    """Split arrays come to the host in parts, as one device would hold what is not padding."""
    gather.is_here, gather.PART_BYTES = lambda leaf: False, 64
    rng, wrong = np.random.default_rng(0), []
    for mesh in ({"dp": 8}, {"er": 2, "dp": 2, "cp": 2}):
        grid = build_mesh(mesh)
        for dtype in ("uint8", "float32", "bfloat16"):
            for shape, spec, kept in (
                ((3, 16, 5), jax.P(None, EXPERT_AXES), (3, 13, 5)),
                ((48, 7), jax.P(AXES), (41, 7)),
                ((8, 3), jax.P(AXES), (8, 3)),
            ):
                value = np.asarray(rng.integers(0, 200, shape)).astype(jnp.dtype(dtype))
                leaf = jax.device_put(value, jax.NamedSharding(grid, spec))
                parts = list(gather.host_parts(leaf, kept))
                expected = value[tuple(slice(count) for count in kept)]
                if b"".join(map(bits, parts)) != bits(expected) or len(parts) < 2:
                    wrong.append([mesh, dtype, shape])
    return wrong


def shuffled(source):
    """A mesh of devices in another order gives the same bits."""
    devices = np.asarray(jax.devices())[np.random.default_rng(3).permutation(8)]
    mesh = build_mesh({"dp": 2, "cp": 2, "er": 2}, list(devices))
    run = partial(di.load, source)
    return {"equal": forms(run(mesh=mesh)) == forms(run())}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    assert cached is not None
    print(json.dumps(globals()[name](*arguments)))
