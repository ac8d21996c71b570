"""`generate` and `score` on the command line, on a loaded tiny model."""

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.cli import generate as command
from deepinfer_jax.cli import main as cli
from deepinfer_jax.cli import options
from tests.golden.ledger import Fixture
from tests.golden.network import TINY

RUNTIME: dict[str, Any] = {
    "max_seqs": 4,
    "max_len": 128,
    "max_tokens_per_step": 32,
    "block_tokens": 16,
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in RUNTIME.items()]
SEEDED = ["--temperature=1", "--max-tokens=6", "--ignore-eos", "--seed=5"]


@pytest.fixture(scope="module")
def llm():
    return di.LLM(TINY, numerics="float32", runtime=di.RuntimeConfig(**RUNTIME))


@pytest.fixture
def run(llm, monkeypatch, capsys):
    def call(*arguments, code=0):
        monkeypatch.setattr(command, "load_with_bar", lambda *_, **__: llm.model)
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, *FLAGS, "--model", str(TINY)])
        written = capsys.readouterr()
        assert stop.value.code == code, written.err
        return written.out, written.err

    return call


def complete(llm, text, **changed):
    given = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "seed": 5} | changed
    ids = [llm.model.config.bos_token_id, *llm.encode(text)]
    return llm.generate([ids], di.SamplingParams(**given), progress=False)[0]


def test_text_goes_to_stdout_alone(run, llm):
    out, err = run("generate", "one", *SEEDED)
    assert out == complete(llm, "one").text + "\n"
    assert "6 tokens in" in err
    assert "seed 5" in err
    out, err = run("generate", "one", *SEEDED, "--n=2")
    assert out == "".join(one.text + "\n" for one in complete(llm, "one", n=2).outputs)
    assert "2 of 2, finish: length" in err


def test_flags_are_fields_of_the_request(run, llm):
    flags = [
        "--stop-token-ids=7",
        "--stop-token-ids=8",
        "--logit-bias=9=3.5",
        "--logit-bias=5=-100",
    ]
    flags += ["--presence-penalty=0.5", "--top-k=50", "--min-tokens=2", "--logprobs=1", "--json"]
    out, _ = run("generate", "one", *SEEDED, *flags)
    found = json.loads(out)
    expected = complete(
        llm, "one", stop_token_ids=(7, 8), logit_bias={9: 3.5, 5: -100.0}, presence_penalty=0.5,
        top_k=50, min_tokens=2, logprobs=1,
    )  # fmt: skip
    assert found["token_ids"] == list(expected.token_ids)
    assert found["logprobs"] == expected.logprobs.tolist()
    assert found["seed"] == 5
    assert found["usage"]["completion_tokens"] == len(expected.token_ids)


def test_every_flag_is_a_field_with_its_default():
    for names, record, kind in (
        (options.SAMPLING, options.sampling_params, di.SamplingParams),
        (options.RUNTIME, options.runtime_config, di.RuntimeConfig),
    ):
        assert names.keys() <= {field.name for field in fields(kind)}
        assert record({}) == kind()
    given = {"stop": [], "allowed_token_ids": [], "logit_bias": [], "bad_words": ["x"]}
    assert options.sampling_params(given) == di.SamplingParams(bad_words=("x",))


def test_stats_profile_and_trace(run, tmp_path):
    profile, trace = tmp_path / "profile", tmp_path / "trace.json"
    out, err = run(
        "generate", "one", *SEEDED, "--stats", f"--profile={profile}", f"--trace={trace}"
    )
    assert out.count("\n") == 1
    assert "deepinfer_tokens_total 6" in err
    assert list(profile.rglob("*.xplane.pb"))
    for path in (trace, profile / "engine_trace.json"):
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert {"plan", "dispatch", "wait", "commit"} <= names


def test_a_job_and_its_continuation(run, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "one", "id": "x"}\n{"prompt": 1}\n')
    job = ["generate", f"--input={source}", f"--output={target}", *SEEDED]
    out, err = run(*job)
    assert out == ""
    assert "0 of 2 lines answered, seed 5" in err
    assert "2 of 2 lines answered, 2 now, 1 of them with errors" in err
    _, err = run(*job)
    assert "2 of 2 lines answered, 0 now" in err
    _, err = run(*job, "--top-k=5", code=2)
    assert "top_k was -1 and is 5" in err


def test_an_interrupted_job_says_how_to_go_on(run, monkeypatch, tmp_path):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepinfer_jax.jobs.run.run_job", interrupt)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "one"}\n')
    _, err = run("generate", f"--input={source}", f"--output={tmp_path / 'out'}", code=130)
    assert "the same command continues" in err


def test_score_of_a_text_and_of_a_file(run, llm, tmp_path):
    out, _ = run("score", "one", "--top-logprobs=2")
    found, bos = json.loads(out), llm.model.config.bos_token_id
    (expected,) = llm.score([[bos, *llm.encode("one")]], top_logprobs=2, progress=False)
    assert found["token_ids"] == list(expected.prompt_token_ids)
    assert found["logprobs"] == expected.logprobs.tolist()
    assert [len(row) for row in found["top_logprobs"]] == [2] * len(expected.logprobs)
    assert found["total"] == pytest.approx(float(expected.logprobs.sum()))
    lines = [{"prompt": "one"}, {"token_ids": [5]}, {"prompt": "one", "n": 2}, {"prompt": 1}]
    lines += [{"token_ids": [5, 6 + i], "id": i} for i in range(5)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    out, _ = run("score", f"--input={path}")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["line"] for record in records] == list(range(1, 10))
    assert records[0]["logprobs"] == found["logprobs"]
    assert "top_logprobs" not in records[0]
    assert (records[1]["logprobs"], records[1]["total"]) == ([], 0)
    assert "take no sampling parameters, got ['n']" in records[2]["error"]["message"]
    assert "prompt must be a text" in records[3]["error"]["message"]
    assert [record["id"] for record in records[4:]] == list(range(5))


@pytest.mark.accept(11)
def test_answers_are_those_of_the_golden_files(run, tmp_path):
    """tiny_v41 in float32, whose logits and greedy tokens after prompt B the fixture holds."""
    golden = Fixture("tiny_v41/golden_f32").arrays
    ids = golden["B.ids"].tolist()
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"token_ids": ids}) + "\n")
    run(
        "generate", f"--input={source}", f"--output={target}", "--temperature=0",
        "--max-tokens=16", "--ignore-eos",
    )  # fmt: skip
    found = json.loads(target.read_text())["token_ids"]
    assert found == golden["greedy.tokens"].tolist()
    out, _ = run("score", f"--input={source}")
    logits = golden["B.logits_all"].astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = wanted[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(json.loads(out)["logprobs"], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate"], "PROMPT or --input"),
        (["generate", "x", "--input=a", "--output=b"], "PROMPT or --input"),
        (["generate", "--input=a"], "go together"),
        (["generate", "x", "--output=a"], "go together"),
        (["generate", f"--input={__file__}", "--output=b", "--json"], "leave --json out"),
        (["generate", "--input=no/such", "--output=b"], "must be a file"),
        (["generate", "x", "--logprobs=1"], "with --json"),
        (["generate", "x", "--logit-bias=5"], "ID=NUMBER"),
        (["generate", "x", "--top-p=0"], "top_p must be"),
        (["generate", "x", "--seed=-1"], "seed must be"),
        (["score"], "TEXT or --input"),
        (["score", "--input=no/such"], "must be a file"),
    ],
)
def test_what_cannot_be_honoured_is_one_line_and_exit_code_2(arguments, complaint, run):
    out, err = run(*arguments, code=2)
    assert out == ""
    assert complaint in err


def test_images_are_shown_with_the_prompt(run, llm, tmp_path):
    from PIL import Image

    file, text = tmp_path / "a.png", tmp_path / "a.txt"
    Image.new("RGB", (20, 28), "red").save(file)
    text.write_text("no image")
    config = llm.model.config
    token = config.image_token_id
    flags = [*SEEDED, "--json", "--image", str(file)]
    out, _ = run("generate", "one", *flags)
    found = json.loads(out)
    given = [config.bos_token_id, token, *llm.encode("one")]
    params = di.SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=5)
    (expected,) = llm.generate([given], params, images=[[file]], progress=False)
    assert found["token_ids"] == list(expected.token_ids)
    assert complete(llm, "one").token_ids != expected.token_ids
    spelling = llm.model.tokenizer.id_to_token(token)
    out, _ = run("generate", f"one{spelling}", *flags)
    (behind,) = llm.generate(
        [[config.bos_token_id, *llm.encode("one"), token]], params, images=[[file]], progress=False
    )
    assert json.loads(out)["token_ids"] == list(behind.token_ids)
    for flag, complaint in (
        (["--image", str(text)], "must be a PNG"),
        (["--image", str(tmp_path / "b.png")], "must name a file"),
    ):
        _, err = run("generate", "one", *flag, code=2)
        assert complaint in err
    _, err = run("generate", "--input", str(text), "--output", "x", "--image", str(file), code=2)
    assert "--image goes with PROMPT" in err
