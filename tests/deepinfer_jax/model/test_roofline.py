"""The formulas of a step against the figures of parallelism.md 7."""

import pytest

from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.config.presets import preset
from deepinfer_jax.model import roofline
from deepinfer_jax.model.placement import padded_abstract, partitions_like
from sharding.footprint import describe
from sharding.mesh import MeshSizes

CONFIG = preset("deepseek-v4.1-flash")


def held(sizes):
    params = padded_abstract(abstract_params(CONFIG), sizes)
    return describe(params, partitions_like(params, CONFIG), sizes)


def test_sizes_that_follow_from_the_config():
    assert roofline.active_elements(CONFIG) == pytest.approx(16.13e9, rel=1e-3)
    assert roofline.context_bytes(CONFIG) == 23_680
    assert roofline.cache_bytes_read(CONFIG, 32768) == (
        40 * 128 * 528 + 38 * 512 * 288 + 68 * (2.5 * 32768 + 4 * 16384)
    )


@pytest.mark.parametrize(
    ("ranks", "reached"), [(8, 4.41), (16, 5.14), (32, 5.57), (64, 5.78), (128, 5.88), (512, 5.97)]
)
def test_distinct_ranks_of_a_token(ranks, reached):
    assert roofline.distinct_ranks(CONFIG, ranks) == pytest.approx(reached, abs=0.025)


@pytest.mark.parametrize(
    ("kind", "ranks", "few", "many"),
    [
        ("H200", 8, 11.2, 14.0),
        ("H200", 16, 10.1, 16.7),
        ("H200", 64, 7.4, 19.2),
        ("H200", 512, 6.6, 21.1),
        ("GB200", 8, 6.9, 8.5),
        ("GB200", 64, 2.8, 3.9),
        ("GB200", 128, 4.6, 8.4),
    ],
)
def test_decode_milliseconds(kind, ranks, few, many):
    # Ours reads 1.3 GB more: wo_a lies as BF16, the table assumes FP8.
    sizes = MeshSizes(dp=ranks)
    params, hardware = held(sizes), roofline.HARDWARE[kind]
    for tokens, expected in ((16, few), (128, many)):
        one = roofline.decode_cost(
            CONFIG, sizes, params, hardware, tokens=tokens, context=32768, pre_reduced=True
        )
        extra = 1.34e9 / (roofline.MEMORY_SHARE * hardware.bandwidth)
        low, high = 1e-3 * expected * 0.97, 1e-3 * expected * 1.03 + extra
        assert low <= one.seconds <= high


def test_answers_that_are_not_added_on_the_way_cost_more():
    given = (CONFIG, 8, 128)
    ours, reduced = (roofline.exchange_bytes(*given, pre_reduced=flag) for flag in (False, True))
    assert ours == pytest.approx(128 * (4.41 * 5316 + 6 * 10240), rel=1e-3)
    assert reduced == pytest.approx(128 * 4.41 * (5316 + 10240), rel=1e-3)


def test_replicas_of_the_experts_scale_without_loss():
    one, many = MeshSizes(dp=8), MeshSizes(er=16, dp=8)
    hardware = roofline.HARDWARE["H200"]
    costs = [
        roofline.decode_cost(CONFIG, sizes, held(sizes), hardware, tokens=64, context=4096)
        for sizes in (one, many)
    ]
    assert costs[0].seconds == costs[1].seconds


def test_context_ranks_share_a_prompt():
    hardware = roofline.HARDWARE["H200"]
    alone, shared = (
        roofline.prefill_cost(CONFIG, sizes, held(sizes), hardware, tokens=2**17)
        for sizes in (MeshSizes(dp=8), MeshSizes(cp=8))
    )
    assert shared.tokens * 8 == alone.tokens
    assert 0.8 < alone.seconds / shared.seconds / 8 < 1.0
