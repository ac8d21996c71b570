"""Published counts (model.md head, 1.7, 2.5, 10.3) and the names of the tiny checkpoints."""

import json

import pytest

from deepinfer_jax.checkpoint.inventory import count_summary, spec_tree, tensor_inventory
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.config.presets import preset
from deepinfer_jax.model.params_v4 import stored_draft_specs

pytestmark = pytest.mark.accept(2)


@pytest.fixture(scope="module")
def released():
    return tensor_inventory(preset("deepseek-v4.1-flash"))


def elements_of(inventory, *prefixes):
    return count_summary(t for n, t in inventory.items() if n.startswith(prefixes)).elements


def test_released_totals(released):
    summary = count_summary(released)
    assert summary.elements == 763_205_315_794
    assert summary.elements_by_dtype == {
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
        "F8_E4M3": 204_015_223_296,
        "FP4": 557_171_343_360,
    }
    assert summary.scale_elements == 23_563_015_184
    assert summary.tensors == 96_085
    assert summary.nbytes == 510_286_023_000


def test_released_parts(released):
    projections = tuple(
        f"layers.7.attn.{name}." for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
    )
    assert elements_of(released, *projections) == 126_615_552
    assert elements_of(released, "layers.0.ffn.experts.383.") == 35_389_440
    assert elements_of(released, "vision.") == 411_842_560
    assert elements_of(released, "aligner.") == 73_410_560
    assert sum(name.startswith("layers.") for name in released) == 93_360 + 11 + 32 + 12
    assert sum(name.startswith("mtp.") for name in released) == 2_401
    assert "layers.20.attn.compressor.wgate.weight" not in released
    assert released["layers.20.attn.compressor.wkv.weight"].shape == (512, 5120)
    assert released["layers.1.engram.embed.scale"].shape == (384006168, 8)


def test_v4_first_release():
    config = preset("deepseek-v4-flash")
    inventory = tensor_inventory(config)
    summary = count_summary(inventory)
    assert (summary.tensors, summary.nbytes) == (69_187, 159_609_485_896)
    assert summary.tensors_by_dtype == {
        "BF16": 433,
        "F32": 417,
        "F8_E4M3": 375,
        "F8_E8M0": 34_167,
        "I8": 33_792,
        "I64": 3,
    }
    counts = [sum(n.startswith(f"layers.{layer}.") for n in inventory) for layer in (0, 2, 3)]
    assert counts == [1565, 1576, 1569]
    assert sum(name.startswith("mtp.") for name in inventory) == 1575
    loaded = tensor_inventory(config, with_stored_draft=False)
    assert len(loaded) == 69_187 - 1575


def test_v4_second_release():
    config = preset("deepseek-v4-flash-0731")
    summary = count_summary(tensor_inventory(config))
    assert (summary.tensors, summary.nbytes) == (72_317, 166_878_536_440)
    drafts = [tensor for spec in stored_draft_specs(config) for tensor in spec.tensors()]
    assert len(drafts) == 4705
    assert {t.name: t.shape for t in drafts}["mtp.0.main_proj.scale"] == (32, 96)


@pytest.mark.parametrize("name", ["tiny_v41", "tiny_v4"])
def test_tiny_inventory_equals_the_files(fixtures_dir, name):
    stored = {}
    for path in sorted((fixtures_dir / name).glob("model-*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        stored |= {key: (value["dtype"], tuple(value["shape"])) for key, value in header.items()}
    inventory = tensor_inventory(read_config(fixtures_dir / name))
    assert {key: (t.dtype, t.shape) for key, t in inventory.items()} == stored
    assert len(stored) == {"tiny_v41": 1016, "tiny_v4": 498}[name]


def test_hash_layers_store_a_table_and_no_bias():
    tree = spec_tree(preset("deepseek-v4-flash"))
    assert tree.tid2eid.names == tuple(f"layers.{layer}.ffn.gate.tid2eid" for layer in range(3))
    assert tree.gate_bias.names[0] == "layers.3.ffn.gate.bias"
    assert len(tree.gate_bias.names) == 40
