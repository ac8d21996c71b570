"""What every level promises, on which device, with which options, and that batch is enforced."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

import deepinfer_jax as di
from deepinfer_jax import determinism
from deepinfer_jax.determinism import PROMISES, promises, require_level
from sharding.mesh import build_mesh
from tests.golden.network import TINY, tiny_config

BATCH = di.ExecutionConfig()
PLAIN = di.RuntimeConfig()


def held(execution=BATCH, runtime=PLAIN, *, platform="cpu", xla_flags="", has_drafts=True):
    """Returns the promises that hold."""
    found = promises(
        execution, runtime, has_drafts=has_drafts, platform=platform, xla_flags=xla_flags
    )
    assert tuple(found) == PROMISES
    assert all(reason for _, reason in found.values())
    return {name for name, (is_held, _) in found.items() if is_held}


def test_levels_on_cpu():
    assert held() == {*PROMISES}
    assert held(replace(BATCH, determinism="run")) == {"D0"}
    assert held(replace(BATCH, determinism="off")) == set()


@pytest.mark.parametrize(
    ("xla_flags", "found"),
    [
        ("", set()),
        ("--xla_gpu_deterministic_ops=true", set()),
        ("--xla_gpu_deterministic_ops=false --xla_gpu_autotune_level=0", set()),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0", {"D0"}),
        ("--xla_gpu_exclude_nondeterministic_ops --xla_gpu_load_autotune_results_from=x", {"D0"}),
    ],
)
def test_level_run_on_a_gpu_needs_flags(xla_flags, found):
    run = replace(BATCH, determinism="run")
    assert held(run, platform="gpu", xla_flags=xla_flags) == found


PINNED = "--xla_gpu_autotune_level=0"


def test_batch_on_a_gpu_is_built_to_hold_and_says_whether_that_is_proven(monkeypatch):
    assert held(platform="gpu") == set()
    found = promises(
        BATCH, PLAIN, has_drafts=True, platform="gpu", xla_flags=PINNED, device_kind="A 1"
    )
    assert {name for name, (is_held, _) in found.items() if is_held} == set()
    assert all("not proven on 'A 1'" in found[name][1] for name in PROMISES[:5])
    monkeypatch.setattr(determinism, "PROVEN_GPUS", {"A 1": "figures.jsonl"})
    found = promises(
        BATCH,
        replace(PLAIN, prefix_restore="bounded"),
        has_drafts=True,
        platform="gpu",
        xla_flags=PINNED,
        device_kind="A 1",
    )
    held_here = {name for name, (is_held, _) in found.items() if is_held}
    assert held_here == {*PROMISES} - {"D3"}
    assert "figures.jsonl" in found["D1"][1]
    assert "larger meshes not" in found["D5"][1]
    assert "figures.jsonl" not in found["D5"][1]  # of one device
    assert "bounded" in found["D3"][1]


def test_bits_across_a_mesh_of_gpus_are_claimed_for_what_was_compared():
    named = replace(BATCH, kernels=(("grouped_matmul", "mosaic_sm90"),))
    for platform, claimed in (("cpu", True), ("gpu", False)):
        found = promises(
            named,
            PLAIN,
            has_drafts=True,
            platform=platform,
            xla_flags=PINNED,
            device_kind="NVIDIA H200",
        )
        assert found["D5"][0] == claimed
        assert ("grouped_matmul=mosaic_sm90" in found["D5"][1]) != claimed
        assert found["D1"][0]


def test_a_mesh_of_gpus_is_held_like_one_gpu(monkeypatch):
    two = jax.devices()[:1] * 2
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", PINNED)
    for axis in ("er", "dp", "cp"):
        require_level(replace(BATCH, mesh=build_mesh({axis: 2}, two)))


def test_batch_on_a_gpu_needs_pinned_kernels_and_no_proof(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(di.ConfigError, match=r"D0.*autotune_level=0"):
        require_level(BATCH)
    monkeypatch.setenv("XLA_FLAGS", PINNED)
    require_level(BATCH)
    with pytest.raises(di.ConfigError, match=r"D3.*bounded"):
        require_level(BATCH, di.RuntimeConfig(prefix_restore="bounded"))
    assert determinism.row_tile("batch") > determinism.row_tile("run") == 8
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(di.ConfigError, match="runs on 'tpu'"):
        require_level(BATCH)
    assert determinism.row_tile("batch") == 8


def test_batch_holds_nothing_where_it_cannot_be_held():
    assert held(platform="tpu") == set()
    assert held(xla_flags="--xla_cpu_enable_fast_math=true") == set()


def test_options_decide_the_promises_they_touch():
    bounded = di.RuntimeConfig(prefix_restore="bounded")
    assert held(BATCH, bounded) == {"D0", "D1", "D2", "D4", "D5"}
    assert "D3" in held(BATCH, replace(bounded, prefix_cache=False))
    found = {
        drafting: promises(
            BATCH,
            di.RuntimeConfig(drafting=drafting, replay="mask"),
            has_drafts=True,
            platform="cpu",
            xla_flags="",
        )
        for drafting in (None, False)
    }
    assert found[False]["D4"] == (True, "nothing is drafted")
    assert "exact" in found[None]["D4"][1]
    assert "replay=mask" in found[None]["D2"][1]


def test_the_report_of_a_model_is_that_of_its_config():
    model = SimpleNamespace(config=tiny_config())
    found = di.determinism_report(model, di.RuntimeConfig(replay="compact"))
    assert {name for name, (is_held, _) in found.items() if is_held} == {*PROMISES}
    assert di.determinism_report(model)["D2"] != found["D2"]


def test_a_level_that_cannot_be_held_raises(monkeypatch):
    with pytest.raises(di.ConfigError, match=r"D3.*bounded.*checkpoint"):
        require_level(BATCH, di.RuntimeConfig(prefix_restore="bounded"))
    with pytest.raises(di.ConfigError, match=r"D3.*bounded"):
        di.LLM(TINY, runtime=di.RuntimeConfig(prefix_restore="bounded")).generate([[5]])
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_experimental_enable_split_k_rewrite=true")
    with pytest.raises(di.ConfigError, match=r"D0.*split_k_rewrite"):
        require_level(BATCH)
    require_level(replace(BATCH, determinism="run"))
