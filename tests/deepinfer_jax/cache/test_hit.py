"""Hit length, its reason, and checkpoint positions: engine.md 4.5, value by value."""

from dataclasses import replace

import pytest

import deepinfer_jax as di
from deepinfer_jax.cache.hit import (
    Hit,
    HitRule,
    Miss,
    checkpoint_positions,
    encoder_layers,
    first_decoder_row,
    halo_rows,
    hit_rule,
    usable_hit,
)
from deepinfer_jax.errors import CacheError, ConfigError

pytestmark = pytest.mark.accept(5)
EVERY = range(0, 100_000, 128)
FLASH = di.preset("deepseek-v4.1-flash")


def rule(replay="off", restore="checkpoint", **changes):
    values = {"block_tokens": 128, "keep_tokens": 140, "rollback": 6, "config": FLASH} | changes
    return hit_rule(values.pop("config"), replay=replay, restore=restore, **values)


def length_of(rule, length, matched, checkpoints=EVERY):
    """Returns the hit as one value: its length, or its reason."""
    hit = usable_hit(rule, length, matched, checkpoints)
    return hit.length or hit.reason


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, Miss.PROMPT_TOO_SHORT),
        (127, Miss.PROMPT_TOO_SHORT),
        (128, Miss.PROMPT_TOO_SHORT),  # the last row must run
        (129, 128),
        (255, 128),
        (256, 128),
        (257, 256),
        (2048, 1920),
        (2049, 2048),
    ],
)
def test_a_repeated_prompt_without_replay(length, expected):
    assert length_of(rule(), length, 128 * (length // 128) or 128) == expected


@pytest.mark.parametrize("replay", ["mask", "compact"])
@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (139, Miss.PROMPT_TOO_SHORT),
        (140, Miss.PROMPT_TOO_SHORT),
        (141, Miss.PROMPT_TOO_SHORT),
        (267, Miss.PROMPT_TOO_SHORT),
        (268, 128),  # 128 + K
        (269, 128),
        (395, 128),
        (396, 256),
        (2188, 2048),
    ],
)
def test_a_repeated_prompt_with_replay(replay, length, expected):
    assert length_of(rule(replay), length, 128 * (length // 128)) == expected


def test_the_match_bounds_the_hit():
    assert length_of(rule(), 1000, 0, ()) == Miss.NO_MATCH
    assert length_of(rule(), 1000, 384) == 384
    assert length_of(rule("mask"), 1000, 384) == 384
    assert length_of(rule(), 1000, 1024) == 896


def test_the_newest_checkpoint_at_or_before_the_border_counts():
    assert length_of(rule(), 1000, 896, (128, 512)) == 512
    assert length_of(rule(), 1000, 896, (896, 128)) == 896
    assert length_of(rule(), 896, 896, (128, 896)) == 128  # 896 would leave no row to run
    assert length_of(rule(), 1000, 384, (512,)) == Miss.NO_CHECKPOINT
    assert length_of(rule(), 1000, 896, ()) == Miss.NO_CHECKPOINT


@pytest.mark.parametrize(
    ("replay", "rows"),
    [("off", 5081), ("mask", 2541), ("compact", 2541)],
)
def test_halo_hits_are_longer_than_what_they_recompute(replay, rows):
    r = rule(replay, "halo")
    assert r.recomputed_rows == rows
    first = 128 * (rows // 128 + 1)  # the first border that saves anything
    long = first + 1000
    assert length_of(r, long, first) == first
    assert length_of(r, long, first - 128) == Miss.MATCH_TOO_SHORT
    assert length_of(r, long, 0) == Miss.NO_MATCH
    shortest = first + (1 if replay == "off" else 140)
    assert length_of(r, shortest, first) == first
    assert length_of(r, shortest - 1, first) == Miss.PROMPT_TOO_SHORT


def test_a_hit_as_long_as_its_halo_saves_nothing():
    r = HitRule(
        block_tokens=4,
        replay="off",
        keep_tokens=0,
        restore="halo",
        window=4,
        window_layers=3,
        decoder_rows=0,
    )
    assert r.recomputed_rows == 10
    r = replace(r, window=3, window_layers=4)
    assert r.recomputed_rows == 9
    r = replace(r, window=3, block_tokens=9)
    assert length_of(r, 100, 9) == Miss.MATCH_TOO_SHORT
    assert length_of(r, 100, 18) == 18


def test_bounded_restore_recomputes_one_window():
    off = replace(FLASH, execution=di.ExecutionConfig(determinism="run"))
    r = rule(restore="bounded", config=off)
    assert r.recomputed_rows == 128
    assert length_of(r, 1000, 128) == Miss.MATCH_TOO_SHORT
    assert length_of(r, 1000, 256) == 256
    assert length_of(r, 256, 256) == Miss.PROMPT_TOO_SHORT


def test_every_length_and_match_obeys_the_laws():
    for replay in ("off", "mask"):
        r = HitRule(
            block_tokens=4,
            replay=replay,
            keep_tokens=6,
            restore="checkpoint",
            window=4,
            window_layers=2,
            decoder_rows=0,
        )
        for length in range(1, 60):
            cap = length - 1 if replay == "off" else max(length - 6, 0)
            hits = [usable_hit(r, length, m, (8, 12, 20)) for m in range(0, length + 1, 4)]
            for matched, hit in zip(range(0, length + 1, 4), hits, strict=True):
                assert hit.length in (0, 8, 12, 20)
                assert hit.length <= min(cap, matched)
                unused = [c for c in (8, 12, 20) if hit.length < c <= matched and c <= cap]
                assert not unused
            assert [h.length for h in hits] == sorted(h.length for h in hits)


@pytest.mark.parametrize("reason", [Miss.PROMPT_LOGPROBS, Miss.BYPASS, Miss.PREFIX_CACHE_OFF])
def test_a_bypassed_request_says_why(reason):
    assert usable_hit(rule(), 1000, 896, EVERY, bypass=reason) == Hit(0, reason)


def test_a_miss_without_reason_cannot_be_made():
    with pytest.raises(CacheError, match="has a reason"):
        Hit(0)
    with pytest.raises(CacheError, match="has a reason"):
        Hit(128, Miss.NO_MATCH)


@pytest.mark.parametrize(
    ("replay", "length", "positions"),
    [
        ("off", 128, ()),
        ("off", 129, (128,)),
        ("off", 2048, (1920, 2048)),
        ("off", 2049, (2048,)),
        ("off", 5000, (2048, 4096, 4992)),
        ("mask", 267, ()),
        ("mask", 268, (128,)),
        ("mask", 2100, (1920, 2048)),
        ("compact", 5000, (2048, 4096, 4736)),
    ],
)
def test_checkpoint_positions(replay, length, positions):
    assert checkpoint_positions(rule(replay), length) == positions


def test_positions_are_rounded_down_to_borders():
    assert checkpoint_positions(rule(block_tokens=384), 5000) == (1920, 3840, 4992)
    assert checkpoint_positions(rule(block_tokens=4096), 5000) == (4096,)


def test_a_repeat_of_a_prompt_hits_its_own_last_checkpoint():
    for replay in ("off", "mask", "compact"):
        for length in [*range(120, 700), *range(2040, 2200), 4095, 4096, 4097]:
            r = rule(replay)
            positions = checkpoint_positions(r, length)
            hit = usable_hit(r, length, 128 * (length // 128), positions)
            cap = length - 1 if replay == "off" else length - 140
            assert hit.length == 128 * (max(cap, 0) // 128)


def test_other_restores_take_no_checkpoints():
    assert checkpoint_positions(rule("off", "halo"), 5000) == ()


@pytest.mark.parametrize("replay", ["mask", "compact"])
def test_decoder_rows_begin_k_tokens_before_the_end_of_the_prompt(replay):
    r = rule(replay)
    assert r.decoder_rows == 2547
    assert [first_decoder_row(r, n, n) for n in (1, 140, 141, 5000)] == [0, 0, 1, 4860]
    assert [first_decoder_row(r, 1000, n) for n in (1001, 3407, 3408, 9000)] == [
        860,
        860,
        861,
        6453,
    ]
    generous = rule(replay, keep_tokens=3000)
    assert [first_decoder_row(generous, 5000, n) for n in (5000, 5001)] == [2000, 2001]
    assert first_decoder_row(rule("off"), 5000, 9000) == 0


def test_a_recovery_resumes_before_its_decoder_rows():
    """Checkpoints hold encoder rings only; without replay any border before the last row does."""
    for length, expected in ((1001, 768), (3500, 896), (9000, 6400)):
        assert usable_hit(rule("mask"), length, 8960, EVERY, prompt=1000).length == expected
        assert expected <= first_decoder_row(rule("mask"), 1000, length) < expected + 128
    assert usable_hit(rule("off"), 9000, 8960, EVERY, prompt=1000).length == 8960


def test_halo_of_recovery():
    assert encoder_layers(FLASH) == 20
    assert halo_rows(128, 20) == 2541
    assert halo_rows(128, 40 - encoder_layers(FLASH), rollback=6) == 2547
    assert halo_rows(128, 1) == 128
    assert halo_rows(128, 0) == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"restore": "bounded"}, "depend on what is cached"),
        ({"replay": "mask", "keep_tokens": 133}, "replay_keep_tokens must be >= 134"),
        ({"replay": "mask", "config": di.preset("deepseek-v4-flash")}, "no encoder and decoder"),
    ],
)
def test_what_cannot_be_honoured_raises(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        rule(**changes)


def test_v4_without_replay_has_a_rule():
    config = di.preset("deepseek-v4-flash")
    assert rule(config=config).window_layers == config.num_hidden_layers
