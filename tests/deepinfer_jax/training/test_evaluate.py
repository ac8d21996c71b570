"""Evaluation: which items, how they run, how they are judged; the command and the demo prompts."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from benchmarks import demo_prompts
from deepinfer_jax.cli.main import main
from deepinfer_jax.engine.output import Completion, RequestMetrics, RequestOutput
from deepinfer_jax.training import evaluate
from deepinfer_jax.training.corpus import expected_text, full_text
from deepinfer_jax.training.corpus.template import EOS
from tests.golden.network import TINY


@pytest.fixture(scope="module")
def model():
    return di.load(TINY, numerics="float32")


def output(text, tokens=3):
    done = Completion(
        text=text,
        token_ids=tuple(range(tokens)),
        logprobs=None,
        top_logprobs=None,
        finish_reason="stop",
        stop_reason=None,
    )
    metrics = RequestMetrics(first_token_s=0.0, total_s=0.0)
    return RequestOutput(
        request_id="0", prompt_token_ids=(5,), outputs=(done,), seed=0, metrics=metrics
    )


def test_rows_are_chosen_by_name_and_by_task():
    def names(*given):
        return [row.name for row in evaluate.choose_rows(given)]

    assert [row.name for row in evaluate.choose_rows(None)] == list(evaluate.NAMES)
    assert names("addition") == ["addition"]
    assert names("arithmetic") == ["arithmetic", "arithmetic-thinking", "addition"]
    assert names("loops", "needle") == ["needle-1k", "needle-4k", "needle-8k", "loops"]
    assert names("story") == ["story"]
    assert {row.count for row in evaluate.choose_rows(None, 3)} == {3}


@pytest.mark.parametrize("names", [(), ("sums",), ("story", "")])
def test_an_unknown_row_is_an_error_that_lists_the_rows(names):
    with pytest.raises(di.ConfigError, match="needle-1k"):
        evaluate.choose_rows(names)


def test_a_row_needs_an_item():
    with pytest.raises(di.ConfigError, match="at least 1"):
        evaluate.choose_rows(None, 0)


def test_every_task_has_a_row_and_no_item_comes_twice():
    from deepinfer_jax.training.corpus import TASKS

    rows = (*evaluate.ROWS, evaluate.LOOPS, evaluate.PERPLEXITY)
    assert {row.task for row in evaluate.ROWS} == set(TASKS)
    judged = sum(row.count for row in evaluate.ROWS)
    assert judged >= 200
    keys = [item.key for row in rows for item in evaluate.row_items(replace(row, count=9), 0)]
    # Needle items of other lengths share places in the stream, and are other texts.
    assert len(set(keys)) == len(keys) - 2 * 9
    assert all(key.startswith("test/") for key in keys)


def test_additions_are_sums_and_items_follow_the_seed():
    (row,) = evaluate.choose_rows(["addition"], 20)
    found = evaluate.row_items(row, 0)
    assert {item.meta["sign"] for item in found} == {"+"}
    assert found == evaluate.row_items(row, 0)
    assert found != evaluate.row_items(row, 1)


@pytest.mark.parametrize("longest", [4096, 8192])
def test_groups_hold_every_place_once_and_fit(longest):
    lengths = [*np.random.default_rng(0).integers(1, 4000, 100).tolist(), longest, 512, 513]
    groups = evaluate.length_groups(lengths, longest)
    assert sorted(place for places in groups.values() for place in places) == list(range(103))
    assert list(groups) == sorted(groups, reverse=True)
    for max_len, places in groups.items():
        assert max_len == longest or max_len.bit_count() == 1
        assert all(max_len // 2 < lengths[place] <= max_len for place in places if max_len > 512)
    assert 100 in groups[longest]
    assert (101 in groups[512], 102 in groups[1024]) == (True, True)


def test_the_expected_text_is_correct_and_another_is_not(model):
    llm = di.LLM(model)
    for row in evaluate.ROWS:
        for trial in evaluate.make_trials(llm, replace(row, count=4), 0):
            wanted = expected_text(trial.item).removesuffix(EOS)
            right = evaluate.judge(trial, output(wanted))
            assert right.correct, trial.item.key
            assert right.calls_valid in (None, True)
            assert (right.row, right.tokens) == (row.name, 3)
            wrong = evaluate.judge(trial, output("No such answer."))
            assert not wrong.correct, trial.item.key
            assert wrong.calls_valid in (None, False)
            has_call = bool(trial.item.messages and trial.item.messages[-1].calls)
            assert (right.calls_valid is not None) == (row.task == "tool_call" and has_call)


def test_a_loop_is_a_sentence_written_three_times(model):
    (trial,) = evaluate.make_trials(di.LLM(model), replace(evaluate.LOOPS, count=1), 0)
    assert (trial.params.temperature, trial.params.max_tokens) == (0.7, 200)
    assert evaluate.judge(trial, output(" It rains." * 2)).correct
    assert not evaluate.judge(trial, output(" It rains." * 3)).correct


@pytest.mark.slow
def test_answers_stand_in_order_and_do_not_depend_on_workers(model):
    llm = di.LLM(model, runtime=evaluate.runtime_for(evaluate.SHORTEST))
    rows = [replace(row, max_tokens=6) for row in evaluate.choose_rows(["talk", "list"], 3)]
    loops = replace(evaluate.LOOPS, count=2, max_tokens=6)
    trials = [t for row in (*rows, loops) for t in evaluate.make_trials(llm, row, 0)]
    seen: list[int] = []
    answers = evaluate.run_trials(model, trials, report=seen.append)
    assert sum(seen) == len(trials)
    assert max(t.length for t in trials) <= evaluate.SHORTEST  # one program for everything here
    assert answers == evaluate.run_trials(model, trials, workers=2)
    alone = [llm.generate([list(t.prompt_ids)], t.params, progress=False)[0] for t in trials]
    assert answers == [evaluate.judge(t, one) for t, one in zip(trials, alone, strict=True)]


def answer(key, *, correct, row="list", tokens=2, is_sampled=False, calls_valid=None):
    return evaluate.Answer(
        row=row,
        key=key,
        text="",
        tokens=tokens,
        finish_reason="stop",
        is_sampled=is_sampled,
        correct=correct,
        calls_valid=calls_valid,
    )


def test_summary_counts_by_row():
    found = evaluate.summarise(
        [
            answer("a", correct=True, row="tool_call", tokens=4, calls_valid=True),
            answer("b", correct=True),
            answer("c", correct=False, row="tool_call", tokens=6, calls_valid=False),
            answer("d", correct=False, row="tool_call", tokens=2),
        ]
    )
    assert [(r.name, r.count, r.correct, r.mean_tokens) for r in found] == [
        ("tool_call", 3, 1, 4.0),
        ("list", 1, 1, 2.0),
    ]
    assert (found[0].calls, found[0].valid_calls, found[0].rate) == (2, 1, pytest.approx(1 / 3))


def test_flips_are_changed_verdicts_of_greedy_answers():
    first = [answer("a", correct=True), answer("b", correct=False), answer("c", correct=True)]
    first.append(answer("d", correct=True, row="story", is_sampled=True))
    other = [replace(a, correct=a.key == "a", text="other") for a in first]
    assert [(a.key, b.text) for a, b in evaluate.flips(first, other)] == [("c", "other")]
    with pytest.raises(ValueError, match="same items"):
        evaluate.flips(first, other[::-1])


@pytest.mark.slow
def test_perplexity_is_that_of_unpadded_stories(model):
    row = replace(evaluate.PERPLEXITY, count=2)
    found = evaluate.story_perplexity(model, row, 0)
    llm, losses, characters = di.LLM(model), [], 0
    for item in evaluate.row_items(row, 0):
        ids = llm.encode(full_text(item))
        logits = di.score(model.params, model.config, jnp.asarray(ids, jnp.int32))
        logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
        losses += [-logprobs[i, ids[i + 1]] for i in range(len(ids) - 1)]
        characters += len(item.prompt + item.answer)
    assert (found.stories, found.tokens) == (2, len(losses))
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)
    assert found.bits_per_character == pytest.approx(
        np.sum(losses) / np.log(2) / characters, rel=1e-6
    )


@pytest.mark.accept(4)
@pytest.mark.slow
def test_command_prints_a_table_and_writes_the_record(tmp_path, capsys):
    path = tmp_path / "eval.json"
    options = ["--tasks", "addition,perplexity", "--n", "2", "--seed", "5", "--json", str(path)]
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(TINY), *options, "--compare", "float32"])
    assert not stop.value.code
    written = capsys.readouterr()
    lines = [line.split() for line in written.out.splitlines()]
    assert ["addition", "2", "0", "0.0"] in [line[:4] for line in lines]
    assert {"perplexity", "flips"} <= {line[0] for line in lines if line}
    record = json.loads(path.read_text())
    assert (record["numerics"], record["seed"], record["split"]) == ("checkpoint", 5, "test")
    assert [(row["name"], row["count"]) for row in record["rows"]] == [("addition", 2)]
    assert record["perplexity"]["perplexity"] > 1
    assert (record["compare"]["items"], record["compare"]["flips"]) == (2, [])
    assert [a["key"].split("/")[1:3] for a in record["answers"]] == [["arithmetic", "5"]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "sums"], "addition"),
        (["--compare", "checkpoint"], "other arithmetic"),
        (["--json", "/no/such/folder/x.json"], "existing folder"),
    ],
)
def test_command_says_what_is_wrong_before_it_loads(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("deepinfer_jax.loading.load", None)
    with pytest.raises(SystemExit) as stop:
        main(["eval", "nano", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_demo_prompts_are_counted(capsys):
    demo_prompts.main(["--model", str(TINY), "--seeds", "1"])
    *lines, total = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["row"] for line in lines] == ["story", "extraction"]
    assert total["prompts"] == 2
    assert total["passed"] == sum(line["correct"] for line in lines)
