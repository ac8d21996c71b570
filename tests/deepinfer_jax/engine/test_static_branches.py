"""The step's form for a GPU: no condition or loop bound on data, and the values of the other form.

A GPU waits for the host at every condition and at every loop whose length is data; the form for it
has neither (`ExecutionConfig.branches`). Both forms run here, at level "run"; at level "batch" the
loop over tiles remains, and bits may not depend on what else the engine does or is laid out for.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.program import run_step
from deepinfer_jax.model.attention import core as attention
from deepinfer_jax.model.registry import single_sequence
from deepinfer_jax.model.step import sequence_plan, step
from deepinfer_jax.numerics.ops import ops_for
from tests.e2e.lab import BASE, model

pytestmark = pytest.mark.accept(5)
RUNTIME = replace(BASE, check=False, max_seqs=3)
WORDS = np.random.default_rng(3).integers(3, 500, 40).tolist()


@cache
def loaded(branches, numerics, level="run"):
    found = model(numerics)
    tile = {"row_tile": 16} if level == "batch" else {}
    execution = replace(found.config.execution, determinism=level, branches=branches, **tile)
    return replace(found, config=replace(found.config, execution=execution))


def make_engine(branches, *, drafting, numerics="float32"):
    return Engine(loaded(branches, numerics), replace(RUNTIME, drafting=drafting))


def control_flow(branches, *, drafting, place=0):
    """Returns how often a step branches, loops on data, and loops a known time."""
    engine = make_engine(branches, drafting=drafting)
    device, layout = engine._device, engine.layouts[place]
    program = run_step.trace(
        device._params,
        device._leaves,
        jax.ShapeDtypeStruct((layout.size,), np.int32),
        trees=device._trees,
        config=device.config,
        layout=layout,
        alternatives=device.alternatives,
        drafting=device.drafting,
        hashes=False,
    )
    found = Counter()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            found[equation.primitive.name] += 1
            for value in jax.tree.leaves(
                equation.params, is_leaf=lambda one: hasattr(one, "eqns") or hasattr(one, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(program.jaxpr.jaxpr)
    return found


def test_the_step_for_a_gpu_has_no_condition_and_no_loop_of_unknown_length():
    found = control_flow("static", drafting=False)
    assert found["cond"] == found["while"] == 0
    assert found["dot_general"] > 100  # the walk has seen the layers


def test_steps_with_and_without_drafting_are_programs_apart():
    layouts = make_engine("static", drafting=True).layouts
    assert [layout.makes_drafts for layout in layouts] == [True, False]
    drafts, rests = (control_flow("static", drafting=True, place=place) for place in (0, 1))
    assert drafts["cond"] == drafts["while"] == rests["cond"] == rests["while"] == 0
    assert drafts["dot_general"] > rests["dot_general"]


def test_the_other_form_branches():
    found = control_flow("data", drafting=True)
    assert found["cond"] > 10
    assert found["while"] > 1


# Other sums can tip a rounding to FP8 or FP4 or a near tie, and with it rows that read its row.
@pytest.mark.parametrize(
    ("numerics", "close", "tipped"),
    [("float32", 2e-5, 0), pytest.param("checkpoint", 3e-2, 4, marks=pytest.mark.slow)],
)
def test_hidden_rows_are_those_of_the_other_form(numerics, close, tipped):
    found = {}
    for branches in ("data", "static"):
        this = loaded(branches, numerics)
        plan = sequence_plan(jnp.asarray(WORDS, jnp.int32), 8)

        @jax.jit
        def forward(params, plan, config=this.config):
            state = single_sequence(config, 128, row_tile=plan.ids.shape[0], block_tokens=16)
            return step(params, config, state, plan, drafting=True, collect=("x_out", "topk"))

        found[branches] = forward(this.params, plan)
    (state, hidden, seen), (other, expected, wanted) = found["static"], found["data"]
    count = len(WORDS)
    is_close = np.isclose(hidden[:count], expected[:count], rtol=close, atol=close).all(axis=1)
    for name in ("x_out", "topk"):
        same = np.isclose(seen[name], wanted[name], rtol=close, atol=close)
        is_close &= same[:, :count].all(axis=(0, *range(2, same.ndim)))
    assert (~is_close).sum() <= tipped
    assert jax.tree.structure(state) == jax.tree.structure(other)
    np.testing.assert_array_equal(state.engram_ids, other.engram_ids)


REQUESTS = tuple(
    di.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **options)
    for options in (
        {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 1, "seed": 7, "top_p": 0.8, "top_k": 9},
        {"temperature": 0.7, "seed": 8, "logit_bias": {5: 2.0}, "min_p": 0.01},
    )
)


@pytest.mark.slow
def test_tokens_with_drafts_are_those_of_the_other_form():
    outputs = {}
    for branches in ("data", "static"):
        engine = make_engine(branches, drafting=True)
        requests = [engine.submit(WORDS[: 9 + n], params) for n, params in enumerate(REQUESTS)]
        engine.drain()
        outputs[branches] = [request.output() for request in requests]
    for found, wanted in zip(outputs["static"], outputs["data"], strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.finish_reason == wanted.finish_reason
    (found, *_), (wanted, *_) = outputs["static"], outputs["data"]
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)
    for one, other in zip(found.top_logprobs, wanted.top_logprobs, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
    known = [place for place, one in enumerate(wanted.prompt_logprobs) if one is not None]
    np.testing.assert_allclose(
        [found.prompt_logprobs[place] for place in known],
        [wanted.prompt_logprobs[place] for place in known],
        atol=1e-4,
    )


@pytest.mark.slow
def test_bits_at_batch_are_those_of_lone_requests_in_an_engine_laid_out_otherwise():
    this = loaded("static", "checkpoint", "batch")
    outputs = []
    for options in ({"max_seqs": 3, "max_len": 96}, {"max_seqs": 5, "max_len": 160}):
        engine = Engine(this, replace(RUNTIME, drafting=options["max_seqs"] == 3, **options))
        found = []
        for n, params in enumerate(REQUESTS):
            found.append(engine.submit(WORDS[: 9 + 7 * n], params))
            if options["max_seqs"] == 5:
                engine.drain()
        engine.drain()
        outputs.append([request.output() for request in found])
    for one, other in zip(*outputs, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.prompt_logprobs, other.prompt_logprobs)
    scores = np.asarray(di.score(this.params, this.config, jnp.asarray(WORDS[:9])))
    assert outputs[0][0].token_ids[0] == scores[-1].argmax()


def test_attention_over_all_blocks_at_once_is_the_fold_over_them():
    rows, heads, dim, ranks = 5, 3, 16, 130
    draw = np.random.default_rng(1)
    q = jnp.asarray(draw.normal(size=(rows, heads, dim)) * 3, jnp.float32)
    keys = jnp.asarray(draw.normal(size=(rows, ranks, dim)), jnp.float32)
    valid = draw.random((rows, ranks)) < 0.5
    valid[0], valid[1, 64:128], valid[2, :64] = False, False, False
    sink = jnp.asarray(draw.normal(size=heads), jnp.float32)
    found = [
        attention.attend(
            ops_for(loaded(branches, "checkpoint").config.execution),
            q,
            keys,
            jnp.asarray(valid),
            sink,
        )
        for branches in ("data", "static")
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert not np.asarray(found[1][0]).any()
