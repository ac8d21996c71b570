"""V2 of issue 7: one wrong version of a shipped function at a time, and the case that must notice.

Every mutation breaks what determinism rests on (a row depends on its place, its neighbours, or on
what a cache held before), none breaks the model's arithmetic as such.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine import rows
from deepinfer_jax.model import slots
from deepinfer_jax.model.attention import core as attention
from deepinfer_jax.model.attention import sublayer
from deepinfer_jax.sampling import random
from deepinfer_jax.speculative import verify
from pallas_kernels import core
from pallas_kernels.core import quant, reduce, topk
from tests.e2e.lab import model
from tests.golden.mutations import everywhere

TILE = core.ROW_TILE
Patch = pytest.MonkeyPatch


def sum_in_another_order_in_odd_rows(patch: Patch) -> None:
    """A primitive: odd rows of a tile add neighbours first, not the two halves."""
    right = reduce.tree_sum

    def wrong(x, axis=-1):
        if x.ndim < 2 or x.shape[0] != TILE or axis not in (-1, x.ndim - 1):
            return right(x, axis)
        odd = (jnp.arange(TILE) % 2 == 1).reshape(-1, *[1] * (x.ndim - 2))
        other = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return jnp.where(odd, right(other), right(x))

    everywhere(patch, reduce, "tree_sum", wrong)


def experts_combined_by_arrival(patch: Patch) -> None:
    """Odd rows of a tile add their experts in reverse, the shared one first."""
    right = core.combine

    def wrong(expert_out, shared):
        other = shared
        for slot in reversed(range(expert_out.shape[1])):
            other = other + expert_out[:, slot]
        odd = jnp.arange(expert_out.shape[0])[:, None] % 2 == 1
        return jnp.where(odd, other, right(expert_out, shared))

    everywhere(patch, core, "combine", wrong)


def ties_by_row(patch: Patch) -> None:
    """Top-k of scores in BF16, ties to the higher index in odd rows of a tile."""
    right = topk.top_k

    def wrong(scores, k):
        scores = core.round_bf16(scores.astype(jnp.float32)).astype(jnp.float32)
        values, low = right(scores, k)
        high = scores.shape[-1] - 1 - right(scores[..., ::-1], k)[1]
        odd = jnp.arange(scores.shape[0])[:, None] % 2 == 1
        return values, jnp.where(odd, high, low)

    everywhere(patch, topk, "top_k", wrong)


def scale_of_the_whole_tile(patch: Patch) -> None:
    """The activation quantiser first divides by the largest value of all rows."""
    right = quant.fake_q8

    def wrong(x):
        most = jnp.maximum(jnp.abs(jnp.nan_to_num(x)).max(), 1e-6)
        return right(x / most) * most

    everywhere(patch, quant, "fake_q8", wrong)


def tail_of_the_last_row_lost(patch: Patch) -> None:
    """The compressor's state of the last row of a tile is not kept."""
    right = sublayer._write_tails

    def wrong(role, state, tile, tail):
        last = jnp.arange(tile.valid.shape[0]) == tile.valid.sum() - 1
        return right(role, state, tile.replace(valid=tile.valid & ~last), tail)

    patch.setattr(sublayer, "_write_tails", wrong)


def window_restored_one_row_late(patch: Patch) -> None:
    right = slots.put_checkpoint

    def wrong(config, state, slot, length, leaves):
        shifted = leaves | {"window": jnp.roll(leaves["window"], 1, axis=1)}
        return right(config, state, slot, length, shifted)

    everywhere(patch, slots, "put_checkpoint", wrong)


def look_back_forgotten(patch: Patch) -> None:
    """A hit opens its slot without the ids before it."""
    right = slots.open_slots

    def wrong(*arguments, ids_before, **options):
        return right(*arguments, ids_before=jnp.zeros_like(ids_before), **options)

    everywhere(patch, slots, "open_slots", wrong)


def slot_not_reset(patch: Patch) -> None:
    """A slot keeps the limits of the sequence before."""
    right = slots.open_slots

    def wrong(params, config, state, slot, **options):
        opened = right(params, config, state, slot, **options)
        return replace(opened, window_start=state.window_start)

    everywhere(patch, slots, "open_slots", wrong)


def padding_multiplied_by_zero(patch: Patch) -> None:
    """Keys that a row may not see get probability 0, and are not masked themselves."""

    def wrong(keys, valid):
        missing = -keys.shape[1] % attention.BLOCK
        return (
            jnp.pad(keys, ((0, 0), (0, missing), (0, 0))),
            jnp.pad(valid, ((0, 0), (0, missing))),
        )

    patch.setattr(attention, "pad_keys", wrong)


def noise_by_row(patch: Patch) -> None:
    """The random key advances with the row of the batch."""
    right = random.random_words

    def wrong(key, index, lane, purpose):
        return right(key, index + jnp.arange(index.shape[0]), lane, purpose)

    patch.setattr(random, "random_words", wrong)


def rejected_rows_stay(patch: Patch) -> None:
    """The cache's length is not taken back after rejected drafts."""
    right = rows.step_rows

    def wrong(layout, parts, slots, length):
        plan, emitters = right(layout, parts, slots, length)
        drafted = jnp.where(emitters.is_round, jnp.maximum(emitters.rows - 1, 0), 0)
        return plan, replace(emitters, base=emitters.base + drafted)

    everywhere(patch, rows, "step_rows", wrong)


def any_draft_accepted(patch: Patch) -> None:
    right = verify.row_verdicts

    def wrong(log_p, log_q, draft, *rest):
        found = right(log_p, log_q, draft, *rest)
        return replace(found, accept=draft >= 0)

    everywhere(patch, verify, "row_verdicts", wrong)


#: Mutation -> (arithmetic, the case that notices it). Every one compiles the network anew, so the
#: fast tests have one.
FAST = {
    sum_in_another_order_in_odd_rows: ("float32", "random chunks=1"),
}
SLOW = {
    tail_of_the_last_row_lost: ("float32", "chunks=2"),
    window_restored_one_row_late: ("float32", "prefix hit, checkpoint=1"),
    experts_combined_by_arrival: ("float32", "random chunks=1"),
    ties_by_row: ("float32", "chunks=1"),
    scale_of_the_whole_tile: ("checkpoint", "neighbours=2"),
    look_back_forgotten: ("float32", "prefix hit, checkpoint=1"),
    slot_not_reset: ("float32", "poisoned cache=1"),
    padding_multiplied_by_zero: ("float32", "poisoned cache=1"),
    noise_by_row: ("float32", "engine: together"),
    rejected_rows_stay: ("float32", "engine: wrong drafts"),
    any_draft_accepted: ("float32", "engine: wrong drafts"),
}
pytestmark = pytest.mark.accept(7)


@pytest.fixture(autouse=True)
def _no_program_survives_a_mutation():
    jax.clear_caches()
    yield
    jax.clear_caches()


def noticed(mutation, case, numerics, monkeypatch, record_property):
    mutation(monkeypatch)
    report = di.verify_invariance(model(numerics), cases=[case], locate=False)
    (row,) = report.rows
    assert row.skipped is None
    assert row.differing > 0, f"{case} does not notice {mutation.__name__}"
    assert not report.is_equal
    record_property("noticed", f"{case}: {row.differing} of {row.positions}; {row.first}")


@pytest.mark.parametrize("mutation", FAST, ids=lambda one: one.__name__)
def test_a_case_notices(mutation, monkeypatch, record_property):
    noticed(mutation, FAST[mutation][1], FAST[mutation][0], monkeypatch, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", SLOW, ids=lambda one: one.__name__)
def test_a_case_notices_slowly(mutation, monkeypatch, record_property):
    noticed(mutation, SLOW[mutation][1], SLOW[mutation][0], monkeypatch, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["float32", "checkpoint"])
def test_unmutated_all_these_cases_pass(numerics):
    cases = sorted({case for of, case in (FAST | SLOW).values() if of == numerics})
    assert di.verify_invariance(model(numerics), cases=cases, locate=False).is_equal
