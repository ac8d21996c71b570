"""Fingerprints of lone runs and the comparison of two reports (determinism.md 7)."""

import hashlib
import json
import struct

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.invariance.control import flipped
from deepinfer_jax.invariance.fingerprint import compare_reports, fingerprint, read_report
from tests.e2e.lab import model

pytestmark = pytest.mark.accept(7)
IDS = (5, 9, 300)


def rows():
    return np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)


def report(chains, *, seed=0, weights="a", device="x"):
    """A report as JSON values; chains: by ids."""
    return {
        "seed": seed,
        "run": {"weights_sha256": weights, "numerics": "float32"},
        "environment": {"device": {"kind": device}},
        "fingerprints": [{"ids": list(ids), "chain": list(c)} for ids, c in chains.items()],
    }


def test_the_chain_is_what_the_specification_says():
    found = fingerprint(IDS, rows())
    before = b""
    for place, token in enumerate(IDS):
        logits = b"".join(struct.pack("<f", value) for value in rows()[place])
        before = hashlib.sha256(before + struct.pack("<II", place, token) + logits).digest()
        assert found.chain[place] == before.hex()[:16]
    changed = rows()
    changed[1, 3] = np.nextafter(changed[1, 3], np.float32(9))
    other = fingerprint(IDS, changed)
    assert [a == b for a, b in zip(found.chain, other.chain, strict=True)] == [True, False, False]
    assert fingerprint(IDS, np.where(rows() == 0, 1, rows())) == found


def test_equal_reports_are_comparable_and_match():
    one = report({IDS: "abc", (4,): "d"})
    found = compare_reports(one, one)
    assert found.is_comparable
    assert not found.is_broken
    assert found.positions == 4
    assert found.lines()[0].startswith("comparable")
    assert found.lines()[1] == "bits of all 4 positions match"


def test_promised_bits_that_differ_are_a_break_and_named():
    found = compare_reports(report({IDS: "abc"}), report({IDS: "axc"}))
    assert found.is_broken
    assert "position 1 (id 9): they have b, here it is x" in found.lines()[-1]


@pytest.mark.parametrize(
    ("change", "text"),
    [({"weights": "b"}, "what was run differs: weights"), ({"device": "y"}, "environment differs")],
)
def test_other_weights_or_devices_are_not_comparable(change, text):
    found = compare_reports(report({IDS: "abc"}), report({IDS: "xyz"}, **change))
    assert not found.is_comparable
    assert not found.is_broken
    assert text in found.lines()[0]
    assert "position 0" in found.lines()[-1]


def test_reports_without_a_common_sequence_or_fields_are_refused(tmp_path):
    with pytest.raises(di.InputError, match=r"no sequence in common \(seeds 0 and 3"):
        compare_reports(report({IDS: "abc"}), report({(1,): "a"}, seed=3))
    path = tmp_path / "a.json"
    for text in ("{", "[]", "{}", '{"seed": 1, "run": {}}'):
        path.write_text(text)
        with pytest.raises(di.InputError, match=r"readable report|has the fields"):
            read_report(path)
    with pytest.raises(di.InputError, match="readable report"):
        read_report(tmp_path / "absent.json")


def test_reports_of_a_model_compare_with_each_other(tmp_path):
    path = tmp_path / "a.json"
    first = di.verify_invariance(model(), cases=["slots=2"])
    path.write_text(first.to_json())
    kept = read_report(path)
    assert len(kept["fingerprints"]) == 1
    assert kept["promises"]["D1"][0] is True
    assert kept["environment"]["device"]["platform"] == "cpu"
    again = json.loads(di.verify_invariance(model(), cases=["slots=1"]).to_json())
    assert compare_reports(kept, again).lines()[-1] == "bits of all 96 positions match"
    wrong = model()
    wrong = di.Model(config=wrong.config, params=flipped(wrong.params), tokenizer=None, source="x")
    other = compare_reports(
        kept, json.loads(di.verify_invariance(wrong, cases=["slots=1"]).to_json())
    )
    assert "weights_sha256" in other.run[0]
    assert "position 0" in other.differing[0]
