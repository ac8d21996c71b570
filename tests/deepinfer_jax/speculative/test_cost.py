"""Step times: looking them up, measuring them on a fake device, keeping and correcting them."""

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.errors import InputError
from deepinfer_jax.speculative.cost import (
    Corrections,
    StepCost,
    at_sizes,
    cache_folder,
    cached_cost,
    chain_seconds,
    cost_key,
    profile,
)

COST = StepCost(
    rows=np.asarray([16, 32, 64]),
    contexts=np.asarray([100, 300]),
    step_seconds=np.asarray([[1.0, 2.0], [1.5, 3.5], [4.0, 6.0]]),
    draft_rows=np.asarray([1, 5]),
    draft_seconds=np.asarray([0.25, 1.25]),
)
IDENTITY = {"model": "nano", "layout": [16, 32], "jax": "0.11.2", "level": "batch"}


def step(cost, rows, context):
    return float(cost.seconds(np.asarray([rows]), context)[0])


def plain(cost):
    names = ("rows", "contexts", "step_seconds", "draft_rows", "draft_seconds")
    return {name: getattr(cost, name).tolist() for name in names}


# -- looking up -----------------------------------------------------------------------------------


def test_a_step_costs_what_its_bucket_costs():
    rows = np.asarray([1, 16, 17, 32, 33, 64, 65, 1000])
    found = COST.seconds(rows, 100)
    np.testing.assert_array_equal(found, [1.0, 1.0, 1.5, 1.5, 4.0, 4.0, 4.0, 4.0])


def test_context_is_linear_between_measured_ones_and_clamped_beyond():
    found = [step(COST, 20, context) for context in (0, 100, 150.0, 200, 300, 10_000)]
    assert found == [1.5, 1.5, 2.0, 2.5, 3.5, 3.5]


def test_one_context_per_step_gives_what_each_gives_alone():
    rows, context = np.asarray([1, 20, 40, 90]), np.asarray([50.0, 130.0, 299.0, 400.0])
    alone = [step(COST, r, c) for r, c in zip(rows.tolist(), context.tolist(), strict=True)]
    np.testing.assert_array_equal(COST.seconds(rows, context), alone)


def test_one_measured_context_holds_for_all():
    flat = replace(COST, contexts=np.asarray([1]), step_seconds=COST.step_seconds[:, :1])
    assert [step(flat, 32, context) for context in (0, 1, 5)] == [1.5] * 3


def test_drafting_is_linear_in_the_sequences():
    assert [COST.drafting_seconds(n) for n in (1, 2, 5, 9)] == [0.25, 0.5, 1.25, 1.25]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": np.asarray([16, 16, 64])},
        {"rows": np.asarray([0, 16, 64])},
        {"rows": np.asarray([16.0, 32.0, 64.0])},
        {"contexts": np.asarray([100])},
        {"contexts": np.asarray([], np.int64)},
        {"draft_rows": np.asarray([[1, 5]])},
        {"step_seconds": COST.step_seconds * 0},
        {"step_seconds": COST.step_seconds * np.nan},
        {"draft_seconds": np.asarray([0.25, -1.0])},
        {"draft_seconds": np.asarray([0.25, np.inf])},
    ],
)
def test_fields_that_are_no_curve_are_refused(change):
    with pytest.raises(InputError, match="StepCost"):
        replace(COST, **change)


def test_a_sparse_curve_becomes_one_of_all_tiles():
    dense = at_sizes(COST, range(16, 97, 16))
    assert dense.rows.tolist() == [16, 32, 48, 64, 80, 96]
    assert dense.step_seconds[:, 0].tolist() == [1.0, 1.5, 2.75, 4.0, 4.0, 4.0]
    assert dense.draft_seconds is COST.draft_seconds


# -- measuring ------------------------------------------------------------------------------------


class FakeDevice:
    """Runs what is dispatched in order; the host's own 0.001 s a call overlap with it."""

    def __init__(self, hiccup=-1):
        self.now = self.free = 0.0
        self.log, self.waits, self.hiccup = [], 0, hiccup

    def start(self, name, seconds):
        self.now += 0.001
        slow = 50.0 if len(self.log) == self.hiccup else 0.0
        self.free = max(self.free, self.now) + seconds + slow
        self.log.append(name)

    def step(self, rows, context):
        self.start(("step", rows, context), rows * (1 + context))

    def draft(self, sequences, is_drafting):
        self.start(("draft", sequences, is_drafting), 2.0 + is_drafting * sequences / 4)

    def wait(self):
        self.waits += 1
        self.now = max(self.now, self.free)

    def clock(self):
        return self.now


def measure(device, **options):
    return profile(
        device.step,
        device.draft,
        device.wait,
        rows=(8, 32, 16),
        contexts=(1, 3),
        sequences=(2, 4),
        clock=device.clock,
        **options,
    )


def test_profile_times_chains_and_starts_with_the_largest_sizes():
    device = FakeDevice()
    cost = measure(device)
    assert (cost.rows.tolist(), cost.contexts.tolist()) == ([8, 16, 32], [1, 3])
    np.testing.assert_allclose(cost.step_seconds, [[16, 32], [32, 64], [64, 128]], rtol=1e-3)
    np.testing.assert_allclose(cost.draft_seconds, [0.5, 1.0], rtol=1e-3)
    steps = [("step", r, c) for r in (32, 16, 8) for c in (3, 1)]
    points = [*steps, *[("draft", n, w) for n in (4, 2) for w in (True, False)]]
    assert device.log == [point for point in points for _ in range(1 + 3 * 20)]
    assert device.waits == len(points) * 4  # after the first call, and once a chain


@pytest.mark.parametrize("hiccup", [0, 5, 25])
def test_one_slow_call_does_not_show(hiccup):
    found, calm = measure(FakeDevice(hiccup)), measure(FakeDevice())
    np.testing.assert_allclose(found.step_seconds, calm.step_seconds)
    np.testing.assert_allclose(found.draft_seconds, calm.draft_seconds)


@pytest.mark.parametrize("options", [{"chain": 19}, {"repeats": 0}])
def test_a_chain_is_long_enough_to_hide_the_host(options):
    device = FakeDevice()
    with pytest.raises(InputError, match="20 dispatches"):
        chain_seconds(lambda: device.draft(1, True), device.wait, clock=device.clock, **options)
    assert device.log == []


# -- keeping --------------------------------------------------------------------------------------


def refuse():
    raise AssertionError("measured although a file holds it")


def test_a_measured_curve_is_read_back_bit_for_bit(tmp_path):
    odd = replace(COST, step_seconds=COST.step_seconds / 3)
    folder = tmp_path / "not" / "there"
    first, note = cached_cost(IDENTITY, lambda: odd, folder=folder)
    assert first is odd
    assert "there was no file" in note
    assert "saved in" in note
    again, note = cached_cost(dict(reversed(IDENTITY.items())), refuse, folder=folder)
    assert plain(again) == plain(odd)
    assert note.startswith("step times read from")
    assert [path.name for path in folder.iterdir()] == [f"step_cost-{cost_key(IDENTITY)}.json"]


def test_every_part_of_the_identity_has_a_file_of_its_own(tmp_path):
    for name in IDENTITY:
        other = IDENTITY | {name: "other"}
        _, note = cached_cost(other, lambda: COST, folder=tmp_path)
        assert "there was no file" in note
    assert len(list(tmp_path.iterdir())) == len(IDENTITY)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[1, 2]",
        lambda text: "7",
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: text.replace('"rows"', '"lines"'),
        lambda text: text.replace('"rows": [16,', '"rows": [16.5,'),
        lambda text: text.replace("[1.0, 2.0]", "[1.0]"),
        lambda text: text.replace("[1.0, 2.0]", "[1.0, NaN]"),
        lambda text: text.replace("[1.0, 2.0]", '[1.0, "2 s"]'),
        lambda text: text.replace('"nano"', '"foreign"'),
        lambda text: text.replace('{"model": "nano", ', '{"other": 1, '),
        lambda text: text.encode("utf-16").decode("latin-1"),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_again_and_replaced(tmp_path, damage):
    cached_cost(IDENTITY, lambda: COST, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    sound = path.read_text(encoding="utf-8")
    damaged = damage(sound)
    assert damaged != sound
    path.write_text(damaged, encoding="latin-1")
    found, note = cached_cost(IDENTITY, lambda: COST, folder=tmp_path)
    assert found is COST
    assert str(path) in note
    assert "delete it" in note
    assert path.read_text(encoding="utf-8") == sound
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_only_costs_the_saving(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("", encoding="utf-8")
    found, note = cached_cost(IDENTITY, lambda: COST, folder=blocker)
    assert found is COST
    assert "not saved" in note


def test_without_a_home_the_curve_is_measured(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    found, note = cached_cost(IDENTITY, lambda: COST)
    assert found is COST
    assert "not saved: Could not determine" in note


def test_the_folder_follows_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "deepinfer_jax"
    for value in ("", "relative"):  # the XDG rules: a relative path is ignored
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "deepinfer_jax"
    cached_cost(IDENTITY, lambda: COST)
    assert plain(cached_cost(IDENTITY, refuse)[0]) == plain(COST)


# -- correcting -----------------------------------------------------------------------------------


def feed(corrections, samples):
    for rows, context, seconds in samples:
        corrections.observe(rows, context, seconds)


def test_without_observations_the_curve_is_expected():
    corrections = Corrections(COST)
    rows = np.arange(1, 70)
    np.testing.assert_array_equal(corrections.seconds(rows, 150), COST.seconds(rows, 150))
    expected = corrections.expected(rows, 5, 150)
    np.testing.assert_array_equal(expected, COST.seconds(rows, 150) + 1.25)


def test_slow_steps_raise_the_slope_after_64_of_them():
    corrections = Corrections(COST)
    slow = [(16, 150, 1.25 + 0.01 * 16), (30, 300, 3.5 + 0.01 * 32)] * 32
    feed(corrections, slow[:-1])
    assert corrections.slope == 0
    feed(corrections, slow[-1:])
    assert corrections.slope == pytest.approx(0.01)
    added = corrections.seconds(np.asarray([1, 32, 33]), 100) - [1.0, 1.5, 4.0]
    np.testing.assert_allclose(added, [0.16, 0.32, 0.64])


def test_fast_steps_change_nothing():
    corrections = Corrections(COST)
    feed(corrections, [(16, 100, 0.1)] * 64)
    assert corrections.slope == 0


def test_nine_steps_of_a_bucket_are_too_few():
    corrections = Corrections(COST)
    feed(corrections, [(32, 100, 9.0)] * 9 + [(16, 100, 1.16)] * 55)
    assert corrections.slope == pytest.approx(0.01)
    thin = Corrections(at_sizes(COST, range(8, 65, 8)))
    feed(thin, [(rows, 100, 9.0) for rows in range(1, 65)])  # eight of each
    assert thin.slope == 0


def test_steps_beyond_the_curve_do_not_count():
    corrections = Corrections(COST)
    feed(corrections, [(65, 100, 90.0)] * 640 + [(64, 100, 4.64)] * 64)
    assert corrections.slope == pytest.approx(0.01)


def test_the_window_forgets():
    corrections = Corrections(COST)
    feed(corrections, [(16, 100, 2.6)] * 6400)
    assert corrections.slope == pytest.approx(0.1)
    feed(corrections, [(16, 100, 1.0)] * 2496)
    assert corrections.slope == pytest.approx(0.1)  # 2,504 slow ones of the last 5,000
    feed(corrections, [(16, 100, 1.0)] * 64)
    assert corrections.slope == 0


def test_slope_equals_the_definition():
    draw = np.random.default_rng(3)
    for _ in range(20):
        count = 64 * int(draw.integers(1, 5))
        rows = draw.choice([3, 16, 20, 50, 64], count, p=draw.dirichlet(np.full(5, 0.5)))
        context = draw.uniform(0, 400, count)
        seconds = draw.normal(4, 2, count)
        samples = list(zip(rows.tolist(), context.tolist(), seconds.tolist(), strict=True))
        corrections = Corrections(COST)
        feed(corrections, samples)
        residuals = {}
        for r, c, s in samples:
            size = min(b for b in (16, 32, 64) if b >= r)
            residuals.setdefault(size, []).append(s - step(COST, r, c))
        medians = [statistics.median(r) / b for b, r in residuals.items() if len(r) >= 10]
        assert corrections.slope == pytest.approx(max(0.0, statistics.median(medians)), abs=1e-12)


def test_drafting_is_the_median_of_the_last_nine_of_this_number():
    corrections = Corrections(COST)
    for seconds in (9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 50.0):
        corrections.observe_draft(5, seconds)
    assert corrections.drafting_seconds(5) == 5.0
    assert corrections.expected(np.asarray([1]), 5, 100).tolist() == [6.0]


def test_few_draft_times_fall_back_on_those_of_all_numbers_and_then_on_the_curve():
    corrections = Corrections(COST)
    for seconds in (2.0, 3.0, 4.0, 5.0):
        corrections.observe_draft(5, seconds)
    assert corrections.drafting_seconds(5) == 1.25  # 4 are too few
    corrections.observe_draft(1, 10.0)
    assert corrections.drafting_seconds(5) == 4.0  # of all
    assert corrections.drafting_seconds(7) == 4.0
    corrections.observe_draft(5, 1.0)
    assert corrections.drafting_seconds(5) == 3.0  # of five sequences
