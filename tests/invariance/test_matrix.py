"""`verify_invariance`: the adversarial matrix, what it reports, and that it notices (issue 7)."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.errors import InputError
from deepinfer_jax.invariance import observe, schedule
from deepinfer_jax.invariance.cases import NETWORK_CASES
from deepinfer_jax.invariance.engine_cases import ENGINE_CASES
from deepinfer_jax.invariance.network import Lab, bits, execute
from deepinfer_jax.invariance.report import CaseRow, Report
from deepinfer_jax.invariance.runner import CASES, MESH, select_cases
from deepinfer_jax.model import network
from tests.e2e.forced import nano
from tests.e2e.lab import model

CONTROL = "control: weight bits flipped"
#: On the one program of tiny_v41 and on the one of nano.
FAST_TINY = (
    "chunks",
    "random chunks",
    "slots=2",
    "poisoned cache",
    "neighbours",
    "arrival=2",
    "prefix hit, checkpoint",
    "prefix hit, halo=1",
    "preemption=2",
    "drafts",
    "random=10",
    MESH,
    CONTROL,
)
FAST_NANO = ("poisoned cache=2", "prefix hit, checkpoint=1", "random=1")
pytestmark = pytest.mark.accept(7)


def check(report):
    wrong = [f"{row.name}: {row.first}" for row in report.rows if not row.is_right]
    assert report.is_equal, wrong


def test_the_network_of_tiny():
    report = di.verify_invariance(model(), cases=FAST_TINY)
    check(report)
    rows = {row.name: row for row in report.rows}
    assert rows["random"].runs == 10
    assert rows["drafts"].runs == 18
    assert rows["chunks"].positions == rows["chunks"].runs * 96
    assert rows[CONTROL].differing == rows[CONTROL].positions > 0
    assert "one device" in str(rows[MESH].skipped) or len(jax.devices()) > 1


@pytest.mark.slow
@pytest.mark.accept(7)
def test_the_network_of_nano():
    check(di.verify_invariance(nano(), cases=FAST_NANO))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["float32", "checkpoint"])
def test_every_case_of_tiny(numerics):
    report = di.verify_invariance(model(numerics))
    check(report)
    details = {row.name: row.detail for row in report.rows}
    assert len(details) == len(CASES)
    assert "preemptions 0" not in details["engine: preemption"]
    assert "hits 0" not in details["engine: prefix hit, checkpoint"]
    assert "hits 0" not in details["engine: prefix hit, halo"]
    assert "rejected 0" in details["engine: right drafts"]
    assert "accepted 0" in details["engine: wrong drafts"]
    assert all(row.skipped is None for row in report.rows if row.name != MESH)


@pytest.mark.slow
def test_every_case_of_nano():
    check(di.verify_invariance(nano()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("which", "runs"),
    [(lambda: model(), 50), (lambda: model("checkpoint"), 35), (nano, 40)],
    ids=["tiny float32", "tiny checkpoint", "nano checkpoint"],
)
def test_random_compositions(which, runs, seed, record_property):
    """Four seeds of 125 random compositions x chunkings x cache states x drafts: 500."""
    report = di.verify_invariance(which(), cases=[f"random={runs}"], seed=seed + 1)
    check(report)
    (row,) = report.rows
    assert row.runs == runs
    record_property("compared", f"{row.runs} runs, {row.positions} positions, {row.seconds:.0f} s")


def test_random_schedules_meet_everything():
    """What the random case draws: neighbours, hits, rejected drafts, shared calls, clean caches."""
    lab = Lab(model(), di.RuntimeConfig(), 0)
    (case,) = (case for case in NETWORK_CASES if case.name == "random")
    found = list(replace(case, runs=60).schedules(lab, np.random.default_rng(0)))
    calls = [[a for a in one.actions if isinstance(a, schedule.Call)] for one in found]
    assert {one.poisoned for one in found} == {True, False}
    assert sum(any(isinstance(a, schedule.Restore) for a in one.actions) for one in found) > 15
    assert sum(any(len(call.parts) > 2 for call in of) for of in calls) > 20
    assert sum(any(0 < p.kept < len(p.ids) for c in of for p in c.parts) for of in calls) > 20
    for one, of in zip(found, calls, strict=True):
        kept = [(p.start, p.kept) for c in of for p in c.parts if p.kept]
        assert sum(count for _, count in kept) == len(one.ids) - kept[0][0]


def late_norm(monkeypatch, layer, step=2**-20):
    """Makes the attention norm of one layer depend on how many rows its tile has.

    step: how much it grows with a row; a small one may be lost in the rounding to BF16.
    """
    right = network.apply_layer

    def wrong(ops, config, params, role, state, flow, tile):
        grown = 1 + step * tile.valid.sum()
        scale = jax.numpy.where(role.layer == layer, grown, 1.0).astype("float32")
        layers = params.layers.replace(attn_norm=params.layers.attn_norm * scale)
        return right(ops, config, params.replace(layers=layers), role, state, flow, tile)

    monkeypatch.setattr(network, "apply_layer", wrong)


@pytest.fixture
def _fresh_programs():
    jax.clear_caches()
    yield
    jax.clear_caches()


def named(report, *, layer):
    """Returns the first difference, which is what the norm of this layer's attention is given."""
    first = report.rows[0].first
    assert first is not None
    assert (first.layer, first.op.split(":")[0]) == (layer, "attn_in")
    return first


@pytest.mark.usefixtures("_fresh_programs")
def test_a_planted_violation_is_found_where_it_is(monkeypatch):
    """V3: a norm that depends on the number of rows."""
    late_norm(monkeypatch, layer=3)
    report = di.verify_invariance(model(), cases=["random chunks=1"])
    assert not report.is_equal
    first = named(report, layer=3)
    assert first.op_position <= first.position
    assert first.found != first.lone
    assert report.rows[0].differing > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_programs")
def test_a_planted_violation_is_found_inside_the_engine(monkeypatch):
    late_norm(monkeypatch, layer=5)
    report = di.verify_invariance(model(), cases=["engine: rows per step=1"])
    named(report, layer=5)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_programs")
def test_a_planted_violation_in_nano(monkeypatch):
    late_norm(monkeypatch, layer=7, step=2**-9)
    report = di.verify_invariance(nano(), cases=["arrival=1"])
    named(report, layer=7)


def test_first_difference_is_the_first_in_the_order_of_computation():
    config = model().config
    lone = {
        (2, "attn_in"): {5: b"a", 6: b"a"},
        (1, "ffn_out"): {9: b"a"},
        (None, "head"): {5: b"a"},
    }
    assert observe.first_difference(config, lone, lone) == {}
    found = {key: dict.fromkeys(rows, b"b") for key, rows in lone.items()}
    where = observe.first_difference(config, found, lone)
    assert (where["layer"], where["op_position"]) == (1, 9)
    assert where["op"].startswith("ffn_out")
    assert where["found"] == observe.digest(b"b") != where["lone"]
    del found[1, "ffn_out"], found[2, "attn_in"]
    assert observe.first_difference(config, found, lone)["layer"] is None


def test_lone_runs_are_repeatable_and_one_call():
    lab = Lab(model(), di.RuntimeConfig(), 0)
    alone = lab.lone_schedule(lab.sequences[0])
    assert [type(action) for action in alone.actions] == [schedule.Open, schedule.Call]
    rows = np.stack([row for _, row in execute(lab, alone)])
    np.testing.assert_array_equal(bits(rows), bits(lab.lone(lab.sequences[0])))
    with pytest.raises(TypeError, match="float32"):
        bits(np.zeros(3))


def test_cases_are_chosen_by_name():
    assert select_cases(["drafts=3", "chunks"]) == [("chunks", None), ("drafts", 3)]
    assert [name for name, _ in select_cases(None)] == list(CASES)
    assert len(set(CASES)) == len(NETWORK_CASES) + len(ENGINE_CASES) + 2
    for wrong in ("no such case", "drafts=0", "drafts=x"):
        with pytest.raises(InputError, match=r"no case|RUNS"):
            select_cases([wrong])


def test_a_budget_leaves_cases_out():
    report = di.verify_invariance(model(), cases=["chunks", "slots"], budget_s=0.0)
    assert all("0 s were over" in str(row.skipped) for row in report.rows)
    assert not report.is_equal


def report_of(*rows):
    return Report(
        source="x",
        level="batch",
        numerics="float32",
        device="cpu",
        versions=("1", "2"),
        seed=3,
        seconds=1.5,
        rows=rows,
    )


def test_reports_as_values_and_json():
    fine = CaseRow(name="a", runs=1, positions=9)
    skipped = CaseRow(name="s", skipped="why")
    control = CaseRow(name="c", runs=1, positions=9, expects_difference=True)
    assert report_of(fine, skipped).is_equal
    assert not report_of(skipped).is_equal
    assert not report_of(fine, control).is_equal
    assert report_of(fine, replace(control, differing=2)).is_equal
    assert not report_of(replace(fine, differing=2, at=(4, 6))).is_equal
    record = json.loads(report_of(replace(fine, differing=2, at=(4, 6))).to_json())
    assert record["rows"][0]["at"] == [4, 6]
    assert record["is_equal"] is False


def test_a_picture_marks_the_positions(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    report_of(CaseRow(name="a", runs=1, positions=9, differing=2, at=(4, 6))).plot(path)
    assert path.read_bytes()[:4] == b"\x89PNG"
