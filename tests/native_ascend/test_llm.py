"""A model loaded with kernels="ascend" through `LLM`, on the double (I2, ascend.md 8.2, 10, 27b).

The double shows what the bridge asks of CANN, and nothing of a device.
"""

import dataclasses

import numpy as np
import pytest

import deepinfer_jax as di
import native_ascend
from deepinfer_jax.cli.replay import replay
from deepinfer_jax.training.evaluate import demo_rows, make_trials
from native_ascend import library
from native_ascend import runtime as loaded_runtime

pytestmark = pytest.mark.accept(13)

TOKENS = 32
RUNTIME = di.RuntimeConfig(max_seqs=2, max_len=256, check=True)
GREEDY = di.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
DRAWN = di.SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, n=2)


def ascend(folder, **options):
    return di.load(folder, **{"kernels": "ascend", "determinism": "run"} | options)


@pytest.fixture(scope="module")
def llm(runtime, libraries, nano_folder, gates):
    """Nano with both head gates of the double off, which each test needs off as well."""
    _, double = libraries
    for gate in gates:
        double.set(gate, 0)
    with di.LLM(ascend(nano_folder), runtime=RUNTIME) as llm:
        llm.engine  # noqa: B018  (made before the first test counts what lives)
        yield llm


@pytest.fixture(scope="module")
def on_cpu(nano_folder):
    with di.LLM(di.load(nano_folder), runtime=RUNTIME) as llm:
        yield llm


def test_nano_generates_32_tokens_equal_to_the_cpu_with_both_head_gates_off(llm, on_cpu, narrow):
    """Extractions of the demo, whose answers nano knows: the least gap between two logits is 7."""
    _, extraction = demo_rows()
    trials = [trial for seed in (0, 1) for trial in make_trials(on_cpu, extraction, seed)]
    prompts = [list(trial.prompt_ids) for trial in trials]
    found = llm.generate(prompts, GREEDY)
    expected = on_cpu.generate(prompts, GREEDY)
    assert [len(out.token_ids) for out in found] == [TOKENS] * 2
    assert [out.token_ids for out in found] == [out.token_ids for out in expected]


def test_company_waiting_and_copies_change_no_token(llm, narrow, nano_folder):
    """Three prompts with two completions each in two slots, against one after the other."""
    prompts = ["Mara lives in", "Once there was", "The old clock in the hall"]
    together = llm.generate(prompts, DRAWN)
    alone_in_one_slot = dataclasses.replace(RUNTIME, max_seqs=1, max_tokens_per_step=4)
    with di.LLM(llm.model, runtime=alone_in_one_slot) as one:
        alone = [one.generate(prompt, DRAWN)[0] for prompt in prompts]
    for out, expected in zip(together, alone, strict=True):
        assert [o.token_ids for o in out.outputs] == [o.token_ids for o in expected.outputs]
        assert out.outputs[0].token_ids != out.outputs[1].token_ids


def test_log_probabilities_are_those_of_the_bridge(llm, on_cpu, narrow):
    params = dataclasses.replace(GREEDY, max_tokens=4, logprobs=2)
    (out,) = llm.generate("Once there was", params)
    (score,) = llm.score([[*out.prompt_token_ids, *out.token_ids]])
    assert np.array_equal(score.logprobs[-4:], out.logprobs)
    chosen = zip(out.top_logprobs, out.token_ids, strict=True)
    assert all(pairs[0][0] == token for pairs, token in chosen)
    (near,) = on_cpu.score([[*out.prompt_token_ids, *out.token_ids]])
    assert float(np.abs(near.logprobs - score.logprobs).max()) < 0.2


def test_edits_stops_and_grammars_hold(llm, narrow):
    forced = dataclasses.replace(GREEDY, max_tokens=3, logit_bias={99: 100.0})
    assert list(llm.generate("Mara", forced)[0].token_ids) == [99] * 3
    stopped = di.SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(99,), min_tokens=2)
    (out,) = llm.generate("Mara", dataclasses.replace(stopped, logit_bias={99: 100.0}))
    assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (2, "stop", 99)
    grammar = di.Grammar.choice(["Claygate", "Basel"])
    (out,) = llm.generate("Mara lives in", di.SamplingParams(temperature=0, grammar=grammar))
    assert out.text in ("Claygate", "Basel")
    assert out.finish_reason == "stop"


def test_the_record_says_what_ran(llm, narrow):
    (out,) = llm.generate("Mara", dataclasses.replace(GREEDY, max_tokens=1))
    assert out.record.execution["kernels"] == {"network": "ascend"}
    assert "a TEST DOUBLE" in out.record.execution["ascend"]
    assert not any(held for held, _ in out.record.promises.values())
    report = di.determinism_report(llm.model, RUNTIME)
    assert report["D0"] == (False, report["D0"][1])
    assert "verified on Ascend hardware" in report["D0"][1]


def test_a_record_is_replayed_on_the_bridge_alone(llm, narrow, tmp_path, monkeypatch, capsys):
    (out,) = llm.generate("Mara lives in", dataclasses.replace(GREEDY, max_tokens=4))
    path = tmp_path / "record.json"
    out.record.write(path)
    replay(path)
    assert "equal: ids of 4 tokens" in capsys.readouterr().out
    monkeypatch.setattr(loaded_runtime, "_loaded", None)
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    with pytest.raises(native_ascend.AscendUnavailable):
        replay(path)


def test_a_failure_in_a_step_is_raised_and_the_next_request_runs(llm, narrow, runtime):
    params = dataclasses.replace(GREEDY, max_tokens=4)
    expected = llm.generate("Mara", params)[0].token_ids
    narrow.fault("aclnnMhcPost", 30, 361001)
    with pytest.raises(native_ascend.AscendError, match="361001") as failure:
        llm.generate("Mara", params)
    assert isinstance(failure.value, di.DeepInferError)
    library.call(runtime.library, "dij_unpoison", 0)
    assert llm.generate("Mara", params)[0].token_ids == expected


def test_other_weights_are_uploaded(llm, narrow):
    params = dataclasses.replace(GREEDY, max_tokens=4)
    before, own = llm.generate("Mara", params)[0].token_ids, llm.model.params
    llm.replace_params(dataclasses.replace(own, head=-own.head))
    after = llm.generate("Mara", params)[0].token_ids
    llm.replace_params(own)
    assert after != before
    assert llm.generate("Mara", params)[0].token_ids == before


def test_real_gates_refuse_nano_and_leave_nothing_behind(double, nano_folder, llm):
    small = di.RuntimeConfig(max_seqs=1, max_len=32)
    with pytest.raises(native_ascend.AscendError, match=r"head dimension \d+ \(9.1\)"):
        di.LLM(llm.model, runtime=small).engine  # noqa: B018


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"determinism": "batch"}, di.ConfigError, "cannot be held .D0.: no CANN operator"),
        ({"numerics": "float32"}, di.ConfigError, 'numerics="checkpoint"'),
        ({"mesh": {"dp": 1}}, di.ConfigError, "leave mesh out"),
        ({"engram": "host"}, di.ConfigError, 'engram="device"'),
        ({"kernels": {"rms_norm_quant": "ascend"}}, di.KernelSelectionError, "whole network"),
        (
            {"kernels": {"network": "ascend", "rms_norm_quant": "xla"}},
            di.KernelSelectionError,
            "alone",
        ),
    ],
)
def test_load_refuses_what_the_bridge_cannot_do(runtime, nano_folder, options, error, text):
    with pytest.raises(error, match=text):
        ascend(nano_folder, **options)


def test_fp4_rows_are_refused_at_load(runtime):
    with pytest.raises(native_ascend.AscendUnsupported, match="gap 6") as failure:
        ascend("nano")
    assert isinstance(failure.value, di.DeepInferError)


def test_a_mapping_may_name_the_network(runtime, nano_folder):
    model = ascend(nano_folder, kernels={"network": "ascend"})
    assert model.config.execution.kernels == (("network", "ascend"),)
    assert (model.config.draft, model.params.draft, model.draft_temperatures) == (None,) * 3


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"drafting": True}, di.ConfigError, "drafting.*received True"),
        ({"replay": "mask"}, di.ConfigError, "replay.*received 'mask'"),
        ({"cache_bytes": 10**9}, di.ConfigError, "cache_bytes.*max_seqs times max_len"),
        ({"max_len": 1025}, native_ascend.AscendUnsupported, r"candidate blocks \(gap 20\)"),
    ],
)
def test_the_engine_refuses_what_the_bridge_cannot_do(llm, options, error, text):
    with pytest.raises(error, match=text) as failure:
        di.Engine(llm.model, di.RuntimeConfig(**options))
    assert isinstance(failure.value, di.DeepInferError)


def test_images_and_functions_of_arrays_are_refused(llm):
    with pytest.raises(di.InputError, match="text alone"):
        llm.generate("Mara", images=[np.zeros((8, 8, 3), np.uint8)])
    for function in (di.score, di.hidden_states):
        with pytest.raises(di.ConfigError, match="through LLM and the engine alone"):
            function(llm.model.params, llm.model.config, [1, 2, 3])


def test_an_unverified_device_is_refused_at_load(runtime, nano_folder, monkeypatch):
    """As on hardware: the double's table with the word double taken away."""
    monkeypatch.delenv("DEEPINFER_ASCEND_ALLOW_UNVERIFIED", raising=False)
    monkeypatch.setattr(loaded_runtime, "_loaded", dataclasses.replace(runtime, is_double=False))
    with pytest.raises(native_ascend.AscendUnverified, match="never ran on Ascend") as failure:
        ascend(nano_folder)
    assert isinstance(failure.value, di.DeepInferError)
