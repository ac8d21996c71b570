"""Rows of a step by context rank: every row once, equal work, groups whole, halos next door."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.context import (
    block_cuts,
    halo_sources,
    imbalance,
    needs_neighbours_only,
    rank_work,
    split_context,
)
from sharding.errors import ShardingError

RANKS = (1, 2, 4, 8)
SEQUENCES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), max_size=8)


def owner_rank(split, row):
    return int(split.back[row]) // split.rows


def brute_force_work(split, lengths, prefixes):
    work = np.zeros(split.ranks)
    row = 0
    for length, prefix in zip(lengths, prefixes, strict=True):
        for i in range(length):
            work[owner_rank(split, row)] += prefix + i + 1
            row += 1
    return work


@pytest.mark.parametrize("ranks", RANKS)
def test_balance_from_1k_to_64k(ranks):
    lengths = [*range(1000, 4200, 7), *range(1017, 1040), 8193, 16384, 32769, 65535, 65536]
    worst = max(imbalance(split_context([n], [0], ranks)) for n in lengths)
    assert worst <= 1.05
    assert imbalance(split_context([2**16], [0], ranks)) < 1.001


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("prefix", [1, 7, 128, 1001])
def test_balance_after_a_prefix(ranks, prefix):
    assert max(imbalance(split_context([n], [prefix], ranks)) for n in (1000, 1025, 8193)) <= 1.05


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.sampled_from(RANKS), st.sampled_from([1, 2, 8]), st.sampled_from([None, 2]))
def test_every_row_is_computed_once(sequences, ranks, align, whole_below):
    lengths = [length for length, _ in sequences]
    prefixes = [prefix for _, prefix in sequences]
    split = split_context(lengths, prefixes, ranks, align=align, whole_below=whole_below)
    taken = split.take[split.take >= 0]
    assert sorted(taken) == list(range(sum(lengths)))
    flat = split.take.reshape(-1)
    np.testing.assert_array_equal(flat[split.back], np.arange(sum(lengths)))  # take of back
    np.testing.assert_allclose(rank_work(split), brute_force_work(split, lengths, prefixes))
    for row in split.take:  # rows of a rank ascend inside each sequence
        assert (np.diff(row[row >= 0]) > 0).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(64, 3000), st.integers(0, 200), st.sampled_from(RANKS[1:]))
def test_a_group_of_the_compressor_never_straddles_two_ranks(length, prefix, ranks):
    split = split_context([length], [prefix], ranks, align=2, whole_below=1)
    for row in range(length - 1):
        if (prefix + row) % 2 == 0:
            assert split.back[row] + 1 == split.back[row + 1]


def test_blocks_mirror_and_the_first_takes_the_odd_row():
    assert block_cuts(16, 0, 2, 2) == [0, 4, 8, 12, 16]
    assert block_cuts(16, 1, 2, 2) == [0, 5, 9, 13, 16]  # positions 1..5, then even borders
    split = split_context([16], [0], 2, whole_below=1)
    assert split.take.tolist() == [
        [0, 1, 2, 3, 12, 13, 14, 15],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]


def test_short_sequences_stay_whole_and_share_the_ranks():
    split = split_context([5, 40, 1, 12], [0, 3, 100, 0], 4)
    for first, stop in ((0, 5), (5, 45), (45, 46), (46, 58)):
        assert len({owner_rank(split, row) for row in range(first, stop)}) == 1
    assert len({owner_rank(split, row) for row in (0, 5, 45, 46)}) == 4


def test_a_step_without_rows():
    split = split_context([0, 0], [4, 0], 4)
    assert split.take.shape == (4, 0)
    assert imbalance(split) == 1.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 200)), min_size=1, max_size=4),
    st.sampled_from(RANKS),
)
def test_halos_name_the_rows_just_before_a_block(sequences, ranks):
    lengths, prefixes = [list(part) for part in zip(*sequences, strict=True)]
    split, window = split_context(lengths, prefixes, ranks), 128
    flat = split.take.reshape(-1)
    for block, sources in zip(split.blocks, halo_sources(split, window), strict=True):
        assert sources.shape == (window - 1,)
        begin = sum(lengths[: block.sequence])
        expected = np.arange(block.first - window + 1, block.first)
        known = expected >= begin
        np.testing.assert_array_equal(sources >= 0, known)
        np.testing.assert_array_equal(flat[sources[known]], expected[known])


@pytest.mark.parametrize("ranks", RANKS)
def test_long_blocks_need_their_neighbours_only(ranks):
    assert needs_neighbours_only(split_context([127 * 2 * ranks], [5], ranks, align=1), 128)
    short = split_context([100 * 2 * ranks], [5], ranks, align=1)
    assert needs_neighbours_only(short, 128) == (ranks <= 2)


def test_lengths_without_prefixes_are_refused():
    with pytest.raises(ShardingError, match="a length and a prefix"):
        split_context([1, 2], [0], 2)
