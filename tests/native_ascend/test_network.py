"""The network through the bridge on the double, against the CPU path (ascend.md 11.3, 27)."""

from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
import native_ascend
from deepinfer_jax.backends import AscendModel
from deepinfer_jax.engine.ascend_inputs import engram_ids_of, rotation_of
from native_ascend import library
from native_ascend.operators import OPERATORS

pytestmark = pytest.mark.accept(13)

#: Far from what nano was trained on: near ties everywhere, so that the CPU's own levels differ.
STRANGE = "The old clock in the hall"
TOKENS = 32


@pytest.fixture(scope="module")
def nano():
    model = di.load("nano")
    attention = replace(model.config.attention, use_fp4_sparse_kv=False)
    return replace(model, config=replace(model.config, attention=attention))


def bridged(model, max_len=128, **options):
    return AscendModel(
        model.config,
        model.params,
        rotation=rotation_of(model.config),
        engram_ids=engram_ids_of(model.config, model.params),
        max_len=max_len,
        **options,
    )


@pytest.mark.slow
def test_another_id_is_chosen_only_where_the_cpu_levels_differ_more(narrow, nano):
    prompt = nano.tokenizer.encode(STRANGE).ids
    model = bridged(nano)
    ids = prompt + greedy(model, prompt)
    model.close()
    stock = di.load("nano", determinism="off")
    config = replace(stock.config, attention=nano.config.attention)
    rows = slice(len(prompt) - 1, len(ids) - 1)
    batch, off = (np.asarray(di.score(nano.params, c, ids))[rows] for c in (nano.config, config))
    chosen = np.take_along_axis(batch, np.asarray(ids[len(prompt) :])[:, None], axis=1)[:, 0]
    missed = batch.max(axis=1) - chosen
    assert float(missed.max()) < float(np.abs(batch - off).max())
    assert int((missed > 0).sum()) <= TOKENS // 4


def greedy(model, prompt):
    """Returns the 32 ids after a prompt; the lowest id wins a tie."""
    ids, logits = [], model.extend(0, prompt)
    while True:
        ids.append(int(np.argmax(logits)))
        if len(ids) == TOKENS:
            return ids
        logits = model.extend(0, ids[-1:])


def test_rows_of_a_step_do_not_matter(narrow, nano):
    prompt = nano.tokenizer.encode(STRANGE).ids
    found = []
    for chunk in (1, 4):
        model = bridged(nano, chunk=chunk)
        found.append(model.extend(0, prompt))
        model.close()
    assert np.array_equal(found[0], found[1])


def test_logits_stay_near_those_of_the_cpu(narrow, nano):
    prompt = nano.tokenizer.encode(STRANGE).ids
    model = bridged(nano)
    found = model.extend(0, prompt)
    model.close()
    expected = np.asarray(di.score(nano.params, nano.config, prompt))[-1]
    assert float(np.abs(found - expected).max()) < 0.1 * float(np.abs(expected).max())


def test_sequences_have_caches_of_their_own_and_rows_can_be_taken_back(narrow, nano):
    first, other = ([10 + 7 * n % 40 for n in range(count)] for count in (19, 11))
    model = bridged(nano, sequences=3, max_len=64)
    try:
        alone = model.extend(0, first)
        model.extend(1, other[:5])
        model.copy(0, 2)
        model.begin(2, len(first) - 1)
        assert np.array_equal(model.extend(2, first[-1:]), alone)
        mixed = model.extend(1, other[5:])
        model.begin(0)
        assert np.array_equal(model.extend(0, other), mixed)
        assert [model.length(n) for n in range(3)] == [11, 11, 19]
        with pytest.raises(native_ascend.AscendError, match="can give up 8, received length=5"):
            model.begin(2, 5)
        with pytest.raises(native_ascend.AscendError, match="holds 64 tokens, received 60 more"):
            model.extend(0, [5] * 60)
    finally:
        model.close()


def counts(double):
    runtime_names = ("aclrtSetDevice", "aclrtMemcpyAsync", "aclCreateTensor", "aclCreateIntArray")
    runtime_names += ("aclCreateTensorList", "aclCreateScalar", "aclrtRecordEvent")
    operators = [name + part for name in OPERATORS for part in ("GetWorkspaceSize", "")]
    return {name: double.calls(name) for name in (*runtime_names, *operators)}


def test_every_call_of_a_step_may_fail_and_leaves_nothing(narrow, nano, runtime, gates):
    """First and last call of every function in a step of nano, as it is made and on the device."""
    model = bridged(nano, max_len=64)
    try:
        model.extend(0, [5, 7, 11])
        model.begin(0)
        model.extend(0, [5])
        level, before = narrow.live(), counts(narrow)
        model.extend(0, [7])
        made = {name: n - before[name] for name, n in counts(narrow).items() if n > before[name]}
        assert sum(name.endswith("GetWorkspaceSize") for name in made) > 20
        for name, count in made.items():
            is_launch = name.startswith("aclnn") and not name.endswith("Size")
            for nth, on_device in [(n, d) for n in {1, count} for d in {False, is_launch}]:
                narrow.fault(name, nth, 507015, on_device=on_device)
                with pytest.raises(native_ascend.AscendError) as failure:
                    model.extend(0, [9])
                expected = 500000 if name.startswith("aclCreate") else 507015
                assert failure.value.code == expected, name
                assert narrow.live() == level, (name, nth, on_device)
                assert narrow.violations() == [], (name, nth, on_device)
                narrow.reset()
                for gate in gates:
                    narrow.set(gate, 0)
                library.call(runtime.library, "dij_unpoison", 0)
        logits = model.extend(0, [9])
        model.begin(0)
        assert np.array_equal(logits, model.extend(0, [5, 7, 9]))
    finally:
        model.close()


def test_real_gates_refuse_nano(double, nano):
    model = bridged(nano)
    with pytest.raises(native_ascend.AscendError, match=r"head dimension \d+ \(9.1\)"):
        model.extend(0, [1, 2, 3])
    model.close()


def test_fp4_rows_are_refused_by_the_number_of_their_gap(double):
    model = di.load("nano")
    with pytest.raises(native_ascend.AscendUnsupported, match="gap 6") as failure:
        bridged(model)
    assert isinstance(failure.value, di.DeepInferError)


def test_contexts_beyond_the_candidate_blocks_are_refused(double, nano):
    with pytest.raises(native_ascend.AscendUnsupported, match=r"candidate blocks \(gap 20\)"):
        bridged(nano, max_len=1025)


def test_another_arithmetic_is_refused(double):
    with pytest.raises(di.ConfigError, match='numerics="checkpoint"'):
        bridged(di.load("nano", numerics="float32"))
