"""The packed plan: parts do not overlap, and the device slices where the host wrote."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.cache.hit import HitRule
from deepinfer_jax.engine.admission import write_admission
from deepinfer_jax.engine.completion import CompletionBuilder
from deepinfer_jax.engine.layout import ADMIT_FLOATS, ADMIT_INTS, PlanLayout, blank, unpack
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.sampling.params import SamplingParams

LAYOUT = PlanLayout(rows=16, slots=3, deltas=7, stop_ids=4, drafts=5)
PARTS = ("header", "ids", "position", "slot", "target", "rounds", "ends", "deltas", "admits")
RULE = HitRule(
    block_tokens=16,
    replay="off",
    keep_tokens=140,
    restore="checkpoint",
    window=8,
    window_layers=10,
    decoder_rows=0,
)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_read_where_it_was_written(name):
    vector, parts = blank(LAYOUT)
    assert (vector.dtype, vector.shape) == (np.int32, (LAYOUT.size,))
    part = getattr(parts, name)
    part[...] = np.arange(1, part.size + 1).reshape(part.shape)
    on_device = unpack(LAYOUT, jnp.asarray(vector))
    for other in PARTS:
        found = np.asarray(getattr(on_device, other))
        assert (found == (part if other == name else 0)).all()


def test_every_word_belongs_to_one_part():
    vector, parts = blank(LAYOUT)
    for name in PARTS:
        getattr(parts, name)[...] += 1
    assert (vector == 1).all()


def admission(**fields) -> dict[str, int | float | list[int]]:
    """Returns the words of the admission of a 5-token sequence, by name."""
    params = SamplingParams(**fields)
    sequence = Sequence(
        number=0,
        child=0,
        params=params,
        prompt_len=5,
        ids=np.arange(10, 20, dtype=np.int32),
        room=4,
        seed=fields.get("seed", 0),
        root=b"",
        output=CompletionBuilder(0, params, None),
        submitted=0.0,
    )
    sequence.append([15])
    sequence.slot, sequence.generation = 2, 9
    sequence.first = sequence.reused = 2
    entry = np.zeros(LAYOUT.admit_width, np.int32)
    write_admission(entry, sequence, RULE, 1, LAYOUT.drafts)
    first = len(ADMIT_INTS)
    reals = entry[first : first + len(ADMIT_FLOATS)].view(np.float32)
    return {
        **dict(zip(ADMIT_INTS, entry[:first].tolist(), strict=True)),
        **dict(zip(ADMIT_FLOATS, reals.tolist(), strict=True)),
        "stops": entry[first + len(ADMIT_FLOATS) :].tolist(),
    }


def test_an_admission_says_where_the_sequence_stands():
    found = admission()
    wanted = {"slot": 2, "generation": 9, "length": 2, "first": 2, "produced": 1, "most": 4}
    wanted |= {"most_drafts": 5, "rule": 0}
    assert {name: found[name] for name in wanted} == wanted
    assert [found[f"before_{i}"] for i in range(3)] == [0, 10, 11]
    assert found["stops"] == [1, -1, -1, -1]


@pytest.mark.parametrize("asked", [0, 3, 5])
def test_an_admission_says_how_to_verify(asked):
    found = admission(max_draft=asked, verify="block")
    assert (found["most_drafts"], found["rule"]) == (asked, 2)


def test_an_admission_at_the_edges_of_the_parameters():
    found = admission(
        seed=2**64 - 1, temperature=9e-6, top_k=10**12, stop_token_ids=(7, 8), ignore_eos=True
    )
    assert (found["key_high"], found["key_low"]) == (-1, -1)
    assert found["temperature"] == 0.0
    assert found["top_k"] == 2**31 - 1
    assert found["stops"] == [7, 8, -1, -1]
    assert admission(top_k=0)["top_k"] == -1
    assert np.isfinite(admission(temperature=1e300)["temperature"])
