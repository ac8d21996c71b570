"""Offline jobs: what is in an answer, and that kills neither lose, repeat nor change one."""

import json
import random
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

import deepinfer_jax as di
from deepinfer_jax.jobs import run as jobs
from deepinfer_jax.jobs.lines import line_seed
from deepinfer_jax.jobs.run import run_job
from deepinfer_jax.jobs.store import open_output, read_facts
from tests.golden.network import TINY

RUNTIME: dict[str, Any] = {
    "max_seqs": 4,
    "max_len": 128,
    "max_tokens_per_step": 32,
    "block_tokens": 16,
}
PARAMS = di.SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=5)
FLAGS = ["--temperature=1", "--max-tokens=6", "--ignore-eos", "--seed=5", "--numerics=float32"]
FLAGS += [f"--{name.replace('_', '-')}={value}" for name, value in RUNTIME.items()]

# Kills itself inside its n-th write, half of which is on the disk then.
DRIVER = """
import os, signal, sys
from deepinfer_jax.cli.main import main
left, write = int(sys.argv[1]), os.write
def kill_in_write(descriptor, data):
    global left
    left -= 1
    if left:
        return write(descriptor, data)
    write(descriptor, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
os.write = kill_in_write
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def llm():
    return di.LLM(TINY, numerics="float32", runtime=di.RuntimeConfig(**RUNTIME))


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def prompts(count, seed):
    """Lines of all kinds: texts, ids, shared beginnings, lengths and seeds of their own."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 400) for _ in range(40)]
    for number in range(count):
        if number % 3 == 0:
            yield {"prompt": f"line {number}", "id": f"n{number}"}
        elif number % 3 == 1:
            yield {"token_ids": [*shared, 5 + number % 300], "max_tokens": rng.randint(1, 8)}
        else:
            ids = [rng.randrange(5, 400) for _ in range(rng.randint(1, 30))]
            yield {"token_ids": ids, "n": 1 + number % 2, "logprobs": 1, "presence_penalty": 0.5}


def answers(path):
    """Returns line number -> text of its answer; asserts that none is there twice."""
    found = {}
    for text in path.read_text(encoding="ascii").splitlines():
        number = json.loads(text)["line"]
        assert number not in found
        found[number] = text
    return found


def start(arguments, source, target):
    """Starts the command in a process of its own."""
    job = ["generate", "--input", str(source), "--output", str(target), "--model", str(TINY)]
    words = [sys.executable, *arguments, *job, *FLAGS]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def test_answers_say_what_was_asked(llm, files):
    source, target = files
    hello = {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
    given = [
        {"prompt": "one", "id": "a", "seed": 9},
        {"token_ids": [5, 6, 7], "n": 2, "logprobs": 2, "id": 3},
        hello | {"max_tokens": 4, "logprobs": 0},
        {"token_ids": [5, 6, 7], "max_tokens": 0, "prompt_logprobs": 1},
    ]
    write_lines(source, given)
    state = run_job(llm, source, target, PARAMS)
    assert (state.total, state.before, state.done, state.failed) == (4, 0, 4, 0)
    found = {n: json.loads(text) for n, text in answers(target).items()}
    params = di.SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=9)
    ids = [llm.model.config.bos_token_id, *llm.encode("one")]
    (one,) = llm.generate([ids], params, progress=False)
    assert found[1]["token_ids"] == list(one.token_ids)
    assert (found[1]["id"], found[1]["seed"], found[1]["text"]) == ("a", 9, one.text)
    assert found[1]["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 6}
    two = found[2]
    assert (two["id"], two["seed"], len(two["outputs"])) == (3, line_seed(5, 2), 2)
    assert [len(o["logprobs"]) for o in two["outputs"]] == [6, 6]
    assert [len(row) for row in two["outputs"][1]["top_logprobs"]] == [2] * 6
    assert found[3]["message"] == {"role": "assistant", "content": found[3]["text"]}
    assert len(found[3]["logprobs"]) == len(found[3]["token_ids"]) == 4
    (scored,) = llm.score([[5, 6, 7]], top_logprobs=1, progress=False)
    assert found[4]["prompt_logprobs"] == scored.logprobs.tolist()
    assert len({line_seed(s, n) for s in (0, 1, 5) for n in range(1, 200)}) == 3 * 199


def test_bad_lines_are_answered_with_an_error_and_stop_nothing(llm, files):
    source, target = files
    bad = {
        b"{": "JSON object",
        b"[1]": "got a list",
        b"\xff": "JSON object",
        b"[" * 100_000: "JSON object",
        b'{"id": 1e999, "prompt": "x"}': "id must be",
        b'{"prompt": NaN}': "NaN",
        b"{}": "exactly one of",
        b'{"prompt": "a", "token_ids": [5]}': "exactly one of",
        b'{"prompt": "\\ud800"}': "valid Unicode",
        b'{"prompt": "a", "cache_salt": "\\ud800"}': "valid Unicode",
        b'{"prompt": "a", "max_token": 1}': "did you mean 'max_tokens'",
        b'{"prompt": "a", "n": "1"}': "n must be",
        b'{"prompt": "a", "grammar": "x"}': "grammar must be",
        b'{"prompt": "a", "grammar": {"kind": "regex", "text": ""}}': "must not be empty",
        b'{"prompt": "a", "logit_bias": {"x": 1}}': "token ids, got",
        b'{"token_ids": [true]}': "list of integers",
        b'{"token_ids": [1099511627776]}': "ids of the vocabulary",
        b'{"token_ids": [512]}': "512 at position 0",
        b'{"messages": "x"}': "must be a list",
        b'{"messages": [{"role": "user", "content": "x"}], "n": 2}': "answered once",
        b'{"messages": [{"role": "wizard"}]}': "role",
        b'{"prompt": "a", "regex": "a", "ebnf": "root ::= a"}': "one constraint at most",
        b'{"prompt": "a", "guided_json": 5}': "guided_json must be",
        b'{"prompt": "a", "guided_json": {}, "strict": 1}': "strict must be",
        b'{"prompt": "a", "regex": "a", "grammar": {"kind": "regex", "text": "a"}}': "give one",
        b'{"prompt": "a", "response_format": {"type": "json_object"}}': "response_format",
        b'{"messages": [{"role": "user", "content": "json"}], "regex": "a", "response_format":'
        b' {"type": "json_object"}, "ignore_eos": false}': "give one",
        b'{"messages": [{"role": "user", "content": "json"}], "tool_choice": "required"}': "tools",
        b'{"prompt": "%s"}' % (b"a" * 5000): "at most",
    }
    good = b'{"prompt": "a", "id": "good"}'
    lines = [good, b"", b"  ", *bad, b'{"id": "named", "prompt": 5}', good]
    source.write_bytes(b"\n".join(lines))  # without an end of the last line
    state = run_job(llm, source, target, PARAMS)
    found = {n: json.loads(text) for n, text in answers(target).items()}
    assert (state.total, state.done, state.failed) == (len(bad) + 3, len(bad) + 3, len(bad) + 1)
    for number, complaint in enumerate(bad.values(), 4):
        assert complaint in found[number]["error"]["message"], found[number]
    assert [n for n, record in found.items() if record["id"] == "good"] == [1, len(lines)]
    assert found[len(lines) - 1]["id"] == "named"


FORM = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_constraints_have_the_names_of_the_server(files):
    source, target = files
    runtime = di.RuntimeConfig(**RUNTIME | {"max_len": 1024, "max_tokens_per_step": 128})
    llm = di.LLM(TINY, numerics="float32", runtime=runtime)
    ask = {"messages": [{"role": "user", "content": "json"}], "max_tokens": 400}
    ask |= {"thinking": {"type": "disabled"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": FORM}}]
    given = [
        {"prompt": "a", "structured_outputs": {"choice": ["red", "blue"]}},
        {"prompt": "a", "guided_json": FORM, "max_tokens": 400},
        {"token_ids": [5], "so_args": {"schema_type": "regex", "schema": "[ab]{3}"}},
        ask | {"response_format": {"type": "json_schema",
                                   "json_schema": {"name": "x", "schema": FORM}}},
        ask | {"regex": "[0-9]{4}"},
        ask | {"tools": tools, "tool_choice": "required"},
        {"prompt": "a", "json_schema": FORM | {"if": {}}, "strict": False, "max_tokens": 400},
    ]  # fmt: skip
    write_lines(source, given)
    params = di.SamplingParams(temperature=1.0, seed=5, max_tokens=20)
    assert run_job(llm, source, target, params).failed == 0
    found = {n: json.loads(text) for n, text in answers(target).items()}
    reasons = {n: record["finish_reason"] for n, record in found.items()}
    reasons.pop(6)  # random weights call again and again
    assert set(reasons.values()) == {"stop"}, reasons
    assert found[1]["text"] in ("red", "blue")
    for number in (2, 4, 7):
        assert json.loads(found[number]["text"])["n"] in (1, 2)
    assert set(found[3]["text"]) <= set("ab")
    assert found[5]["text"].isdigit()
    (call, *_) = found[6]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
    assert "if" in found[7]["warnings"][0]
    assert "warnings" not in found[2]


def test_the_same_command_again_does_nothing_and_leaves_the_seed(llm, files):
    source, target = files
    write_lines(source, [{"prompt": "a"}, {"prompt": "b"}])
    unseeded = di.SamplingParams(max_tokens=2)
    first = run_job(llm, source, target, unseeded)
    before = target.read_bytes()
    again = run_job(llm, source, target, unseeded)
    assert target.read_bytes() == before
    assert (again.before, again.done, again.seed) == (2, 2, first.seed)


def test_lines_are_read_a_little_ahead(llm, files, monkeypatch):
    source, target = files
    write_lines(source, prompts(60, 1))
    taken, widest = 0, 0

    def counted(path, read=jobs.read_lines):
        nonlocal taken
        for line in read(path):
            taken += 1
            yield line

    def watch(state, engine):
        nonlocal widest
        widest = max(widest, taken - state.done)

    monkeypatch.setattr(jobs, "read_lines", counted)
    assert run_job(llm, source, target, PARAMS, report=watch).done == 60
    assert RUNTIME["max_seqs"] < widest <= 2 * RUNTIME["max_seqs"]


def test_an_interrupted_run_leaves_a_clean_engine(llm, files):
    source, target = files
    write_lines(source, prompts(12, 2))

    def interrupt(state, engine):
        if state.done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(llm, source, target, PARAMS, report=interrupt)
    llm.engine.drain()
    assert llm.stats().cache.referenced == 0
    cut = target.read_bytes()
    assert run_job(llm, source, target, PARAMS).done == 12
    assert target.read_bytes().startswith(cut)
    whole = target.with_name("whole.jsonl")
    run_job(llm, source, whole, PARAMS)
    assert answers(target) == answers(whole)


def test_another_job_is_refused(llm, files, tmp_path):
    source, target = files
    write_lines(source, [{"prompt": "a"}])
    run_job(llm, source, target, PARAMS)

    def refused(message, source=source, target=target, **changed):
        params = di.SamplingParams(**{"temperature": 1.0, "max_tokens": 6, "ignore_eos": True,
                                      "seed": 5} | changed)  # fmt: skip
        with pytest.raises(di.InputError, match=message):
            run_job(llm, source, target, params)

    before = target.read_bytes()
    refused("max_tokens was 6 and is 7", max_tokens=7)
    refused("seed was 5 and is 6", seed=6)
    refused("logprobs was None and is 1", logprobs=1)
    other = tmp_path / "other.jsonl"
    write_lines(other, [{"prompt": "b"}])
    refused("another input", source=other)
    refused("another file than the input", target=source)
    refused("choose another output", target=other)
    refused("readable file", source=tmp_path / "none")
    refused("writable file", target=tmp_path)
    assert target.read_bytes() == before


def test_one_writer_at_a_time(files):
    source, target = files
    write_lines(source, [{"prompt": "a"}])
    facts = read_facts(source)
    with (
        open_output(target, facts, {}, 1),
        pytest.raises(di.InputError, match="another process"),
        open_output(target, facts, {}, 1),
    ):
        pass
    with open_output(target, facts, {}, 2) as output:  # nothing was answered: begins anew
        assert (output.done, output.seed) == (0, 2)


def test_a_torn_line_is_cut_off_and_a_damaged_file_is_refused(files):
    source, target = files
    write_lines(source, [{"prompt": "a"}] * 3)
    facts = read_facts(source)
    with open_output(target, facts, {}, 1) as output:
        output.append([{"line": 2}])
        assert (output.done, output.has(2), output.has(1)) == (1, True, False)
    whole = target.read_bytes()
    for torn in (b'{"line": 3', b"\0" * 10):
        target.write_bytes(whole + torn)
        with open_output(target, facts, {}, None) as output:
            assert (output.done, output.has(3), output.seed) == (1, False, 1)
        assert target.read_bytes() == whole
    for damage in (b"{}\n", b"x\n", b'{"line": 4}\n', b'{"line": 2}\n', b'{"line": "1"}\n'):
        target.write_bytes(whole + damage)
        with pytest.raises(di.InputError, match="line 2 of"), open_output(target, facts, {}, 1):
            pass
        assert target.read_bytes() == whole + damage


@pytest.mark.accept(5)
def test_two_kills_inside_a_write_change_nothing(llm, files):
    source, target = files
    write_lines(source, prompts(24, 3))
    for writes in (3, 5):
        process = start(["-c", DRIVER, str(writes)], source, target)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        assert not target.read_bytes().endswith(b"\n")
    state = run_job(llm, source, target, PARAMS)  # the same options as the command's
    assert 0 < state.before < state.done == 24
    whole = target.with_name("whole.jsonl")
    run_job(llm, source, whole, PARAMS)
    assert answers(target) == answers(whole)
    assert len(answers(whole)) == 24


@pytest.mark.slow
@pytest.mark.accept(5)
def test_ten_kills_at_random_moments_change_nothing(llm, files):
    source, target = files
    write_lines(source, prompts(300, 4))
    whole = target.with_name("whole.jsonl")
    begun = start(["-m", "deepinfer_jax.cli.main"], source, whole)
    _, errors = begun.communicate()
    assert begun.returncode == 0, errors
    size = whole.stat().st_size
    rng = random.Random(6)
    for number in range(10):
        wanted = (number + rng.random()) / 10.5 * size
        process = start(["-m", "deepinfer_jax.cli.main"], source, target)
        while process.poll() is None and (not target.exists() or target.stat().st_size < wanted):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        print(f"killed at {target.stat().st_size} of {size} bytes")
    state = run_job(llm, source, target, PARAMS)
    print(f"{state.before} lines were answered before the last run, of {state.total}")
    assert state.before < state.done == 300
    assert answers(target) == answers(whole)
    assert len(answers(whole)) == 300
