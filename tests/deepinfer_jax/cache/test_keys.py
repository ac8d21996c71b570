"""The hash chain: what separates keys, and what they are made of."""

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.cache.keys import ImageSpan, block_contents, block_key, root_key

pytestmark = pytest.mark.accept(5)


def contents(tokens, size=4, **kwargs):
    return list(block_contents(tokens, size, **kwargs))


def test_chain_is_truncated_sha256_of_little_endian_ids():
    content = contents([1, 2, 3, 70000])[0]
    assert content == struct.pack("<4i", 1, 2, 3, 70000)
    parent = bytes(range(16))
    assert block_key(parent, content) == hashlib.sha256(parent + content).digest()[:16]


def test_array_and_list_of_tokens_are_the_same():
    tokens = list(range(11))
    expected = contents(tokens)
    assert contents(np.asarray(tokens, np.int32)) == expected
    assert contents(np.asarray(tokens, np.int64)) == expected
    assert contents(np.asarray(tokens * 2, np.int32)[::1][:11]) == expected


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_content(length, blocks):
    assert len(contents(list(range(length)))) == blocks


def test_range_of_blocks():
    tokens = list(range(16))
    assert contents(tokens, first=1, last=3) == contents(tokens)[1:3]
    assert contents(tokens, first=2, last=2) == []


def test_roots_differ_by_everything_that_changes_cached_values():
    config = di.preset("tiny-v41")
    rounded = replace(config, execution=di.ExecutionConfig(numerics="checkpoint"))
    roots = [
        root_key(config, weights="a"),
        root_key(config, weights="b"),
        root_key(rounded, weights="a"),
        root_key(config, weights="a", salt="tenant"),
        root_key(config, weights="a", options=("tenant",)),
        root_key(config, weights="a", options=("replay=mask",)),
        root_key(config, weights="", salt="a"),
    ]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {16}
    assert root_key(replace(config), weights="a") == roots[0]
    both = root_key(config, weights="a", options=("x=1", "y=2"))
    assert root_key(config, weights="a", options=("y=2", "x=1")) == both


def test_images_enter_the_blocks_they_overlap():
    tokens = [9] * 16
    plain = contents(tokens)
    cat = contents(tokens, images=(ImageSpan(start=5, length=4, digest=b"cat"),))
    assert [a == b for a, b in zip(cat, plain, strict=True)] == [True, False, False, True]
    dog = contents(tokens, images=(ImageSpan(start=5, length=4, digest=b"dog"),))
    moved = contents(tokens, images=(ImageSpan(start=6, length=4, digest=b"cat"),))
    longer = contents(tokens, images=(ImageSpan(start=5, length=5, digest=b"cat"),))
    assert len({cat[1], dog[1], moved[1], longer[1], plain[1]}) == 5


def test_two_images_in_a_block_are_ordered_and_separated():
    def of(*images):
        return contents([9] * 4, images=images)[0]

    first, second = (
        ImageSpan(start=0, length=2, digest=b"ab"),
        ImageSpan(start=2, length=2, digest=b"c"),
    )
    other = ImageSpan(start=0, length=2, digest=b"a"), ImageSpan(start=2, length=2, digest=b"bc")
    assert of(first, second) != of(*other)
