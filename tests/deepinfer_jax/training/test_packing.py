"""Packed rows: every item once, restarts, weights."""

import numpy as np
import pytest

from deepinfer_jax.training.corpus import Item, items, pack, render, render_batch
from deepinfer_jax.training.corpus.encode import COMPLETION, PROMPT
from deepinfer_jax.training.tokenizer import load

LENGTH, PAD = 256, 2


@pytest.fixture(scope="module")
def rendered():
    return render_batch(list(items("train", seed=2, count=400, max_tokens=LENGTH)), load())


@pytest.mark.parametrize("align", [1, 4])
def test_every_item_that_fits_is_in_one_row_unchanged(rendered, align):
    packed = pack(rendered, LENGTH, 0, pad_id=PAD, align=align)
    found = []
    for row in range(len(packed.ids)):
        segments = packed.segments[row]
        for segment in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == segment)
            assert places[0] % align == 0
            assert np.array_equal(np.diff(places), np.ones(len(places) - 1))
            assert np.array_equal(packed.positions[row, places], np.arange(len(places)))
            found.append(tuple(packed.ids[row, places].tolist()))
    fitting = [tuple(r.ids.tolist()) for r in rendered if len(r.ids) <= LENGTH]
    assert sorted(found) == sorted(fitting)
    assert packed.dropped == len(rendered) - len(fitting) > 0


def test_empty_places_are_padding_without_weight(rendered):
    packed = pack(rendered, LENGTH, 0, pad_id=PAD)
    empty = packed.segments == 0
    assert set(packed.ids[empty]) == {PAD}
    for array in (packed.weights, packed.positions, packed.labels):
        assert not array[empty].any()
    assert packed.fill == pytest.approx(1 - empty.mean())
    assert packed.fill > 0.9


def test_weights_follow_labels_and_no_first_token_is_a_target(rendered):
    packed = pack(rendered, LENGTH, 0, pad_id=PAD, task_weights={"list": 3.0})
    first = (packed.segments > 0) & (packed.positions == 0)
    assert not packed.weights[first].any()
    assert set(packed.weights[packed.labels == COMPLETION]) == {1.0, 3.0}
    assert not packed.weights[packed.labels == PROMPT].any()


def test_seed_orders_rows_and_repeats(rendered):
    one, two = (pack(rendered, LENGTH, 7, pad_id=PAD) for _ in range(2))
    assert np.array_equal(one.ids, two.ids)
    other = pack(rendered, LENGTH, 8, pad_id=PAD)
    assert one.ids.shape != other.ids.shape or not np.array_equal(one.ids, other.ids)
    types = [a.dtype for a in (one.ids, one.weights, one.segments, one.positions, one.labels)]
    assert types == [np.int32, np.float32, np.int32, np.int32, np.int8]


def test_tokens_that_look_back_weigh_more():
    tokenizer = load()
    text = "Mara lives in Oakford. Mabel has 5 coins. Mara meets Mabel. Now Mabel has 12 coins."
    item = Item(
        task="story", key="k", prompt="", answer=text, entities=("Mara", "Mabel", "Oakford")
    )
    found = render(item, tokenizer)
    copied = [tokenizer.decode([token]) for token in found.ids[found.copies]]
    # Names after another name, whole in its sentence; the count that is said again.
    assert copied == ["ra", " Ma", "bel", " ", "1", "2"]
    packed = pack([found], 64, 0, pad_id=0, task_weights={"story": 1.0}, copy_weight=8.0)
    row = packed.weights[0, : len(found.ids)]
    np.testing.assert_array_equal(row[1:], np.where(found.copies[1:], 9.0, 1.0))
