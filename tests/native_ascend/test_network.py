"""The network through the bridge on the double, against the CPU path (I2, ascend.md 11.3, 27)."""

from dataclasses import replace

import numpy as np
import pytest
from ascend_bridged import engram_ids_of, rotation_of

import deepinfer_jax as di
import native_ascend
from deepinfer_jax.backends import AscendModel
from deepinfer_jax.training.evaluate import demo_rows, make_trials

pytestmark = pytest.mark.accept(13)

GATES = ("sparse_flash_mla.head_dim", "lightning_indexer.head_dim")
#: Far from what nano was trained on: near ties everywhere, so that the CPU's own levels differ.
STRANGE = "The old clock in the hall"
TOKENS = 32


@pytest.fixture(scope="module")
def nano():
    model = di.load("nano")
    attention = replace(model.config.attention, use_fp4_sparse_kv=False)
    return replace(model, config=replace(model.config, attention=attention))


@pytest.fixture
def narrow(double):
    """Two gates of the double off, by name: nano's heads are narrower than any real model's."""
    for gate in GATES:
        double.set(gate, 0)
    yield double
    for gate in GATES:
        double.set(gate, 1)


def bridged(model, max_len=128, **options):
    return AscendModel(
        model.config,
        model.params,
        rotation=rotation_of(model.config),
        engram_ids=engram_ids_of(model.config, model.params.engram.token_map),
        max_len=max_len,
        **options,
    )


def test_nano_generates_32_tokens_equal_to_the_cpu_with_both_head_gates_off(narrow, nano):
    """Extractions of the demo, whose answers nano knows: the least gap between two logits is 7."""
    llm = di.LLM(nano)
    _, extraction = demo_rows()
    trials = [trial for seed in (0, 1) for trial in make_trials(llm, extraction, seed)]
    prompts = [list(trial.prompt_ids) for trial in trials]
    greedy = di.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    expected = [list(out.token_ids) for out in llm.generate(prompts, greedy)]
    llm.close()
    model = bridged(nano, max_len=256)
    try:
        found = [model.generate(prompt, TOKENS) for prompt in prompts]
    finally:
        model.close()
    assert [len(ids) for ids in found] == [TOKENS] * 2
    assert found == expected


@pytest.mark.slow
def test_another_id_is_chosen_only_where_the_cpu_levels_differ_more(narrow, nano):
    prompt = nano.tokenizer.encode(STRANGE).ids
    model = bridged(nano)
    ids = prompt + model.generate(prompt, TOKENS)
    model.close()
    stock = di.load("nano", determinism="off")
    config = replace(stock.config, attention=nano.config.attention)
    rows = slice(len(prompt) - 1, len(ids) - 1)
    batch, off = (np.asarray(di.score(nano.params, c, ids))[rows] for c in (nano.config, config))
    chosen = np.take_along_axis(batch, np.asarray(ids[len(prompt) :])[:, None], axis=1)[:, 0]
    missed = batch.max(axis=1) - chosen
    assert float(missed.max()) < float(np.abs(batch - off).max())
    assert int((missed > 0).sum()) <= TOKENS // 4


def test_rows_of_a_step_do_not_matter(narrow, nano):
    prompt = nano.tokenizer.encode(STRANGE).ids
    found = []
    for chunk in (1, 4):
        model = bridged(nano, chunk=chunk)
        found.append(model.logits(prompt))
        model.close()
    assert np.array_equal(found[0], found[1])


def test_logits_stay_near_those_of_the_cpu(narrow, nano):
    prompt = nano.tokenizer.encode(STRANGE).ids
    model = bridged(nano)
    found = model.logits(prompt)
    model.close()
    expected = np.asarray(di.score(nano.params, nano.config, prompt))[-1]
    assert float(np.abs(found - expected).max()) < 0.1 * float(np.abs(expected).max())


def test_real_gates_refuse_nano(double, nano):
    model = bridged(nano)
    with pytest.raises(native_ascend.AscendError, match=r"head dimension \d+ \(9.1\)"):
        model.logits([1, 2, 3])
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
