"""`LLM`: what `generate`, `stream`, `chat` and `score` return."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.engine.detokenize import Detokenizer
from tests.e2e.lab import BASE, GREEDY, model
from tests.golden.network import TINY


@pytest.fixture(scope="module")
def llm():
    return di.LLM(model(), runtime=BASE)


def test_greedy_tokens_are_the_golden_ones(llm, fixtures_dir):
    from tests.golden.ledger import Fixture

    golden = Fixture("tiny_v41/golden_f32")
    prompt = [int(i) for i in golden.input("B.ids")]
    params = di.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (output,) = llm.generate([prompt], params, progress=False)
    assert list(output.token_ids) == [int(t) for t in golden.input("greedy.tokens")]
    assert output.finish_reason == "length"


def test_batch_and_order_do_not_change_tokens(llm):
    prompts = [[5, 6, 7], [9], list(range(20, 60)), [300, 301], [8] * 9]
    alone = [llm.generate([p], GREEDY, progress=False)[0].token_ids for p in prompts]
    together = llm.generate(prompts, GREEDY, progress=False)
    assert [o.token_ids for o in together] == alone
    assert [o.prompt_token_ids for o in together] == [tuple(p) for p in prompts]
    backwards = llm.generate(prompts[::-1], GREEDY, progress=False)
    assert [o.token_ids for o in backwards] == alone[::-1]


def test_prefill_budget_does_not_change_tokens(llm):
    prompts = [list(range(20, 60)), [9, 10, 11]]
    runtime = replace(BASE, max_tokens_per_step=24)
    cut = di.LLM(llm.model, runtime=runtime).generate(prompts, GREEDY, progress=False)
    whole = llm.generate(prompts, GREEDY, progress=False)
    assert [o.token_ids for o in cut] == [o.token_ids for o in whole]


@pytest.mark.parametrize("level", ["off", "run"])
def test_other_levels_generate_too(level, llm):
    other = di.LLM(TINY, numerics="float32", determinism=level, runtime=BASE)
    prompts = [[5, 6, 7], list(range(20, 40))]
    found = other.generate(prompts, GREEDY, progress=False)
    assert [len(o.token_ids) for o in found] == [5, 5]


def test_stream_equals_generate(llm):
    deltas = list(llm.stream("def main():", GREEDY))
    (whole,) = llm.generate("def main():", GREEDY, progress=False)
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
    assert [d.finish_reason for d in deltas] == [None] * 4 + ["length"]


def test_stop_ids_and_eos_end_without_being_listed(llm):
    (free,) = llm.generate([[5, 6, 7]], GREEDY, progress=False)
    first = free.token_ids[2]
    cut = free.token_ids.index(first)
    params = di.SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, stop_token_ids=(first,)
    )
    (output,) = llm.generate([[5, 6, 7]], params, progress=False)
    assert output.token_ids == free.token_ids[:cut]
    assert (output.finish_reason, output.stop_reason) == ("stop", first)


def test_stop_strings_may_span_tokens(llm):
    params = di.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (free,) = llm.generate("The quick brown fox", params, progress=False)
    wanted = free.text[2:5]
    cut = free.text.index(wanted)
    params = di.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(wanted,))
    (output,) = llm.generate("The quick brown fox", params, progress=False)
    assert output.text == free.text[:cut]
    assert (output.finish_reason, output.stop_reason) == ("stop", wanted)
    deltas = list(llm.stream("The quick brown fox", params))
    assert "".join(d.text for d in deltas) == output.text


def test_no_tokens_wanted_and_capacity(llm):
    none = di.SamplingParams(temperature=0, max_tokens=0)
    (output,) = llm.generate([[5, 6]], none, progress=False)
    assert (output.token_ids, output.finish_reason) == ((), "length")
    short = di.LLM(llm.model, runtime=replace(BASE, max_len=8))
    (output,) = short.generate([[5, 6, 7, 8, 9]], GREEDY, progress=False)
    assert (len(output.token_ids), output.finish_reason) == (3, "capacity")
    with pytest.raises(di.InputError, match="a sequence may have 8"):
        short.generate([list(range(8))], GREEDY, progress=False)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "at least 1"),
        ([], "at least 1"),
        ([5, 512], "512 at position 1"),
        ([502], "every image token 502 takes one row"),
        ("\ud800", "valid Unicode"),
    ],
)
def test_a_bad_prompt_fails_before_anything_runs(llm, prompt, text):
    with pytest.raises(di.InputError, match=text):
        llm.generate([[5, 6], prompt], GREEDY, progress=False)
    assert len(llm.generate([[5, 6]], GREEDY, progress=False)[0].token_ids) == 5


def test_an_empty_list_of_prompts_gives_an_empty_list(llm):
    assert llm.generate([], GREEDY, progress=False) == []


def test_a_model_takes_no_load_options(llm):
    with pytest.raises(di.InputError, match="takes no load options"):
        di.LLM(llm.model, numerics="float32")


def test_nan_logits_end_the_request_as_numerical():
    fine = model()
    broken = replace(fine, params=replace(fine.params, norm=fine.params.norm * np.nan))
    (output,) = di.LLM(broken, runtime=BASE).generate([[5, 6]], GREEDY, progress=False)
    assert (output.token_ids, output.finish_reason) == ((), "numerical")


def test_held_back_text_is_shown_at_the_end(llm):
    tokenizer = llm.model.tokenizer
    ids = tokenizer.encode("one two").ids
    text = Detokenizer(tokenizer, stop=("two three",))
    shown = [text.push(i) for i in ids]
    assert "".join(shown) == "one "
    assert text.finish() == "two"


SEEDED = di.SamplingParams(
    temperature=0.9, top_p=0.95, top_k=60, seed=11, max_tokens=8, ignore_eos=True, logprobs=2
)


def test_seeded_tokens_and_logprobs_do_not_depend_on_the_batch(llm):
    prompts = [[5, 6, 7], list(range(20, 60)), [9]]
    alone = [llm.generate([p], SEEDED, progress=False)[0] for p in prompts]
    together = llm.generate(prompts, SEEDED, progress=False)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.top_logprobs == other.top_logprobs
        assert other.seed == 11
    assert len({o.token_ids for o in together}) == 3
    another = llm.generate(prompts, replace(SEEDED, seed=12), progress=False)
    assert another[0].token_ids != together[0].token_ids


def test_logprobs_are_those_of_score(llm):
    (output,) = llm.generate([[5, 6, 7]], SEEDED, progress=False)
    ids = np.array([*output.prompt_token_ids, *output.token_ids], np.int32)
    logits = np.asarray(di.score(llm.model.params, llm.model.config, ids))[2:-1]
    expected = np.asarray(jax.nn.log_softmax(logits))
    chosen = expected[np.arange(8), list(output.token_ids)]
    np.testing.assert_allclose(output.logprobs, chosen, atol=2e-5)
    assert output.logprobs.dtype == np.float32
    for row, pairs in zip(expected, output.top_logprobs, strict=True):
        assert [token for token, _ in pairs] == list(np.argsort(-row, kind="stable")[:2])


def test_a_drawn_seed_is_reported_and_reproduces(llm):
    drawn = replace(SEEDED, seed=None, logprobs=None)
    (first,) = llm.generate([[5, 6, 7]], drawn, progress=False)
    (again,) = llm.generate([[5, 6, 7]], replace(drawn, seed=first.seed), progress=False)
    assert first.token_ids == again.token_ids
    assert first.logprobs is None


def test_requests_of_different_kinds_share_a_batch(llm):
    kinds = [GREEDY, SEEDED, replace(SEEDED, logprobs=None)]
    outputs = llm.generate([[5, 6, 7]] * 3, kinds, progress=False)
    assert outputs[0].token_ids == llm.generate([[5, 6, 7]], GREEDY, progress=False)[0].token_ids
    assert outputs[1].token_ids == outputs[2].token_ids
    assert [o.logprobs is None for o in outputs] == [True, False, True]


@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ({"grammar": "x"}, "grammar must be None or a deepinfer_jax.Grammar"),
        ({"max_draft": 9}, "max_draft must be at most"),
        ({"verify": "block"}, 'at level "batch"'),
    ],
)
def test_what_cannot_be_honoured_raises_and_is_named(llm, field, rule):
    with pytest.raises(di.InputError, match=rule):
        llm.generate([[5, 6]], replace(GREEDY, **field), progress=False)


def test_chat_of_one_and_of_several_conversations(llm):
    params = replace(GREEDY, max_tokens=6)
    hello = [{"role": "user", "content": "Hello"}]
    (alone,) = llm.chat(hello, params, progress=False, thinking=False)
    both = llm.chat(
        [[{"role": "user", "content": "Sort: 3, 1"}], hello], params, progress=False, thinking=False
    )
    assert both[1].token_ids == alone.token_ids
    deltas = list(llm.stream_chat(hello, params, thinking=False))
    assert "".join(delta.content for delta in deltas) == alone.message.content


def test_a_bad_message_is_refused_with_its_place(llm):
    with pytest.raises(di.InputError, match=r"messages\[0\]"):
        llm.chat([{"role": "wizard", "content": "x"}], GREEDY, progress=False)
