"""The operator table: complete, consulted, honest."""

import re

import pytest

import native_ascend
from native_ascend.operators import FORBIDDEN, OPERATORS, STEPS, table
from native_ascend.plan import PlanBuilder

pytestmark = pytest.mark.accept(13)


def test_every_step_names_operators_of_the_table_or_is_missing():
    assert [step.row for step in STEPS] == list(range(1, 29))
    for step in STEPS:
        assert all(name in OPERATORS for name in step.operators), step
        assert (step.status == "missing") == (not step.operators), step
    assert {step.status for step in STEPS} == {"supported", "unverified", "missing"}


def test_the_gaps_of_the_spec_are_missing():
    missing = {step.row for step in STEPS if step.status == "missing"}
    assert {6, 10, 15, 20} <= missing


def test_no_record_claims_hardware(root):
    records = list((root / "verification").glob("*.json"))
    verified = [name for name, op in OPERATORS.items() if op.verified_on_hardware]
    assert bool(verified) <= bool(records)
    assert table().count("unverified on hardware") == sum(bool(s.operators) for s in STEPS)
    assert all(op.documented_in for op in OPERATORS.values())


def test_forbidden_operators_are_neither_in_the_table_nor_declared(root):
    assert not set(FORBIDDEN) & OPERATORS.keys()
    declared = (root / "native_ascend" / "include" / "aclnn_ops.h").read_text()
    names = set(re.findall(r"X\((aclnn\w+)", declared))
    assert names == OPERATORS.keys()
    for name in FORBIDDEN:
        with pytest.raises(native_ascend.AscendUnsupported, match="not in the operator table"):
            PlanBuilder().call(name)


def test_forbidden_operators_are_named_in_the_list_alone(root):
    for path in (root / "native_ascend").rglob("*.*"):
        if path.suffix not in (".h", ".cc", ".py") or path.name == "operators.py":
            continue
        text = path.read_text()
        called = [name for name in FORBIDDEN if re.search(rf"{name}\b", text)]
        assert called == [], path
        assert not re.search(r"scaleAlg\s*=\s*0", text), path


def test_signatures_are_those_of_the_native_side(runtime):
    for name, record in OPERATORS.items():
        assert runtime.library.dij_signature(name.encode()).decode() == record.signature, name


def test_attributes_may_not_be_left_out_and_unknown_ones_not_passed():
    with pytest.raises(TypeError, match="needs cubeMathType"):
        PlanBuilder().call("aclnnMatmul")
    with pytest.raises(TypeError, match="no parameters"):
        PlanBuilder().call("aclnnMatmul", cubeMathType=0, other=1)


def test_the_status_sentence_stands_in_the_docstring():
    text = " ".join(native_ascend.__doc__.split())
    assert native_ascend.STATUS in text


def test_the_readme_says_the_same(root):
    text = " ".join((root / "README.md").read_text().split()).lower()
    assert native_ascend.STATUS.removeprefix("Status: ").lower() in text


def test_no_benchmark_can_time_the_double_and_no_figure_is_of_an_ascend(root):
    """None names it, and `load` never picks it; the acceptance record has tests alone."""
    for path in (root / "benchmarks").rglob("*.*"):
        if path.suffix in (".py", ".json", ".jsonl"):
            assert not re.search("[\"']ascend[\"']", path.read_text().lower()), path


def test_no_vendor_header_text(root):
    for path in (root / "native_ascend").rglob("*.*"):
        if path.suffix in (".h", ".cc", ".py", ".txt"):
            text = path.read_text()
            assert "Huawei" not in text, path
            assert "CANN Open Software License" not in text, path
