"""Logit edits in their order, and the status of rows that cannot be sampled."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.edits import (
    GRAMMAR,
    NUMERICAL,
    OK,
    Edits,
    edit_logits,
    unpack_bitmask,
)
from deepinfer_jax.sampling.rows import bias_rows, row_params
from tests.deepinfer_jax.sampling import oracle

INF, NAN = np.inf, np.nan


def edited(logits, edits=None, never_emit=None, **fields):
    logits = jnp.asarray(logits, jnp.float32)
    rows = oracle.one(logits.shape[0], **fields)
    return tuple(np.asarray(x) for x in edit_logits(logits, rows, edits, never_emit))


def test_bias_is_added_and_minus_100_masks():
    ids, values = bias_rows([{1: 2.5, 3: -100}, None, {0: -99.5, 9: 5.0}], 4)
    scores, status = edited(np.ones((3, 4)), Edits(bias_ids=ids, bias_values=values))
    assert scores.tolist() == [[1, 3.5, 1, -INF], [1, 1, 1, 1], [-98.5, 1, 1, 1]]
    assert status.tolist() == [OK] * 3


def test_bias_rows_checks_its_width():
    with pytest.raises(ValueError, match="do not fit"):
        bias_rows([{1: 1.0, 2: 1.0}], 1)
    with pytest.raises(ValueError, match="do not fit"):
        bias_rows([None, None], 1, size=1)


def test_row_params_checks_its_lengths():
    with pytest.raises(ValueError, match="one seed per request"):
        row_params([], [1])
    padded = row_params([], [], size=3)
    assert padded.temperature.tolist() == [0, 0, 0]
    assert padded.take(jnp.asarray([0, 0])).key.shape == (2, 2)


def test_penalties():
    counts = jnp.asarray([[0, 1, 3, 0, 2]])
    prompt = jnp.asarray([[True, False, False, False, True]])
    edits = Edits(output_counts=counts, in_prompt=prompt)
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    scores, _ = edited([[4.0, 4.0, -4.0, 4.0, 0.0]], edits, **fields)
    assert scores.tolist() == [[2.0, 2 - 0.5 - 0.25, -8 - 1.5 - 0.25, 4.0, -1.0 - 0.25]]
    scores, _ = edited([[4.0, 4.0, -4.0, 4.0, 0.0]], Edits(output_counts=counts), **fields)
    assert scores[0, 0] == 4.0


def test_order_bias_before_penalties_before_masks():
    ids, values = bias_rows([{0: 2.0, 1: -100.0}], 2)
    edits = Edits(
        bias_ids=ids,
        bias_values=values,
        output_counts=jnp.asarray([[1, 1, 0, 0, 0]]),
        allowed=jnp.asarray([[True, True, True, True, False]]),
        banned_ids=jnp.asarray([[3, -1, 99]]),
        grammar=jnp.asarray([[True, True, True, True, True]]),
    )
    scores, status = edited(
        [[-1.0, 5.0, 1.0, 9.0, 9.0]],
        edits,
        jnp.asarray([False, False, False, False, False]),
        repetition_penalty=2.0,
    )
    # (-1 + 2) / 2: the bias made the logit positive before the penalty divided it
    assert scores.tolist() == [[0.5, -INF, 1.0, -INF, -INF]]
    assert status.tolist() == [OK]


def test_never_emit_and_padding():
    never = jnp.asarray([False, True, False])
    scores, status = edited([[1.0, 9.0, 2.0], [-INF, 9.0, -INF]], None, never)
    assert scores.tolist() == [[1.0, -INF, 2.0], [-INF] * 3]
    assert status.tolist() == [OK, NUMERICAL]


def test_status_of_bad_rows():
    logits = np.zeros((7, 4), np.float32)
    logits[0, 2] = NAN
    logits[1, 0] = INF
    logits[2] = -INF
    logits[3, 1:] = -INF
    grammar = np.ones((7, 4), bool)
    grammar[4] = False
    grammar[2] = False
    grammar[5, 1:] = False
    scores, status = edited(logits, Edits(grammar=jnp.asarray(grammar)))
    want = [NUMERICAL, NUMERICAL, NUMERICAL, OK, GRAMMAR, OK, OK]
    assert status.tolist() == want
    assert (scores[[0, 1, 2, 4]] == -INF).all()
    assert np.isfinite(scores[6]).all()


def test_a_masked_nan_still_fails_the_row():
    allowed = jnp.asarray([[True, False]])
    _, status = edited([[1.0, NAN]], Edits(allowed=allowed))
    assert status.tolist() == [NUMERICAL]


def test_an_edit_that_overflows_is_numerical():
    counts = jnp.asarray([[1, 0]])
    _, status = edited([[3e38, 1.0]], Edits(output_counts=counts), repetition_penalty=0.5)
    assert status.tolist() == [NUMERICAL]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 101])
def test_bitmask(size):
    rng = np.random.default_rng(size)
    bits = rng.integers(0, 2, (3, size)).astype(bool)
    padded = np.pad(bits, [(0, 0), (0, -size % 32)])
    words = np.packbits(padded, axis=-1, bitorder="little").view("<i4")
    assert (np.asarray(unpack_bitmask(jnp.asarray(words), size)) == bits).all()
