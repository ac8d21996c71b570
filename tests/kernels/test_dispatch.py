"""Rules 1 to 8 of kernels.md section 8: what `kernels=` means, by device, without a device."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import deepinfer_jax as di
import pallas_kernels
from deepinfer_jax.config.model import ExecutionConfig
from deepinfer_jax.errors import DeepInferError, KernelSelectionError
from deepinfer_jax.numerics.selection import (
    attention_widths,
    choose_kernels,
    kernel_table,
    kernel_tiles,
)
from pallas_kernels import COVERED, KernelUnsupported, dispatch, tables
from pallas_kernels.tables import ENTRIES, Entry, arch_of, entries_of, tile_hash

ROOT = Path(__file__).resolve().parents[2]
H200, B200, CPU, OTHER = "NVIDIA H200", "NVIDIA B200", "cpu", "TPU v5 lite"

WIDE = pallas_kernels.Widths(heads=64, head_dim=512, window=128, index_heads=32, index_dim=128)
NARROW = pallas_kernels.Widths(heads=8, head_dim=64, window=64, index_heads=8, index_dim=32)


@pytest.fixture
def all_verified(monkeypatch):
    """The table as it is once every sm_90 kernel has passed on the device."""
    entries = tuple(
        replace(e, status="verified") if e.arch == "sm_90" and e.default_arithmetic else e
        for e in ENTRIES
    )
    monkeypatch.setattr(tables, "ENTRIES", entries)


@pytest.fixture
def none_verified(monkeypatch):
    """The table before any kernel has run on a device."""
    entries = tuple(replace(e, status="compiled") for e in ENTRIES)
    monkeypatch.setattr(tables, "ENTRIES", entries)


@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        (H200, "sm_90"),
        ("NVIDIA H100 80GB HBM3", "sm_90"),
        (B200, "sm_100"),
        (CPU, "cpu"),
        (OTHER, None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_architecture_of_a_device(kind, arch):
    assert arch_of(kind) == arch


def test_none_picks_verified_kernels_only(all_verified):
    found = pallas_kernels.resolve(None, H200)
    assert set(found) == COVERED
    assert "xla" not in found.values()
    assert set(pallas_kernels.resolve(None, B200).values()) == {"xla"}
    assert set(pallas_kernels.resolve(None, CPU).values()) == {"xla"}
    assert set(pallas_kernels.resolve(None, OTHER).values()) == {"xla"}


def test_none_leaves_compiled_kernels_alone(none_verified):
    assert set(pallas_kernels.resolve(None, H200).values()) == {"xla"}


def test_another_arithmetic_is_never_picked(monkeypatch):
    entries = tuple(replace(e, status="verified") for e in ENTRIES if not e.default_arithmetic)
    monkeypatch.setattr(tables, "ENTRIES", entries)
    assert set(pallas_kernels.resolve(None, H200).values()) == {"xla"}
    with pytest.raises(KernelUnsupported, match="mosaic_sm90_fp8"):
        pallas_kernels.resolve("pallas", H200)


def test_pallas_means_every_covered_op(all_verified):
    found = pallas_kernels.resolve("pallas", H200)
    assert set(found) == COVERED
    assert "xla" not in found.values()
    assert not any(name.endswith("_fp8") for name in found.values())


@pytest.mark.parametrize("kind", [H200, B200, CPU, OTHER])
def test_pallas_raises_and_names_a_mapping_that_works(none_verified, kind):
    with pytest.raises(KernelUnsupported, match="needs a verified Pallas") as caught:
        pallas_kernels.resolve("pallas", kind)
    error = caught.value
    assert error.op in COVERED
    assert error.implementation == "pallas"
    assert kind in error.got
    mapping = eval(error.remedy.removeprefix("pass kernels="))
    assert pallas_kernels.resolve(mapping, kind) == mapping


def test_a_compiled_kernel_runs_when_it_is_named(none_verified):
    found = pallas_kernels.resolve({"grouped_matmul": "mosaic_sm90"}, H200)
    assert found["grouped_matmul"] == "mosaic_sm90"
    assert found["block_scaled_matmul"] == "xla"


def test_ops_left_out_of_a_mapping_resolve_as_under_none(all_verified):
    found = pallas_kernels.resolve({"grouped_matmul": "xla"}, H200)
    assert found["grouped_matmul"] == "xla"
    assert found["block_scaled_matmul"] == "mosaic_sm90"


def test_the_interpreter_runs_on_a_cpu_only():
    found = pallas_kernels.resolve("pallas_interpret", CPU)
    assert set(found.values()) == {"pallas_interpret"}
    with pytest.raises(KernelUnsupported, match="runs on cpu"):
        pallas_kernels.resolve("pallas_interpret", H200)


@pytest.mark.parametrize(
    ("kernels", "kind", "text"),
    [
        ("ascend", CPU, "no other implementation exists"),
        ("fast", H200, "must be None, one of"),
        ({"softmax": "mosaic_sm90"}, H200, "an op must be one of"),
        ({"grouped_matmul": "cutlass"}, H200, "no other implementation exists than"),
        ({"grouped_matmul": "pallas"}, H200, "no other implementation exists than"),
        ({"grouped_matmul": "mosaic_sm90"}, B200, "runs on sm_90, got device 'NVIDIA B200'"),
        ({"grouped_matmul": "mosaic_sm90"}, CPU, "runs on sm_90, got device 'cpu'"),
        ({"block_scaled_matmul": "mosaic_sm90_fp8"}, H200, "128x128 scale blocks"),
    ],
)
def test_what_cannot_run_raises(kernels, kind, text):
    with pytest.raises(KernelUnsupported, match=text):
        pallas_kernels.resolve(kernels, kind)


def test_an_absent_kernel_raises(monkeypatch):
    op = min(COVERED)
    absent = tuple(Entry(op, e.implementation, e.arch, "absent", "") for e in entries_of(op))
    monkeypatch.setattr(tables, "ENTRIES", absent)
    with pytest.raises(KernelUnsupported, match="it runs on"):
        pallas_kernels.resolve({op: "mosaic_sm90"}, H200)


def test_float32_arithmetic_has_no_kernels(all_verified):
    found = pallas_kernels.resolve(None, H200, checkpoint_arithmetic=False)
    assert set(found.values()) == {"xla"}
    with pytest.raises(KernelUnsupported, match="float32 arithmetic"):
        pallas_kernels.resolve("pallas", H200, checkpoint_arithmetic=False)


def test_a_model_with_other_scale_blocks_keeps_xla(all_verified):
    assert set(pallas_kernels.resolve(None, H200, scale_block=128).values()) == {"xla"}
    named = {"block_scaled_matmul": "mosaic_sm90_fp8"}
    found = pallas_kernels.resolve(named, H200, scale_block=128)
    assert found["block_scaled_matmul"] == "mosaic_sm90_fp8"
    with pytest.raises(KernelUnsupported, match="32x32 scale blocks"):
        pallas_kernels.resolve({"block_scaled_matmul": "mosaic_sm90"}, H200, scale_block=128)


def test_an_op_without_a_form_for_the_model_keeps_xla(all_verified):
    found = pallas_kernels.resolve("pallas", H200, widths=NARROW)
    assert {op for op, name in found.items() if name == "xla"} == {
        "indexer_logits",
        "sparse_mla_decode",
    }
    assert pallas_kernels.resolve(None, H200, widths=NARROW) == found
    assert "xla" not in pallas_kernels.resolve("pallas", H200, widths=WIDE).values()
    for op, text in (("sparse_mla_decode", "512 channels"), ("indexer_logits", "128 channels")):
        assert pallas_kernels.resolve({op: "xla"}, H200, widths=NARROW)[op] == "xla"
        with pytest.raises(KernelUnsupported, match=text):
            pallas_kernels.resolve({op: "mosaic_sm90"}, H200, widths=NARROW)


@pytest.mark.parametrize(
    ("op", "field", "value"),
    [
        ("sparse_mla_decode", "heads", 96),
        ("sparse_mla_decode", "head_dim", 576),
        ("sparse_mla_decode", "window", 100),
        ("indexer_logits", "index_heads", 12),
        ("indexer_logits", "index_heads", 64),
        ("indexer_logits", "index_dim", 64),
    ],
)
def test_each_size_decides(op, field, value):
    assert tables.misfit(op, WIDE) is None
    assert tables.misfit(op, replace(WIDE, **{field: value}))


def test_the_sizes_of_a_model():
    assert attention_widths(di.preset("deepseek-v4.1-flash")) == WIDE


def test_environment_variables_choose_nothing(none_verified, monkeypatch):
    for name in ("KERNELS", "DEEPINFER_KERNELS", "PALLAS_KERNELS"):
        monkeypatch.setenv(name, "pallas")
    assert set(pallas_kernels.resolve(None, H200).values()) == {"xla"}


def test_a_resolved_table_cannot_be_changed():
    found = pallas_kernels.resolve(None, CPU)
    with pytest.raises(TypeError):
        found["grouped_matmul"] = "mosaic_sm90"  # pyright: ignore[reportIndexIssue]


def test_every_entry_has_a_folder_and_every_op_a_tile_table():
    names = {entry.implementation for entry in ENTRIES}
    assert "xla" not in names
    hashes = {op: tile_hash(op) for op in COVERED}
    assert all(len(value) == 64 for value in hashes.values())
    assert hashes == {op: tile_hash(op) for op in COVERED}


def test_report_has_a_row_for_each_op():
    rows = dispatch.report(CPU)
    assert [row["op"] for row in rows] == sorted(COVERED)
    assert all(row["default"] == "xla" and row["pallas"] is None for row in rows)


def test_errors_carry_their_parts_and_cross_processes():
    error = KernelUnsupported("op", "name", "a rule", "a thing", "do this")
    assert str(error) == "op 'name': a rule, got a thing: do this"
    again = pickle.loads(pickle.dumps(error))
    assert again.fields == error.fields == ("op", "name", "a rule", "a thing", "do this")


def test_load_raises_the_error_of_the_package():
    with pytest.raises(KernelSelectionError, match="grouped_matmul 'mosaic_sm90'") as caught:
        choose_kernels(
            {"grouped_matmul": "mosaic_sm90"},
            numerics="checkpoint",
            scale_block=32,
            device_kind=CPU,
        )
    assert isinstance(caught.value, DeepInferError)
    assert isinstance(caught.value, KernelUnsupported)
    assert di.KernelSelectionError is KernelSelectionError


def test_load_keeps_what_is_not_xla_and_the_table_has_all():
    chosen = choose_kernels(
        {"output_projection": "fp8", "grouped_matmul": "pallas_interpret"},
        numerics="checkpoint",
        scale_block=32,
        device_kind=CPU,
    )
    assert chosen == (("grouped_matmul", "pallas_interpret"), ("output_projection", "fp8"))
    execution = ExecutionConfig(kernels=chosen)
    table = kernel_table(execution)
    assert set(table) == {*COVERED, "output_projection"}
    assert table["block_scaled_matmul"] == "xla"
    assert kernel_tiles(execution) == {"grouped_matmul": tile_hash("grouped_matmul")}


def test_importing_the_package_imports_neither_jax_nor_mosaic():
    code = (
        "import sys, pallas_kernels, pallas_kernels.tables as t;"
        "[t.tile_hash(op) for op in t.COVERED];"
        "sys.exit(any('mosaic' in name or name == 'jax' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_support_matrix_says_what_the_table_says():
    rows = json.loads((ROOT / "support.json").read_text(encoding="utf-8"))["capabilities"]
    row = next(row for row in rows if "Pallas" in row["name"])
    verified = any(e.status == "verified" and e.arch == "sm_90" for e in ENTRIES)
    assert (row["h200"]["status"] in ("works", "limits")) == verified
