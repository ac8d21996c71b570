"""The gate of `make test-gpu-compile`: what it reads from ptxas, and what it refuses."""

from dataclasses import replace

import pytest

from pallas_kernels.tables import ENTRIES, tile_hash
from tools import gpu_compile
from tools.gpu_compile import Row, faults, parse_ptxas, read_table, write_table

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'grouped_sm90_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for grouped_sm90_mosaic_gpu_kernel
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 8 bytes stack, 1 bytes smem
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored
ptxas info    : Compiling entry function 'norm' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
"""
ROW = Row("sm_90", "op", "case", "kernel", 168, 0, 0, 1024, "none")


def test_reads_what_ptxas_says_about_each_kernel():
    first, second = parse_ptxas(REPORT)
    assert first == {
        "kernel": "grouped_sm90",
        "registers": 168,
        "spills": 16,
        "stack": 8,
        "static_smem": 1,
        "warnings": "C7508",
    }
    assert second["kernel"] == "norm"
    assert (second["registers"], second["spills"], second["warnings"]) == (40, 0, "none")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"spills": 4}, "spills 4 bytes, the table has 0"),
        ({"stack": 8}, "stack 8 bytes"),
        ({"smem": 1025}, "smem 1025 bytes, the table has 1024"),
        ({"warnings": "C7508"}, "warnings C7508"),
        ({"case": "other"}, "not in compiled.txt"),
    ],
)
def test_refuses_what_got_worse(changed, text):
    found = faults([replace(ROW, **changed)], [ROW])
    assert any(text in line for line in found)


def test_refuses_a_spill_without_a_reason(monkeypatch):
    spilling = replace(ROW, spills=16, stack=8)
    assert any("MAY_SPILL" in line for line in faults([spilling], [spilling]))
    monkeypatch.setitem(gpu_compile.MAY_SPILL, ("op", "case"), "a reason")
    assert faults([spilling], [spilling]) == []


def test_lets_pass_what_is_equal_or_better():
    assert faults([replace(ROW, registers=200, smem=512)], [ROW]) == []


def test_a_row_that_is_gone_is_a_fault_on_its_architecture_only():
    gone = replace(ROW, case="gone")
    assert any("not compiled any more" in line for line in faults([ROW], [ROW, gone]))
    assert faults([ROW], [ROW, replace(gone, arch="sm_100")]) == []


def test_the_table_survives_writing_and_reading():
    rows = [ROW, replace(ROW, arch="sm_100", warnings="C7508,C7519")]
    assert sorted(read_table(write_table(rows)), key=lambda r: r.key) == sorted(
        rows, key=lambda r: r.key
    )


def test_the_committed_table_covers_every_kernel_that_dispatch_may_select():
    rows = read_table(gpu_compile.TABLE.read_text(encoding="utf-8"))
    compiled = {(row.op, row.arch) for row in rows}
    wanted = {(e.op, e.arch) for e in ENTRIES if e.arch != "cpu" and e.status != "absent"}
    assert wanted <= compiled
    assert all(tile_hash(op) for op, _ in wanted)
    assert faults(rows, rows) == []
