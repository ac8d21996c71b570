"""How fast is a step of the network at its real sizes: Pallas kernels against XLA on one GPU?

    python -m benchmarks.network_slice --json OUT.jsonl [--runs pallas:off,xla:off,pallas:batch]
                                       [--cases 1,32,256,prefill] [--seconds 500] [--lock FILE]

Four layers of DeepSeek-V4.1-Flash with random weights and 64 experts: window and Engram with a
small table; Full at ratio 2; Full at ratio 1, which picks the candidates; Reindex. Decode cases
have a context of 16,384 tokens in every sequence, and the prefill 8,192 rows of one.

One line a run and case: `wall_us` of a step in a loop of steps that pass the state on, and the
kernel time by CUPTI, split by op, with what the op needs at least (`bound_us`, from the bytes and
products of kernels.md 4 and this GPU's ceilings). At level "batch" every row is also run alone, and
`rows_that_differ` counts rows with other bits. FILE is locked while something is timed, for runs
side by side. `distance` is that of the hidden rows from those of the first run of the same case, in
norms of the latter; the layers round to BF16, so another order of sums already makes some.
"""

import argparse
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.turns import alone

CONTEXT, PREFILL = 16384, 8192
EXPERTS, TABLE_ROWS = 64, 40000
COPY, BF16 = 4.3e12, 790e12  # kernels.md 12
LOOPS = 20
#: Parts of kernel names -> op; what fits none is XLA's own.
OPS = (
    "sparse_mla_decode",
    "indexer_logits",
    "select_topk",
    "grouped_matmul",
    "block_scaled_matmul",
    "matmul_bf16",
    "rms_norm_quant",
    "mhc_pre",
)
LIBRARIES = ("nvjet", "gemm", "cutlass", "cublas")


@dataclass(frozen=True)
class Case:
    """Rows of one step: one row of each sequence, or all of them of one sequence."""

    name: str
    rows: int
    context: int
    sequences: int


CASES = {
    "1": Case("decode batch 1", 1, CONTEXT, 1),
    "32": Case("decode batch 32", 32, CONTEXT, 32),
    "256": Case("decode batch 256", 256, CONTEXT, 256),
    "prefill": Case("prefill 8192", PREFILL, PREFILL, 1),
}


def slice_config(kernels: str, level: Any) -> Any:
    """Returns the config of the four layers, run with "pallas" or "xla" at a level."""
    import jax

    import deepinfer_jax as di
    from deepinfer_jax.config.engram_primes import engram_primes
    from deepinfer_jax.config.model import ExecutionConfig
    from deepinfer_jax.determinism import row_tile
    from deepinfer_jax.numerics.selection import attention_widths, choose_kernels

    whole = di.preset("deepseek-v4.1-flash")
    assert whole.engram is not None
    engram = replace(whole.engram, engram_layer_ids=(0,), engram_vocab_size=TABLE_ROWS)
    rows = engram_primes(engram).num_embeddings
    chosen = choose_kernels(
        kernels,
        numerics="checkpoint",
        scale_block=whole.dense_block_size,
        device_kind=jax.devices()[0].device_kind,
        widths=attention_widths(whole),
    )
    return replace(
        whole,
        num_hidden_layers=4,
        attention=replace(
            whole.attention,
            compress_ratios=(0, 2, 1, 1),
            kv_source_layer_ids=(1, 2),
            index_source_layer_ids=(1, 2, 3),
        ),
        indexer=replace(whole.indexer, candidate_source_layer_id=2),
        moe=replace(whole.moe, n_routed_experts=EXPERTS),
        engram=replace(engram, engram_num_embeddings=rows),
        draft=None,
        vision=None,
        execution=ExecutionConfig(
            numerics="checkpoint",
            determinism=level,
            kernels=chosen,
            row_tile=row_tile(level),
            branches="static",
        ),
    )


def filled_state(config: Any, case: Case) -> Any:
    """Returns a cache whose sequences hold random rows up to their context."""
    import jax
    import jax.numpy as jnp

    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.model.cached import init_state

    runtime = RuntimeConfig(
        max_seqs=case.sequences, max_len=case.context, max_tokens_per_step=case.rows
    )
    empty = jax.eval_shape(partial(init_state, config, runtime))
    dim = config.attention.head_dim
    codes = {dim + dim // 32: dim, dim // 2 + dim // 16: dim // 2}  # bytes before the scales

    def leaf(name: str, spec: Any, key: Any) -> Any:
        if spec.dtype != jnp.uint8:
            return jnp.zeros(spec.shape, spec.dtype)
        bits = jax.random.bits(key, spec.shape, jnp.uint8)
        if "index_data" in name:
            return bits
        if "index_scale" in name:
            return 124 + bits % 4
        first = codes[spec.shape[-1]]
        is_q8 = first == dim
        scales = (121 if is_q8 else 0x30) + bits % 4
        values = jnp.where(bits & 0x7F == 0x7F, 0, bits) if is_q8 else bits
        return jnp.where(jnp.arange(spec.shape[-1]) < first, values, scales)

    leaves, tree = jax.tree_util.tree_flatten_with_path(empty)
    root = jax.random.key(1, impl="rbg")
    made = [
        jax.jit(partial(leaf, jax.tree_util.keystr(path), spec))(jax.random.fold_in(root, i))
        for i, (path, spec) in enumerate(leaves)
    ]
    state = jax.tree.unflatten(tree, made)
    blocks = empty.block_table.shape[1]
    table = 1 + jnp.arange(case.sequences * blocks, dtype=jnp.int32).reshape(-1, blocks)
    return state.replace(block_table=jnp.pad(table, ((1, 0), (0, 0))))


def plan_of(config: Any, case: Case, only: int | None = None) -> Any:
    """Returns the plan of a case, or of one of its rows alone, equally long."""
    import numpy as np

    from deepinfer_jax.model.cached import make_plan
    from deepinfer_jax.model.step import plan_length

    ids = np.random.default_rng(2).integers(3, 99000, case.rows)
    if case.sequences > 1:
        position, slot = np.full(case.rows, case.context - 1), 1 + np.arange(case.rows)
    else:
        position = case.context - case.rows + np.arange(case.rows)
        slot = np.ones(case.rows, int)
    length = case.rows
    if config.execution.is_tiled:
        length = plan_length(case.rows, config.execution.row_step)
    rows = slice(None) if only is None else slice(only, only + 1)
    return make_plan(config, ids[rows], position[rows], slot[rows], length=length)


def bounds(config: Any, case: Case) -> dict[str, float]:
    """Returns the least microseconds of each op: bytes over the copy rate, or products."""
    from pallas_kernels.mhc_pre.arg_specs import work as mixing
    from pallas_kernels.sparse_mla_decode.arg_specs import Q4N_BYTES, work

    rows, hidden, attention = case.rows, config.hidden_size, config.attention
    moe, layers = config.moe, config.num_hidden_layers
    # every (bytes, multiplications and additions) of an op
    listed = [work(rows, attention.num_attention_heads, 0, Q4N_BYTES)]
    listed += [work(rows, attention.num_attention_heads, 512, Q4N_BYTES)] * 3
    attend = [(moved, flop) for flop, moved in listed]
    keys = [case.context // ratio for ratio in (2, 1, 1)]
    seen = 0.5 if case.sequences == 1 and rows > 1 else 1.0  # a prompt sees half on average
    score = [(case.sequences * n * 68, 8192 * rows * n * seen) for n in keys]
    select = [(2.0 * rows * n * seen, 0.0) for n in keys]
    picks = rows * moe.num_experts_per_tok
    active = EXPERTS * (1 - (1 - 1 / EXPERTS) ** picks)
    expert = 3 * moe.moe_intermediate_size * hidden
    grouped = [(active * expert * 17 / 32, 2.0 * picks * expert)] * layers
    latent, width = attention.q_lora_rank, attention.num_attention_heads * attention.head_dim
    low = attention.o_groups * attention.o_lora_rank
    fp8 = hidden * (latent + attention.head_dim) + latent * width + low * hidden + expert
    dense = [(fp8, 2.0 * rows * fp8)] * layers
    index = latent * config.indexer.index_n_heads * config.indexer.index_head_dim
    dense += [(index, 2.0 * rows * index)] * 3
    engram = (config.engram.columns * config.engram.engram_head_dim) * 5 * hidden
    dense += [(engram, 2.0 * rows * engram)]
    bf16 = width * attention.o_lora_rank + hidden * EXPERTS
    plain = [(2.0 * bf16, 2.0 * rows * bf16)] * layers
    # coefficients of the streams in every half of a layer
    streams = config.mhc.hc_mult
    flop, moved = mixing(rows, streams * hidden, streams * (streams + 2))
    mix = [(moved, flop)] * 2 * layers
    widths = [hidden] * (2 * layers + 1) + [latent, attention.head_dim] * layers
    norm = [(4.0 * rows * width, 0.0) for width in widths]
    ops = {
        "sparse_mla_decode": attend,
        "indexer_logits": score,
        "select_topk": select,
        "grouped_matmul": grouped,
        "block_scaled_matmul": dense,
        "matmul_bf16": plain,
        "mhc_pre": mix,
        "rms_norm_quant": norm,
    }
    return {
        op: sum(max(moved / COPY, flop / BF16) for moved, flop in parts) * 1e6
        for op, parts in ops.items()
    }


def kernel_shares(run: Any) -> tuple[dict[str, float], Counter[str], int]:
    """Returns (microseconds by op, the ten longest of XLA's own by name, launches) of one step."""
    import jax
    from jax.experimental.mosaic.gpu import profiler

    # `profiler.measure` calls a function twice with the same state, which a step takes over
    library: Any = profiler
    cupti = library.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        timings = cupti._cupti_get_timings(True)
    shares: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for name, milliseconds in timings:
        op = next((op for op in OPS if op in name), None)
        if op is None:
            op = "library" if any(part in name for part in LIBRARIES) else "xla"
            own[name[:60]] += milliseconds * 1e3
        shares[op] += milliseconds * 1e3
    return dict(shares), Counter(dict(own.most_common(10))), len(timings)


def compiled_step(config: Any, params: Any, state: Any, plan: Any) -> Any:
    """Returns the compiled step; it takes the state over."""
    import jax

    from deepinfer_jax.model.step import step

    def run(params: Any, state: Any, plan: Any) -> Any:
        state, hidden, _ = step(params, config, state, plan)
        return state, hidden

    return jax.jit(run, donate_argnums=1).lower(params, state, plan).compile()


def differing_rows(config: Any, program: Any, params: Any, case: Case) -> int:
    """Returns how many of eight rows have other bits alone than beside the others."""
    import numpy as np

    def hidden(only: int | None) -> Any:
        found = program(params, filled_state(config, case), plan_of(config, case, only))[1]
        return np.asarray(found).view(np.uint32)

    together = hidden(None)
    picks = sorted({0, case.rows - 1, *range(0, case.rows, max(1, case.rows // 6))})[:8]
    return sum(int((hidden(row)[0] != together[row]).any()) for row in picks)


def run_case(config: Any, params: Any, case: Case, lock: Path | None) -> tuple[Any, dict[str, Any]]:
    """Returns (hidden rows of the first step, record) of one case."""
    import jax
    import numpy as np

    state, plan = filled_state(config, case), plan_of(config, case)
    started = time.monotonic()
    program = compiled_step(config, params, state, plan)
    compile_seconds = time.monotonic() - started
    with alone(lock):
        held = [program(params, state, plan)]
        del state
        jax.block_until_ready(held)
        first = np.asarray(held[0][1])[: case.rows]  # a tiled plan is longer

        def once() -> Any:
            held[0] = program(params, held[0][0], plan)
            return held[0][1]

        spans = []
        for _ in range(3):
            begin = time.perf_counter()
            for _ in range(LOOPS):
                once()
            jax.block_until_ready(held)
            spans.append((time.perf_counter() - begin) / LOOPS)
        shares, own, launches = kernel_shares(once)
    limits = bounds(config, case)
    record = {
        "case": case.name,
        "finite": bool(np.isfinite(first).all()),
        "compile_seconds": round(compile_seconds, 1),
        "wall_us": round(min(spans) * 1e6, 1),
        "kernel_us": round(sum(shares.values()), 1),
        "launches": launches,
        "ops_us": {op: round(us, 1) for op, us in sorted(shares.items())},
        "bound_us": {op: round(us, 1) for op, us in limits.items()},
        "of_roofline": {op: round(limits[op] / us, 3) for op, us in shares.items() if op in limits},
        "longest_of_xla": {name: round(us, 1) for name, us in own.items()},
    }
    if config.execution.determinism == "batch" and case.sequences > 1:
        held.clear()
        record["rows_that_differ"] = differing_rows(config, program, params, case)
    return first, record


def main() -> None:
    """Prints one JSON line per run and case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", default="pallas:off,xla:off,pallas:batch", help="kernels:level")
    parser.add_argument("--cases", default="32,1,256,prefill", help=f"of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new case after these")
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    parser.add_argument("--lock", type=Path, help="a file to lock while something is timed")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from benchmarks.layer_distances import frobenius
    from deepinfer_jax.checkpoint.random_weights import random_params
    from deepinfer_jax.model.kernel_layout import for_kernels

    hidden: dict[str, tuple[str, Any]] = {}
    begin = time.monotonic()
    about = {"question": "network slice", "device": jax.devices()[0].device_kind}

    def put(record: dict[str, Any]) -> None:
        line = json.dumps(about | record | {"seconds": round(time.monotonic() - begin, 1)})
        print(line, flush=True)
        if options.json:
            with options.json.open("a") as out:
                out.write(line + "\n")

    for name in options.runs.split(","):
        kernels, level = name.split(":")
        config = slice_config(kernels, level)
        params = for_kernels(random_params(config, 0), config.execution)
        for case in (CASES[key] for key in options.cases.split(",")):
            if time.monotonic() - begin > options.seconds:
                put({"run": name, "case": case.name, "skipped": "out of time"})
                continue
            try:
                found, record = run_case(config, params, case, options.lock)
                first, expected = hidden.setdefault(case.name, (name, found))
                distance = {"from": first, "frobenius": frobenius(found, expected)}
                put({"run": name} | record | {"distance": distance})
            except Exception as error:  # the other cases still count
                text = f"{type(error).__name__}: {error}"[:900]
                put({"run": name, "case": case.name, "error": text})
        del params


if __name__ == "__main__":
    main()
