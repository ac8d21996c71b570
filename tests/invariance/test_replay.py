"""SWA bounded replay and exact restores: engine.md 4.2-4.5, bit for bit, in caches full of NaN."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.cache.hit import first_decoder_row, usable_hit
from deepinfer_jax.config.presets import preset
from deepinfer_jax.config.roles import encoder_layers
from deepinfer_jax.model.attention.window import read_window
from deepinfer_jax.model.registry import empty_cache
from deepinfer_jax.model.slots import put_checkpoint, take_checkpoint
from deepinfer_jax.model.state import CacheLayout
from tests.invariance import replay_runs as runs
from tests.invariance.replay_runs import (
    BLOCK,
    IDS,
    KEEP,
    WINDOW,
    advance,
    advance_rows,
    assert_rows,
    assert_states,
    cold,
    config,
    floor_of,
    opened,
    params,
    poisoned,
    readable,
    rule,
)

#: In checkpoint arithmetic the fast tests have the engine's (tests/e2e/test_engine_rounded.py).
BOTH = pytest.mark.parametrize(
    "numerics", ["float32", pytest.param("checkpoint", marks=pytest.mark.slow)]
)
ON = pytest.mark.parametrize("mode", ["mask", "compact"])
SLOT, DECODED = 2, 3
#: Around the window, K, the first rows with a floor, whole tiles and K + whole tiles.
LENGTHS = (1, 7, 8, 9, KEEP - 1, KEEP, KEEP + 1, 17, KEEP + 7, KEEP + 8, KEEP + 9, 31, 32, 33, 47)
pytestmark = pytest.mark.accept(5)


def check_length(numerics, prompt, chunks):
    """Mask at once is the rule; mask in chunks equals it, compact equals it from the floor on."""
    stop, floor = prompt + DECODED, floor_of("mask", prompt)
    state, want = cold("mask", numerics, prompt, stop)
    want_state = readable(state, numerics, SLOT, stop, floor)
    for mode in ("mask", "compact"):
        first = 0 if mode == "mask" else floor
        for chunk in chunks:
            label = f"{mode}, prompt {prompt} in chunks of {chunk}"
            state, got = cold(mode, numerics, prompt, stop, chunk=chunk)
            assert_rows(got[first:], want[first:], label)
            assert_states(readable(state, numerics, SLOT, stop, floor), want_state, label)


@BOTH
@pytest.mark.parametrize("chunk", [3, 8, None])
def test_compact_equals_mask_in_any_chunks(numerics, chunk):
    for prompt in LENGTHS if chunk is None else (7, KEEP, KEEP + 1, KEEP + 8, 33):
        check_length(numerics, prompt, [chunk])


@BOTH
def test_compact_equals_mask_row_by_row(numerics):
    for prompt in (KEEP, KEEP + 1, 33):
        check_length(numerics, prompt, [1])


@BOTH
@ON
def test_a_prompt_up_to_k_tokens_is_full_prefill(mode, numerics):
    want = cold("off", numerics, KEEP, KEEP + DECODED)[1]
    assert_rows(cold(mode, numerics, KEEP, KEEP + DECODED)[1], want)
    longer = cold(mode, numerics, KEEP + 8, KEEP + 9)[1]
    full = cold("off", numerics, KEEP + 8, KEEP + 9)[1]
    assert (longer[-1] != full[-1]).any()  # and a longer one is not


@BOTH
def test_encoder_rings_and_pages_are_those_of_full_prefill(numerics):
    want = readable(cold("off", numerics, 47, 47)[0], numerics, SLOT, 47, 47 - KEEP)
    got = readable(cold("compact", numerics, 47, 47)[0], numerics, SLOT, 47, 47 - KEEP)
    decoder = "decoder and draft rings"
    assert got.pop(decoder).tobytes() != want.pop(decoder).tobytes()
    assert_states(got, want)


@ON
def test_visible_window_rows(mode):
    """[max(t-W+1, floor, start), t] from the last KV source on, without the floor before it."""
    whole, floor, start = config(mode, "float32"), 13, 4
    state = opened(mode, "float32", poisoned("float32"), SLOT, length=64, first=start, floor=floor)
    boundary, capacity = encoder_layers(whole), state.window.shape[2]
    assert boundary == 6
    stages = whole.draft.num_stages
    for t in (start, 9, 10, 11, 12, 13, 14, 19, 20, 21, 30):
        held = np.zeros(state.window.shape, np.float32)  # every row holds its own position
        for position in range(max(0, t - capacity + 1), t + 1):
            held[SLOT, :, position % capacity] = position
        filled = state.replace(window=jnp.asarray(held))
        for layer in range(whole.num_hidden_layers + stages):
            keys, valid = read_window(
                whole, filled, layer, jnp.asarray([SLOT]), jnp.asarray([t], jnp.int32)
            )
            seen = np.asarray(keys)[0, np.asarray(valid)[0], 0].astype(int).tolist()
            lowest = max(t - WINDOW + 1, start, floor if layer >= boundary else 0)
            assert seen == list(range(lowest, t + 1)), f"row {t}, layer {layer}"
            assert np.asarray(valid)[0, : len(seen)].all()  # valid ones first


@BOTH
@ON
def test_rows_below_the_floor_leave_nothing_that_is_read(mode, numerics):
    """Decoder and draft rings are poisoned when the floor is reached."""
    prompt = 33
    floor = floor_of(mode, prompt)
    _, want = cold(mode, numerics, prompt, prompt + DECODED)
    state = opened(mode, numerics, poisoned(numerics), SLOT, floor=floor)
    state, _ = advance(mode, numerics, state, SLOT, 0, floor)
    boundary = encoder_layers(config(mode, numerics))
    bad = 0xFF if numerics == "checkpoint" else jnp.nan
    state = state.replace(window=state.window.at[:, boundary:].set(bad))
    _, got = advance(mode, numerics, state, SLOT, floor, prompt + DECODED)
    assert_rows(got, want[floor:])


@BOTH
@ON
def test_sequences_with_other_floors_share_tiles(mode, numerics):
    """Rows of a truncated prompt, a short one and a halo alternate; each alone is the rule."""
    lengths, hit = {1: 45, 2: 14, 3: 64}, 48
    first = hit - rule(mode, "halo").recomputed_rows
    ids = {slot: np.roll(IDS, 5 * slot) for slot in lengths}
    state = poisoned(numerics)
    state, _ = advance(
        mode, numerics, opened(mode, numerics, state, 3, ids=ids[3]), 3, 0, hit, ids=ids[3]
    )
    want, begin = {}, {1: 0, 2: 0, 3: first}
    for slot, length in lengths.items():
        floor = floor_of(mode, length)
        alone = opened(mode, numerics, poisoned(numerics), slot, floor=floor, ids=ids[slot])
        want[slot] = advance(mode, numerics, alone, slot, 0, length, ids=ids[slot])[1]
        spot = {"length": hit, "first": first} if slot == 3 else {}
        state = opened(mode, numerics, state, slot, floor=floor, ids=ids[slot], **spot)
    order = [(slot, p) for p in range(64) for slot in (3, 1, 2) if begin[slot] <= p < lengths[slot]]
    found = {}
    for start in range(0, len(order), 29):
        part = order[start : start + 29]
        state, got = advance_rows(mode, numerics, state, part, ids)
        found |= dict(zip(part, got, strict=True))
    for slot, length in lengths.items():
        kept = range(max(floor_of(mode, length), hit if slot == 3 else 0), length)
        got = np.stack([found[slot, p] for p in kept])
        assert_rows(got, want[slot][kept.start :], f"slot {slot}")


def recover(mode, numerics, prompt, length, *, floor=None, chunk=None):
    """Returns (state, last row and the next): a preempted request starts again at `length`."""
    floor = floor_of(mode, prompt, length) if floor is None else floor
    state = opened(mode, numerics, poisoned(numerics), SLOT, floor=floor)
    state, found = advance(mode, numerics, state, SLOT, 0, length, chunk=chunk)
    kept = readable(state, numerics, SLOT, length, floor)
    _, following = advance(mode, numerics, state, SLOT, length, length + 1)
    return kept, np.concatenate([found[-1:], following])


@BOTH
@ON
def test_recovery_at_every_step_of_a_generation(mode, numerics):
    """Of 20 tokens, then where fewer than all decoder rows since the floor run again."""
    prompt = 33
    lengths = [*range(prompt + 1, prompt + 21), prompt + 40]
    assert floor_of(mode, prompt, lengths[-1]) > floor_of(mode, prompt) == prompt - KEEP
    state, want = cold(mode, numerics, prompt, prompt)
    floor = floor_of(mode, prompt)
    for length in range(prompt, lengths[-1] + 1):
        if length in lengths:
            kept, got = recover(mode, numerics, prompt, length)
            assert_rows(got[:1], want[-1:], f"newest row, recovered at {length}")
            assert_states(kept, readable(state, numerics, SLOT, length, floor), f"at {length}")
        previous = want[-1:]
        state, row = advance(mode, numerics, state, SLOT, length, length + 1)
        if length in lengths:
            assert_rows(got[1:], row, f"next row, recovered at {length}")
        want = np.concatenate([previous, row])


def test_a_floor_that_moves_with_the_output_changes_bits():
    """Positive control, and what the pinned floor is for (engine.md 4.4)."""
    prompt, length = 33, 39
    want = cold("mask", "float32", prompt, length + 1)[1][-2:]
    moved = recover("mask", "float32", prompt, length, floor=length - KEEP)[1]
    assert (moved[1] != want[1]).any()


def pages_of(state, slot, blocks):
    host = jax.tree.map(np.asarray, (state.main, state.index_data, state.index_scale))
    table = np.asarray(state.block_table)[slot, :blocks]
    return [leaf[:, table].tobytes() for leaf in jax.tree.leaves(host)]


def restore(mode, numerics, policy, prompt, hit, *, rows=None, stop=None):
    """Returns (state, bits from the hit on) of slot 3, which shares the blocks of slot 1.

    Slot 1 holds another prompt with the same first `hit` tokens. rows: that run again, if not
    those of the rule.
    """
    other = np.concatenate([IDS[:hit], IDS[::-1]])
    state = opened(mode, numerics, poisoned(numerics), 1, floor=0, ids=other)
    state, _ = advance(mode, numerics, state, 1, 0, hit, ids=other)
    leaves = take_checkpoint(config(mode, numerics), state, np.int32(1), np.int32(hit))
    state, _ = advance(mode, numerics, state, 1, hit, hit + 9, ids=other)
    shared = np.asarray(state.block_table).copy()
    shared[3, : hit // BLOCK] = shared[1, : hit // BLOCK]
    state = state.replace(block_table=runs.placed(numerics, shared))
    before = pages_of(state, 1, 8)
    again = rule(mode, policy).recomputed_rows if rows is None else rows
    floor, stop = floor_of(mode, prompt), stop or prompt
    if policy == "checkpoint":
        where = np.int32(3), np.int32(hit)
        state = put_checkpoint(config(mode, numerics), state, *where, leaves)
    state = opened(mode, numerics, state, 3, length=hit, first=hit - again, floor=floor)
    if again:
        state, _ = advance(mode, numerics, state, 3, hit - again, hit, chunk=29)
        assert pages_of(state, 1, 8) == before, "replayed rows wrote shared pages"
    state, found = advance(mode, numerics, state, 3, hit, stop, chunk=13)
    assert pages_of(state, 1, 8) == before, "rows after the hit wrote shared pages"
    return state, found


def check_restore(mode, numerics, policy, prompt, hit):
    found = usable_hit(rule(mode, policy), prompt, hit, [hit])
    assert found.length == hit, f"prompt {prompt} may not use a hit of {hit}: {found}"
    floor, stop = floor_of(mode, prompt), prompt + DECODED
    wanted, want = cold(mode, numerics, prompt, stop, chunk=29)
    got_state, got = restore(mode, numerics, policy, prompt, hit, stop=stop)
    first = max(hit, floor)
    assert_rows(got[first - hit :], want[first:], f"{policy} at {hit} of {prompt}")
    # Rollback ends at the prompt, and rows before the hit's own window are not restored.
    want_state = readable(wanted, numerics, SLOT, stop, floor, back=DECODED)
    assert_states(readable(got_state, numerics, 3, stop, floor, back=DECODED), want_state)


@BOTH
@pytest.mark.parametrize(
    ("mode", "prompt", "hit"),
    [
        ("off", 17, 16),
        ("off", 33, 32),
        ("off", 48, 16),
        ("mask", 16 + KEEP, 16),
        ("compact", 16 + KEEP, 16),
        ("compact", 61, 32),
    ],
)
def test_checkpoint_restore_equals_a_cold_run(mode, prompt, hit, numerics):
    check_restore(mode, numerics, "checkpoint", prompt, hit)


@BOTH
@pytest.mark.parametrize(
    ("mode", "prompt", "hit"),
    [
        ("off", 81, 80),
        ("off", 110, 96),
        ("mask", 48 + KEEP, 48),
        ("compact", 48 + KEEP, 48),
        ("compact", 90, 64),
    ],
)
def test_halo_restore_equals_a_cold_run(mode, prompt, hit, numerics):
    check_restore(mode, numerics, "halo", prompt, hit)


@pytest.mark.parametrize(("mode", "prompt", "hit"), [("off", 81, 80), ("compact", 63, 48)])
def test_a_halo_has_no_rows_to_spare(mode, prompt, hit):
    """One row is never read; with two fewer the bits change, as "bounded" accepts."""
    want = cold(mode, "float32", prompt, prompt, chunk=29)[1][-1]
    rows = rule(mode, "halo").recomputed_rows
    for fewer, is_exact in ((0, True), (1, True), (2, False), (rows - WINDOW, False)):
        got = restore(mode, "float32", "halo", prompt, hit, rows=rows - fewer)[1][-1]
        assert (got == want).all() == is_exact, f"{fewer} rows fewer"
        assert np.isfinite(got.view(np.float32)).all()


@pytest.mark.parametrize("mode", ["off", "compact"])
def test_recovery_after_a_hit_equals_the_uninterrupted_run(mode):
    """The hit of a recovery may lie beyond the prompt; the pinned floor still holds."""
    numerics, prompt, length = "float32", 33, 80
    cap = length - 1 if mode == "off" else first_decoder_row(rule(mode), prompt, length)
    hit = usable_hit(rule(mode), length, 64, [16, 32, 48, 64], prompt=prompt).length
    assert hit == (64 if mode == "off" else 32) <= cap
    source, _ = cold(mode, numerics, hit, hit)
    leaves = take_checkpoint(config(mode, numerics), source, np.int32(SLOT), np.int32(hit))
    where = np.int32(SLOT), np.int32(hit)
    bad = jnp.full_like(source.window, jnp.nan)
    state = put_checkpoint(config(mode, numerics), source.replace(window=bad), *where, leaves)
    floor = floor_of(mode, prompt, length)
    state = opened(mode, numerics, state, SLOT, length=hit, floor=floor)
    _, got = advance(mode, numerics, state, SLOT, hit, length)
    want = cold(mode, numerics, prompt, length)[1]
    assert_rows(got[-1:], want[-1:])


def test_score_runs_every_row_in_every_layer():
    """The same program, whatever `replay` is."""
    score = jax.jit(di.score, static_argnums=1)
    programs = {
        mode: score.lower(params("float32"), config(mode, "float32"), IDS[:40]).as_text()
        for mode in ("off", "compact")
    }
    assert programs["off"] == programs["compact"]


def test_v4_refuses_replay():
    v4 = replace(preset("deepseek-v4-flash"), execution=di.ExecutionConfig(replay="mask"))
    with pytest.raises(di.ConfigError, match="no encoder and decoder halves"):
        empty_cache(v4, CacheLayout(num_slots=2, num_blocks=2, max_blocks=1))


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("prompt", range(1, 65))
def test_every_length_and_chunking(prompt, numerics):
    check_length(numerics, prompt, [1, 3, 8, 13, None])


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
@pytest.mark.parametrize("policy", ["checkpoint", "halo"])
def test_every_usable_hit(policy, mode, numerics):
    tested = 0
    for prompt in [*range(17, 64, 5), 79, 80, 81, 95, 96, 97, 110, 111, 112, 113, 124]:
        for hit in range(BLOCK, prompt, BLOCK):
            if usable_hit(rule(mode, policy), prompt, hit, [hit]).length == hit:
                check_restore(mode, numerics, policy, prompt, hit)
                tested += 1
    assert tested >= 8


@pytest.mark.slow
@BOTH
@ON
@pytest.mark.parametrize("prompt", [1, KEEP, KEEP + 1, 24, 40])
def test_recovery_of_other_prompts(prompt, mode, numerics):
    _, want = cold(mode, numerics, prompt, prompt + 61)
    for length in [*range(prompt + 1, prompt + 21), *range(prompt + 21, prompt + 60, 6)]:
        for chunk in (None, 7):
            got = recover(mode, numerics, prompt, length, chunk=chunk)[1]
            assert_rows(got, want[length - 1 : length + 1], f"at {length}, chunks of {chunk}")
