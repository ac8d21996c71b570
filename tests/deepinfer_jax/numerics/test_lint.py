"""Every rule of the program lint: one program that breaks it, and its lawful neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

from deepinfer_jax.numerics.lint import REASONS, lint_hlo, lint_jaxpr, lint_program

ROWS = 88  # 8 x 11: no other axis below is a multiple of it
X = jax.ShapeDtypeStruct((ROWS, 64), jnp.float32)
W = jax.ShapeDtypeStruct((64, 96), jnp.float32)
IDS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def traced(function, *args, rows=ROWS):
    return [f.rule for f in lint_jaxpr(jax.make_jaxpr(function)(*args), rows=rows)]


def compiled(function, *args, rows=ROWS):
    text = jax.jit(function).lower(*args).compile().as_text()
    return [f.rule for f in lint_hlo(text, rows=rows)]


def tiles(body, trips=lambda count: count):
    """Returns a function of (x, w, count) that runs `body` on 8-row tiles in a loop."""

    def run(x, w, count):
        def step(i, out):
            tile = lax.dynamic_slice_in_dim(x, i * 8, 8)
            return lax.dynamic_update_slice_in_dim(out, body(tile, w), i * 8, 0)

        return lax.fori_loop(0, trips(count), step, jnp.zeros((ROWS, 96)))

    return run


def sum_over_devices(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec()
    return jax.shard_map(lambda v: lax.psum(v, "d"), mesh=mesh, in_specs=spec, out_specs=spec)(x)


def scatter_over_devices(x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    reduce = jax.shard_map(
        lambda v: lax.psum_scatter(v, "d"),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec("d"),
        check_vma=False,
    )
    return reduce(x[None])


def pool(x):
    def widest(v):
        return lax.reduce_window(v, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME")

    return jax.vjp(widest, x)[1](x)


def in_kernel(x, w):
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        kernel,
        grid=(ROWS // 8,),
        in_specs=[
            pl.BlockSpec((8, 64), lambda i: (i, 0)),
            pl.BlockSpec((64, 96), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((8, 96), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((ROWS, 96), jnp.float32),
        interpret=True,
    )(x, w)


def scan_over_layers(x):
    return lax.scan(lambda v, w: (v @ w, None), x, jnp.ones((3, 64, 64)))[0]


JAXPR_CONTROLS = {
    "psum": ("float-collective", sum_over_devices, X),
    "psum_scatter": ("float-collective", scatter_over_devices, X),
    "scatter-add": ("scatter-add", lambda x, i: jnp.zeros((9, 64)).at[i].add(x), X, IDS),
    "scatter-mul": ("scatter-add", lambda x, i: jnp.ones((9, 64)).at[i].multiply(x), X, IDS),
    "segment_sum": ("scatter-add", lambda x, i: jax.ops.segment_sum(x, i, 9), X, IDS),
    "max-pool gradient": ("select-and-scatter", pool, X),
    "cumsum": ("cumulative-sum", lambda x: jnp.cumsum(x, axis=1), X),
    "cumprod": ("cumulative-sum", lambda x: jnp.cumprod(x, axis=1), X),
    "cumsum in a tile": (
        "cumulative-sum",
        tiles(lambda t, w: jnp.cumsum(t @ w, axis=1)),
        X,
        W,
        COUNT,
    ),
    "approx_max_k": ("approximate-top-k", lambda x: lax.approx_max_k(x, 4), X),
    "dot": ("contraction", lambda x, w: x @ w, X, W),
    "dot under jit and cond": (
        "contraction",
        lambda x, w: lax.cond(x[0, 0] > 0, jax.jit(lambda a: a @ w), lambda a: a @ w + 1, x),
        X,
        W,
    ),
    "dot in a loop of one trip": (
        "contraction",
        tiles(lambda t, w: t @ w, lambda _: 1),
        X,
        W,
        COUNT,
    ),
    "dot of all rows in a loop over layers": ("contraction", scan_over_layers, X),
    "ragged_dot": (
        "contraction",
        lambda x, w: lax.ragged_dot(x, w[None], jnp.asarray([ROWS], jnp.int32)),
        X,
        W,
    ),
    "sum of rows": ("row-sum", lambda x: x.sum(axis=0), X),
    "sum within rows": ("row-sum", lambda x: x.sum(axis=1), X),
    "sum of merged rows": ("row-sum", lambda x: x.reshape(-1, 8).sum(axis=1), X),
    "mean in a loop over layers": (
        "row-sum",
        lambda x: lax.scan(lambda v, _: (v - v.mean(axis=1, keepdims=True), None), x, None, 3)[0],
        X,
    ),
    "jax.random": ("random", lambda x: x + jax.random.uniform(jax.random.key(0), x.shape), X),
    "old-style key": ("random", lambda x: x + jax.random.normal(jnp.zeros(2, jnp.uint32)), X),
    "split": ("random", lambda x: (x, jax.random.split(jax.random.key(0))), X),
    "rng_bit_generator": (
        "random",
        lambda x: lax.rng_bit_generator(x[0, :4].astype(jnp.uint32), (4,)),
        X,
    ),
    "rng_uniform": ("random", lambda x: lax.rng_uniform(x[0, 0], 1.0, (4,)), X),
    "unstable sort": ("unstable-sort", lambda x: lax.sort(x, is_stable=False), X),
    "unstable argsort": (
        "unstable-sort",
        lambda x: lax.sort((x, jnp.arange(x.size).reshape(x.shape)), is_stable=False, num_keys=1),
        X,
    ),
}


@pytest.mark.parametrize("case", JAXPR_CONTROLS)
def test_a_traced_violation_is_found(case):
    rule, function, *args = JAXPR_CONTROLS[case]
    assert set(traced(function, *args)) == {rule}


LAWFUL = {
    "dot in a tile loop": (tiles(lambda t, w: t @ w), X, W, COUNT),
    "norm in a tile loop": (tiles(lambda t, w: (t / jnp.sum(t * t)) @ w), X, W, COUNT),
    "dot in lax.map": (lambda x, w: lax.map(lambda t: t @ w, x.reshape(11, 8, 64)), X, W),
    "dot in a kernel": (in_kernel, X, W),
    "sum of weights": (lambda x, w: x * w.sum(), X, W),
    "sum of integers": (lambda i: i.sum() + jnp.cumsum(i), IDS),
    "maximum of rows": (lambda x: x.max(axis=0), X),
    "scatter": (lambda x, i: jnp.zeros((9, 64)).at[i].set(x), X, IDS),
    "scatter-add to unique places": (
        lambda x, i: jnp.zeros((ROWS, 64)).at[i].add(x, unique_indices=True),
        X,
        IDS,
    ),
    "scatter-add of integers": (lambda i: jnp.zeros(9, jnp.int32).at[i].add(1), IDS),
    "top_k": (lambda x: lax.top_k(x, 4), X),
    "stable argsort": (lambda x: jnp.argsort(x, axis=1), X),
    "unstable sort with an index as key": (
        lambda x: lax.sort(
            (x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), is_stable=False, num_keys=2
        ),
        X,
    ),
    "unstable sort of integers": (lambda i: lax.sort(i, is_stable=False), IDS),
    "sum over devices of integers": (sum_over_devices, IDS),
}


@pytest.mark.parametrize("case", LAWFUL)
def test_a_lawful_program_passes_both(case):
    function, *args = LAWFUL[case]
    assert traced(function, *args) == []
    assert compiled(function, *args) == []


COMPILED_CONTROLS = {
    name: JAXPR_CONTROLS[name]
    for name in (
        "scatter-add",
        "dot",
        "dot in a loop of one trip",
        "dot of all rows in a loop over layers",
        "sum of rows",
        "sum within rows",
        "sum of merged rows",
        "mean in a loop over layers",
        "unstable sort",
        "unstable argsort",
    )
}


@pytest.mark.parametrize("case", COMPILED_CONTROLS)
def test_a_compiled_violation_is_found(case):
    rule, function, *args = COMPILED_CONTROLS[case]
    assert set(compiled(function, *args)) == {rule}


HLO = """HloModule jit_f, is_scheduled=true

%region_0.1 (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}}

%body (s: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {{
  %s = (s32[], /*index=1*/f32[8,64]{{1,0:T(8,128)}}) parameter(0)
  %x.2 = f32[8,64]{{1,0}} get-tuple-element(%s), index=1
  %w.2 = f32[64,64]{{1,0}} constant({{...}})
  {inside}
  ROOT %tuple.9 = (s32[], f32[8,64]{{1,0}}) tuple(%x.2, %x.2)
}}

%condition (s.1: (s32[], f32[8,64])) -> pred[] {{
  %s.1 = (s32[], f32[8,64]{{1,0}}) parameter(0)
  ROOT %lt = pred[] constant(true)
}}

ENTRY %main.1 (x.1: f32[88,64], i: s32[88,1]) -> f32[88,64] {{
  %x.1 = f32[88,64]{{1,0}} parameter(0), metadata={{op_name="x"}}
  %i = s32[88,1]{{1,0}} parameter(1)
  %zero = f32[] constant(0)
  %t = (s32[], f32[8,64]{{1,0}}) tuple(%zero, %zero)
  {outside}
  %loop = (s32[], f32[8,64]{{1,0}}) while(%t), condition=%condition, body=%body{trips}
  ROOT %copy = f32[88,64]{{1,0}} copy(%x.1)
}}
"""

GEMM = '%r = (f32[8,64]{1,0}, s8[9]{0}) custom-call(%x.2, %w.2), custom_call_target="__cublas$gemm"'
HLO_CONTROLS = {
    "all-reduce": (
        "float-collective",
        "%r = f32[88,64]{1,0} all-reduce(%x.1), replica_groups={}, to_apply=%region_0.1",
    ),
    "asynchronous all-reduce": (
        "float-collective",
        "%r = bf16[88,64]{1,0} all-reduce-start(%x.1), to_apply=%region_0.1",
    ),
    "reduce-scatter": (
        "float-collective",
        "%r = f32[11,64]{1,0} reduce-scatter(%x.1), dimensions={0}, to_apply=%region_0.1",
    ),
    "scatter": (
        "scatter-add",
        "%r = f32[88,64]{1,0} scatter(%x.1, %i, %x.1), indices_are_sorted=true, "
        "to_apply=%region_0.1",
    ),
    "select-and-scatter": (
        "select-and-scatter",
        "%r = f32[88,64]{1,0} select-and-scatter(%x.1, %x.1, %zero), scatter=%region_0.1",
    ),
    "ApproxTopK": (
        "approximate-top-k",
        '%r = (f32[88,4]{1,0}, s32[88,4]{1,0}) custom-call(%x.1), custom_call_target="ApproxTopK"',
    ),
    "dot": ("contraction", "%r = f32[88,88]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}"),
    "convolution": ("contraction", "%r = f32[88,88]{1,0} convolution(%x.1, %x.1), window={}"),
    "reduce": ("row-sum", "%r = f32[64]{0} reduce(%x.1, %zero), to_apply=%region_0.1"),
    "reduce-window": (
        "row-sum",
        "%r = f32[88,64]{1,0} reduce-window(%x.1, %zero), window={size=1x64}, to_apply=%region_0.1",
    ),
    "rng": ("random", "%r = f32[88]{0} rng(%zero, %zero), distribution=rng_uniform"),
    "rng-bit-generator": (
        "random",
        "%r = (u64[2]{0}, u32[88]{0}) rng-bit-generator(%i), algorithm=rng_default",
    ),
    "cublas": ("library-call", GEMM.replace("x.2", "x.1").replace("w.2", "x.1")),
    "cublaslt": (
        "library-call",
        '%r = f32[88,64]{1,0} custom-call(%x.1), custom_call_target="__cublas$lt$matmul$f8"',
    ),
    "cudnn": (
        "library-call",
        '%r = f32[88,64]{1,0} custom-call(%x.1), custom_call_target="__cudnn$fmhaSoftmax"',
    ),
}


def hlo(outside="", inside="", trips=""):
    return HLO.format(outside=outside, inside=inside, trips=trips)


def rules(text, rows=ROWS):
    return [f.rule for f in lint_hlo(text, rows=rows)]


@pytest.mark.parametrize("case", HLO_CONTROLS)
def test_a_violation_in_hlo_text_is_found(case):
    rule, line = HLO_CONTROLS[case]
    assert rules(hlo(outside=line)) == [rule]


def test_hlo_text_without_violations_passes():
    lawful = (
        "%r = f32[88,64]{1,0} scatter(%x.1, %i, %x.1), unique_indices=true, to_apply=%region_0.1\n"
        "  %q = s32[88,64]{1,0} all-reduce(%i), to_apply=%region_0.1\n"
        "  %p = (u64[2]{0}, u32[88]{0}) rng-bit-generator(%i), algorithm=rng_three_fry"
    )
    assert rules(hlo(outside=lawful)) == []


def test_a_gemm_library_is_lawful_in_a_loop_body_only():
    assert rules(hlo(inside=GEMM)) == []
    assert rules(hlo(inside=GEMM.replace("__cublas$gemm", "__cudnn$conv"))) == ["library-call"]
    one_trip = ', backend_config={"known_trip_count":{"n":"1"}}'
    assert rules(hlo(inside=GEMM, trips=one_trip)) == ["library-call"]


def test_a_body_that_also_runs_outside_its_loop_counts_as_outside():
    line = "%r = f32[8,64]{1,0} dot(%x.2, %w.2), lhs_contracting_dims={1}"
    assert rules(hlo(inside=line)) == []
    call = "%again = (s32[], f32[8,64]{1,0}) call(%t), to_apply=%body"
    assert rules(hlo(inside=line, outside=call)) == ["contraction"]


def test_rows_in_a_loop_body_are_found():
    assert rules(hlo(inside="%r = f32[88,64]{1,0} dot(%x.2, %w.2)")) == ["contraction"]
    inside = "%r = f32[8]{0} reduce(%x.2, %x.2), to_apply=%region_0.1"
    assert rules(hlo(inside=inside)) == []
    assert rules(hlo(inside=inside), rows=64) == ["row-sum"]


def test_without_a_row_count_every_sum_outside_a_loop_is_reported():
    assert traced(lambda w: w.sum(), W, rows=None) == ["row-sum"]
    assert compiled(lambda w: w.sum(axis=1), W, rows=None) == ["row-sum"]
    assert traced(tiles(lambda t, w: (t / jnp.sum(t)) @ w), X, W, COUNT, rows=None) == []


def test_a_finding_names_rule_place_operation_and_reason():
    def network(x, w):
        return lax.cond(x[0, 0] > 0, jax.jit(lambda a: a @ w), lambda a: a[:, :1] * w[:1], x)

    (finding,) = lint_jaxpr(jax.make_jaxpr(network)(X, W), rows=ROWS)
    assert finding.rule == "contraction"
    assert "cond/" in finding.where
    assert "test_lint.py:" in finding.where
    assert "dot_general(float32[88,64], float32[64,96]) -> float32[88,96]" in finding.text
    assert REASONS["contraction"] in str(finding)


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        lint_hlo("HloModule empty")


def test_a_program_is_linted_traced_and_compiled():
    def head(x, w, scale):
        return (x @ w) * scale

    x, w = np.ones((ROWS, 64), np.float32), np.ones((64, 96), np.float32)
    found = lint_program(head, x, w, 2.0, rows=ROWS, static_argnums=2)
    assert [f.rule for f in found] == ["contraction", "contraction"]
    assert found[1].where.endswith("outside loops")
    jitted = jax.jit(head, static_argnames="scale")
    assert [f.rule for f in lint_program(jitted, X, W, 2.0, rows=ROWS)] == ["contraction"] * 2
