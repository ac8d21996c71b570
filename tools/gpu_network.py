"""Compiles a step of nano for an H200 without a GPU, and looks for its kernels in the result.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python tools/gpu_network.py

Under the best kernels of every covered op that has a form for nano's sizes, level "batch", the
optimised HLO must hold a custom call of each op and no product over the hidden width beside them
(kernels.md 7, "real path"). XLA's own products at level "batch" must have the same shapes however
many blocks of rows a program has and however many small experts a device holds, since XLA cuts K by
them. Prints the counts; exits 1 if it does not hold. Part of `make test-gpu-compile`.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gpu_compile import compile_for

from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.config.model import ExecutionConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.determinism import ROW_TILES
from deepinfer_jax.loading import EMBEDDED
from deepinfer_jax.model.cached import init_state
from deepinfer_jax.model.kernel_layout import for_kernels
from deepinfer_jax.model.moe import all_experts
from deepinfer_jax.model.params import ExpertParams
from deepinfer_jax.model.step import Plan, logits, step
from deepinfer_jax.numerics.ops import ops_for
from deepinfer_jax.numerics.selection import attention_widths, choose_kernels
from pallas_kernels.core import fixed

ROWS = 2 * ROW_TILES["gpu"]


def compile_step() -> tuple[dict[str, str], int, str]:
    """Returns (kernels, hidden width, optimised HLO) of one step with drafts and logits."""
    config = read_config(EMBEDDED)
    kernels = dict(
        choose_kernels(
            "pallas",
            numerics="checkpoint",
            scale_block=config.dense_block_size,
            device_kind="NVIDIA H200",
            widths=attention_widths(config),
        )
    )
    execution = ExecutionConfig(
        numerics="checkpoint",
        determinism="batch",
        kernels=tuple(sorted(kernels.items())),
        row_tile=ROW_TILES["gpu"],
    )
    config = replace(config, execution=execution)
    params = jax.eval_shape(partial(for_kernels, execution=execution), abstract_params(config))
    runtime = RuntimeConfig(max_seqs=4, max_len=512, max_tokens_per_step=ROWS)
    state = jax.eval_shape(partial(init_state, config, runtime))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    plan = Plan(ids=rows, position=rows, slot=rows, count=jax.ShapeDtypeStruct((), jnp.int32))

    def run(params, state, plan):  # noqa: ANN001
        state, hidden, _ = step(params, config, state, plan, drafting=True)
        return state, logits(params, config, hidden)

    return kernels, config.hidden_size, compile_for("sm_90", run, params, state, plan)


def kernel_calls(program: str) -> Counter[str]:
    """Returns how often each Pallas kernel is called in an HLO text."""
    calls = re.findall(r'custom-call\(.*?op_name="[^"]*?(\w+)/(?:mpmd_map|pallas_call)"', program)
    return Counter(calls)


def shapes_of(program: str) -> dict[str, str]:
    """Returns type and sizes of every value of an HLO text, as "f32[256,192]"."""
    shapes = dict(re.findall(r"%([\w.-]+) = (\w+\[[\d,]*\])", program))
    return shapes | dict(re.findall(r"([\w.-]+): (\w+\[[\d,]*\])", program))


def products(program: str) -> list[tuple[int, ...]]:
    """Returns the contracted sizes of every product that XLA kept.

    Split products contract a part: its size times the number of parts, the batch axis, counts too.
    """
    shapes = shapes_of(program)
    found = []
    for left, attributes in re.findall(r" dot\(%([\w.-]+), [^)]*\)([^\n]*)", program):
        sizes = [int(n) for n in re.findall(r"\d+", shapes[left].partition("[")[2])]
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)
        assert axes is not None
        contracted = [sizes[int(axis)] for axis in axes[1].split(",")]
        batch = re.search(r"lhs_batch_dims=\{([\d,]*)\}", attributes)
        parts = [sizes[int(axis)] for axis in batch[1].split(",")] if batch else []
        found.append((*contracted, *(size * part for size in contracted for part in parts)))
    return found


def product_shapes(fn: Callable[..., Any], *arguments: Any) -> Counter[tuple[str, str, str]]:
    """Returns the shapes (result, left, right) of the products of a compiled function."""
    text = compile_for("sm_90", fn, *arguments)
    shapes = shapes_of(text)
    dots = re.findall(r"= (\w+\[[\d,]*\])[^=]*? dot\(%([\w.-]+), %([\w.-]+)\)", text)
    return Counter((out, shapes[left], shapes[right]) for out, left, right in dots)


def block_products(blocks: int) -> Counter[tuple[str, str, str]]:
    """Returns the shapes of fixed-order products that share their rows, in so many blocks."""
    rows, shape = ROW_TILES["gpu"], jax.ShapeDtypeStruct

    def run(x, pairs, weights):  # noqa: ANN001
        plain = [fixed.contract(x, w, rows) for w in weights]
        grouped = x.reshape(-1, 4, x.shape[1] // 4)
        plain += [fixed.contract_grouped(grouped, w.reshape(4, -1, 128), rows) for w in weights]
        plain += [fixed.contract_pairs(grouped, p, rows) for p in pairs]
        return [out * 2.0 for out in plain]

    height = rows * blocks
    weights = [shape((384, 512), jnp.bfloat16)] * 2
    pairs = [shape((height, 64, 128), jnp.float32)] * 2
    return product_shapes(run, shape((height, 512), jnp.float32), pairs, weights)


def expert_products(count: int) -> Counter[tuple[str, str, str]]:
    """Returns the shapes of the products of nano's experts where a device holds `count` of them."""
    config, shape = read_config(EMBEDDED), jax.ShapeDtypeStruct
    width, dim = config.moe.moe_intermediate_size, config.hidden_size
    execution = ExecutionConfig(
        numerics="checkpoint",
        determinism="batch",
        kernels=(),
        row_tile=ROW_TILES["gpu"],
        branches="static",
    )
    up, down = (shape((1, count, *sizes), jnp.bfloat16) for sizes in ((width, dim), (dim, width)))
    experts = ExpertParams(w1=up, w2=down, w3=up)
    rows = ROW_TILES["gpu"]
    slots = (shape((rows, 1), jnp.int32), shape((rows, 1), jnp.float32))
    run = partial(all_experts, ops_for(execution), config.moe)
    return product_shapes(
        lambda experts, x, ids, weights: run(experts, 0, x, ids, weights),
        *(experts, shape((rows, dim), jnp.float32), *slots),
    )


def main() -> int:
    """Compiles, looks, prints; returns the exit status."""
    started = time.monotonic()
    kernels, width, program = compile_step()
    calls, left = kernel_calls(program), products(program)
    print(f"gpu_network: {dict(calls)}; products left to XLA: {len(left)}")
    faults = [
        f"no custom call of {op}" for op in sorted(kernels) if not any(op in name for name in calls)
    ]
    library = re.findall(r'custom_call_target="(__cublas[^"]*|__triton_gemm[^"]*)"', program)
    faults += [f"a library product: {name}" for name in library]
    faults += [f"a product over the hidden width {width}: {one}" for one in left if width in one]
    one, two = block_products(1), block_products(2)
    twice = Counter({shapes: 2 * count for shapes, count in one.items()})
    print(f"gpu_network: {sum(one.values())} products of fixed order a block, of one and of two")
    if twice != two or len(one) < 3:
        faults.append(f"products differ with the blocks of rows: {twice - two} and {two - twice}")
    whole, *shares = (set(expert_products(count)) for count in (16, 8, 9))
    print(f"gpu_network: {len(whole)} shapes of products of experts, however many a device holds")
    if len(whole) < 2 or any(share != whole for share in shares):
        faults.append(f"products differ with the experts of a device: {whole} and {shares}")
    print("\n".join(f"FAULT gpu_network: {line}" for line in faults), end="\n" if faults else "")
    print(f"gpu_network: {time.monotonic() - started:.0f} s")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
