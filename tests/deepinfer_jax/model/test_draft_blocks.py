"""Drafts of many sequences: bits of one alone, and what the choice of tokens sees and decides."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.loading import load
from deepinfer_jax.model.draft import blocks_per_tile, draft_blocks
from tests.golden.network import TINY

LENGTHS = (3, 11, 30, 1, 17)  # processed tokens; the window is 8
SIZE = 3  # two blocks a tile, two rows of it unused
BITS = ("token_ids", "logits", "confidence", "confidence_logit")


@cache
def model(numerics, head="markov"):
    """Parameters, config, a cache of five sequences in slots 2..6, and their anchors."""
    loaded = load(TINY, numerics=numerics)
    settings = replace(loaded.config.draft, dspark_block_size=SIZE, dspark_head=head)
    config, params = replace(loaded.config, draft=settings), loaded.params
    if head == "rnn":
        rank, width = settings.dspark_markov_rank, config.hidden_size
        shape = (3 * rank, 2 * rank + width)
        joint = jnp.asarray(np.random.default_rng(1).standard_normal(shape) / 8, jnp.bfloat16)
        params = params.replace(draft=params.draft.replace(rnn_joint=joint))
    runtime = di.RuntimeConfig(max_seqs=6, max_tokens_per_step=64, max_len=64)
    draw = np.random.default_rng(0)
    rows = [
        (int(draw.integers(3, 400)), position, number + 2)
        for number, length in enumerate(LENGTHS)
        for position in range(length)
    ]
    plan = di.make_plan(config, *(list(column) for column in zip(*rows, strict=True)))
    state, _ = di.prefill(params, config, di.init_state(config, runtime), plan)
    # Slots of nobody: what stands there must not matter.
    poison = jnp.nan if numerics == "float32" else 0xFF
    state = state.replace(window=state.window.at[np.array([0, 1])].set(poison))
    anchors = draw.integers(3, 400, len(LENGTHS)), np.array(LENGTHS) - 1, np.arange(5) + 2
    return params, config, state, [np.asarray(a, np.int32) for a in anchors]


@partial(jax.jit, static_argnames="config")
def run(params, config, state, anchors, count):
    return draft_blocks(params, config, state, *anchors, count, with_logits=True)


@cache
def alone(numerics, head="markov"):
    """The drafts of each sequence by itself."""
    params, config, state, anchors = model(numerics, head)
    each = [run(params, config, state, [a[i : i + 1] for a in anchors], 1) for i in range(5)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)


@pytest.mark.accept(6)
@pytest.mark.parametrize(
    ("numerics", "head"),
    [("checkpoint", "markov"), pytest.param("checkpoint", "rnn", marks=pytest.mark.slow)],
)
def test_bits_are_those_of_a_sequence_alone(numerics, head):
    params, config, state, anchors = model(numerics, head)
    wanted = alone(numerics, head)
    assert blocks_per_tile(config) == 2
    assert len(set(wanted.token_ids.reshape(-1).tolist())) > 5
    # 13 sequences in two tiles of the head, then fewer: every place of a tile, other mates.
    long = np.array([0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 2, 4, 0])
    for order, count in ((long, 13), (long[::-1], 12), (np.roll(long, 3), 9), (long, 1)):
        found = run(params, config, state, [a[order] for a in anchors], count)
        for name in BITS:
            got, want = np.asarray(getattr(found, name)), getattr(wanted, name)[order]
            np.testing.assert_array_equal(
                got[:count].view(np.uint32), want[:count].view(np.uint32), err_msg=name
            )


def test_the_choice_sees_its_sequence_and_place_and_decides_what_follows():
    params, config, state, anchors = model("float32")
    wanted = alone("float32")
    forced = np.random.default_rng(5).integers(3, 400, (5, SIZE)).astype(np.int32)

    @partial(jax.jit, static_argnames="config")
    def run_forced(params, config, state, anchors, forced, count):
        def choose(sequence, place, scores):
            return forced[sequence, place], jax.nn.log_softmax(scores)

        return draft_blocks(params, config, state, *anchors, count, choose, with_logits=True)

    found = run_forced(params, config, state, anchors, forced, 5)
    np.testing.assert_array_equal(found.token_ids, forced)
    # The base logits do not depend on the choice, the bias is that of the token before.
    draft = params.draft

    def bias(previous):
        return draft.markov_embed[previous] @ draft.markov_head.T

    before, free = (
        np.concatenate([anchors[0][:, None], ids[:, :-1]], axis=1)
        for ids in (forced, wanted.token_ids)
    )
    np.testing.assert_allclose(
        found.logits - bias(before), wanted.logits - bias(free), rtol=1e-4, atol=1e-4
    )
    assert np.abs(bias(before) - bias(free))[:, 1:].max() > 0.01
    log_q = jax.nn.log_softmax(found.logits)
    np.testing.assert_allclose(found.log_q, log_q, rtol=1e-5, atol=1e-5)


def test_without_a_fixed_order_all_rows_run_at_once():
    params, config, state, anchors = model("float32")
    stock = replace(config, execution=replace(config.execution, determinism="off"))

    @partial(jax.jit, static_argnames="config")
    def ids_only(params, config, state, anchors, count):
        return draft_blocks(params, config, state, *anchors, count)

    found, wanted = ids_only(params, stock, state, anchors, 5), alone("float32")
    assert found.logits is None
    assert found.log_q is None
    np.testing.assert_array_equal(found.token_ids, wanted.token_ids)
    np.testing.assert_allclose(found.confidence, wanted.confidence, rtol=1e-4)


def test_drafts_need_draft_stages():
    params, config, state, anchors = model("float32")
    with pytest.raises(di.InputError, match="draft stages"):
        run(params.replace(draft=None), config, state, anchors, 5)
    with pytest.raises(di.InputError, match="draft stages"):
        run(params, replace(config, draft=None), state, anchors, 5)
