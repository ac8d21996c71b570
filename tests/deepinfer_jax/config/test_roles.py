"""Layer roles against the tables of model.md 1.6, 6 and 10.2."""

from collections import Counter

import pytest

from deepinfer_jax.config.presets import preset
from deepinfer_jax.config.roles import index_layers, layer_roles, source_layers, source_ratios

# (layers, ratio, mode, KV source, index-K source, top-k source), model.md 1.6
RELEASED = [
    (range(0, 2), 0, "window", None, None, None),
    (range(2, 3), 2, "full", 2, 2, 2),
    (range(3, 8), 2, "reuse", 2, None, 2),
    (range(8, 9), 2, "full", 8, 8, 8),
    (range(9, 14), 2, "reuse", 8, None, 8),
    (range(14, 15), 2, "full", 14, 14, 14),
    (range(15, 20), 2, "reuse", 14, None, 14),
    (range(20, 21), 1, "full", 20, 20, 20),
    (range(21, 24), 1, "reuse", 20, None, 20),
    (range(24, 25), 1, "reindex", 20, 20, 24),
    (range(25, 28), 1, "reuse", 20, None, 24),
    (range(28, 29), 1, "reindex", 20, 20, 28),
    (range(29, 32), 1, "reuse", 20, None, 28),
    (range(32, 33), 1, "reindex", 20, 20, 32),
    (range(33, 36), 1, "reuse", 20, None, 32),
    (range(36, 37), 1, "reindex", 20, 20, 36),
    (range(37, 40), 1, "reuse", 20, None, 36),
]


def flagged(roles, name):
    return [role.layer for role in roles if getattr(role, name)]


def test_released_roles_equal_the_table():
    roles = layer_roles(preset("deepseek-v4.1-flash"))
    rows = [(layer, *rest) for layers, *rest in RELEASED for layer in layers]
    sources = [
        (r.layer, r.ratio, r.mode, r.kv_source, r.index_k_source, r.topk_source) for r in roles
    ]
    assert sources == rows
    assert flagged(roles, "has_engram") == [1, 14]
    assert flagged(roles, "is_candidate_source") == [20]
    assert flagged(roles, "uses_candidates") == [24, 28, 32, 36]
    assert flagged(roles, "is_tap") == [37, 38, 39]
    assert flagged(roles, "uses_yarn") == list(range(2, 40))
    assert flagged(roles, "hash_routed") == []


def test_tiny_roles():
    config = preset("tiny-v41")
    roles = layer_roles(config)
    modes = ["window"] * 2 + ["full", "reuse", "full", "reuse", "full", "reuse", "reindex", "reuse"]
    assert [role.mode for role in roles] == modes
    assert flagged(roles, "has_engram") == [1, 4]
    assert flagged(roles, "uses_candidates") == [8]
    assert flagged(roles, "is_tap") == [7, 8, 9]
    assert source_ratios(config) == (2, 1)
    assert (source_layers(config, 2), source_layers(config, 1)) == ((2, 4), (6,))
    assert index_layers(config) == (2, 4, 6, 8)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-flash-0731"])
def test_v4_roles(name):
    config = preset(name)
    roles = layer_roles(config)
    assert Counter(role.mode for role in roles) == {"window": 2, "csa": 21, "hca": 20}
    assert [role.layer for role in roles if role.mode == "csa"] == list(range(2, 43, 2))
    assert flagged(roles, "hash_routed") == [0, 1, 2]
    assert source_ratios(config) == (4, 128)
    assert index_layers(config) == tuple(range(2, 43, 2))
