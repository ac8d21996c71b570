"""The GPU forms without a GPU and without its wheels: Mosaic's and Triton's Python lowering.

It finds wrong shapes, layouts, casts and shared memory sizes (kernels.md 2.2, the weaker form). The
network tests show that a step under `kernels=` reaches the kernels: every covered op has its named
custom call, and no product over the hidden width is left to XLA.
"""

import importlib
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.config.model import ExecutionConfig
from deepinfer_jax.config.presets import preset
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.loading import EMBEDDED
from deepinfer_jax.model.cached import init_state
from deepinfer_jax.model.kernel_layout import for_kernels
from deepinfer_jax.model.step import Plan, logits, step
from deepinfer_jax.numerics.selection import attention_widths, choose_kernels
from pallas_kernels import COVERED

ROWS = 64

# jax 0.11.2 says so of every Pallas-Triton kernel; the row norm is one (kernels.md 1.7).
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")


def lower_for_h200(fn, *arguments):
    """Returns the StableHLO text of a function for an H200, with the names of operations."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(fn).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)


def kernel_names(text):
    """Returns how often each Pallas kernel stands in a lowered program."""
    found = {}
    for name in re.findall(r'"[^"]*?(\w+)/(?:mpmd_map|pallas_call)"', text):
        found[name] = found.get(name, 0) + 1
    return found


def contracted(text):
    """Returns the contracted sizes of all products left to XLA."""
    pattern = (
        r"stablehlo\.dot_general.*?contracting_dims = \[([\d, ]*)\] x.*?: \(tensor<([^>]*)>, tensor"
    )
    found = []
    for axes, shape in re.findall(pattern, text):
        sizes = shape.split("x")
        found += [int(sizes[int(axis)]) for axis in axes.split(",")]
    return found


def h200_kernels(config):
    """Returns the implementation of every covered op that an H200 runs at best for a model."""
    return choose_kernels(
        "pallas",
        numerics="checkpoint",
        scale_block=config.dense_block_size,
        device_kind="NVIDIA H200",
        widths=attention_widths(config),
    )


def lower_network(config, kernels, determinism):
    """Returns the lowered text of one step with drafts and logits."""
    execution = ExecutionConfig(numerics="checkpoint", determinism=determinism, kernels=kernels)
    config = replace(config, execution=execution)
    runtime = RuntimeConfig(max_seqs=4, max_len=512, max_tokens_per_step=ROWS)
    state = jax.eval_shape(partial(init_state, config, runtime))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    plan = Plan(ids=rows, position=rows, slot=rows, count=jax.ShapeDtypeStruct((), jnp.int32))

    def run(params, state, plan):
        state, hidden, _ = step(params, config, state, plan, drafting=config.draft is not None)
        return state, logits(params, config, hidden)

    params = jax.eval_shape(partial(for_kernels, execution=execution), abstract_params(config))
    return lower_for_h200(run, params, state, plan)


@pytest.mark.parametrize("op", sorted(COVERED))
def test_every_case_lowers_for_sm_90(op):
    cases = importlib.import_module(f"pallas_kernels.{op}.arg_specs").compile_cases("sm_90")
    assert cases
    for label, fn, shapes in cases:
        assert kernel_names(lower_for_h200(fn, *shapes)), label


@pytest.mark.parametrize(
    ("name", "determinism"), [("nano", "batch"), ("nano", "off"), ("deepseek-v4.1-flash", "off")]
)
def test_a_step_runs_the_named_kernels_and_no_product_over_the_hidden_width(name, determinism):
    config = read_config(EMBEDDED) if name == "nano" else preset(name)
    kernels = h200_kernels(config)
    text = lower_network(config, kernels, determinism)
    names = kernel_names(text)
    for op in dict(kernels):
        assert any(op in kernel for kernel in names), (op, names)
    assert config.hidden_size not in contracted(text)
    assert set(dict(kernels)) == COVERED or name == "nano"


def test_without_kernels_a_step_has_none():
    config = read_config(EMBEDDED)
    text = lower_network(config, (), "off")
    assert kernel_names(text) == {}
    assert config.hidden_size in contracted(text)
