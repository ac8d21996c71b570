"""`render`, `tokenize` and `chat` on the command line."""

import io
import json

import pytest

from deepinfer_jax.cli import chat as chat_command
from deepinfer_jax.cli import main as cli
from tests.golden.ledger import FIXTURES

MESSAGES = [{"role": "developer", "content": "s"}, {"role": "user", "content": "<think>"}]


def run(capsys, *arguments):
    if "--model" not in arguments:
        arguments = (*arguments, "--model", str(FIXTURES / "tiny_v41"))
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    written = capsys.readouterr()
    return stop.value.code, written.out, written.err


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(MESSAGES), encoding="utf-8")
    return str(path)


def test_render_prints_the_prompt_and_its_ids(file, capsys, encoder):
    prompt = encoder.prepare(MESSAGES, thinking=False)
    code, out, err = run(capsys, "render", file, "--no-thinking")
    assert (code, out) == (0, encoder.render(prompt.conversation).text + "\n")
    assert err == ""
    code, out, _ = run(capsys, "render", file, "--no-thinking", "--ids")
    assert json.loads(out) == list(prompt.token_ids)


def test_render_takes_a_body_and_the_command_line_wins(capsys, encoder, monkeypatch):
    body = {"messages": MESSAGES, "reasoning_effort": "max", "temperature": 0.5}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(body)))
    code, out, _ = run(capsys, "render", "-")
    assert code == 0
    assert "Reasoning Effort: 100" in out
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(body)))
    _, out, _ = run(capsys, "render", "-", "--effort", "low")
    assert "Reasoning Effort: 50" in out
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(body)))
    _, out, _ = run(capsys, "render", "-", "--no-thinking")
    assert "Reasoning Effort" not in out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "readable JSON"), ('{"messages": [], "top_k": 1}', "top_k"), ("[]", "at least one")],
)
def test_render_refuses_what_is_no_conversation(text, complaint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code, _, err = run(capsys, "render", "-")
    assert code == 2
    assert complaint in err


def test_tokenize_and_back(capsys, monkeypatch):
    code, out, _ = run(capsys, "tokenize", "hi <think>é")
    assert (code, json.loads(out)) == (0, [74, 75, 223, 495, 130, 105])
    _, text, _ = run(capsys, "tokenize", "--decode", out)
    assert text == "hi <think>é\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    _, out, _ = run(capsys, "tokenize", "--pieces")
    assert out == '74\t"h"\n75\t"i"\n'


def test_ids_of_the_embedded_model_are_named_as_such(capsys):
    code, out, err = run(capsys, "tokenize", "hi", "--model", "nano")
    assert (code, len(json.loads(out)) > 0) == (0, True)
    assert "ids of nano" in err
    _, text, _ = run(capsys, "tokenize", "--decode", out, "--model", "nano")
    assert text == "hi\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--decode", "1 x"], "takes integers"),
        (["--decode", "512"], r"0..511, got [512]"),
        (["hi", "--decode", "1"], "got both"),
        (["hi", "--model", "no/such/folder"], "none of them"),
    ],
)
def test_tokenize_refuses(arguments, complaint, capsys):
    code, _, err = run(capsys, "tokenize", *arguments)
    assert code == (3 if "--model" in arguments else 2)
    assert complaint in err


def lines(monkeypatch, *given):
    remaining = iter(given)

    def read(prompt):
        line = next(remaining, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_repl_keeps_turns_and_resets(talk, monkeypatch, capsys):
    lines(monkeypatch, "one", "", "two", "/what", "/reset", "three", "/exit", "four")
    talk.reset("S")
    chat_command.repl(talk)
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    assert talk.messages[1]["content"] == "three"
    assert talk.messages[2]["reasoning_content"] == "why"
    written = capsys.readouterr()
    assert written.out == "Yes\x1b[2J.\n" * 3  # a pipe gets the text itself
    assert "why" in written.err
    assert "No command is named /what" in written.err
    assert "finish: stop, seed 1" in written.err


def test_repl_on_a_terminal_shows_reasoning_and_no_control_codes(talk, monkeypatch, capsys):
    talk.is_interactive = True
    lines(monkeypatch, "one")
    chat_command.repl(talk)
    assert capsys.readouterr().out == "why\n\nYes\ufffd[2J.\n"


def test_interrupted_or_refused_turn_is_forgotten(talk, monkeypatch, capsys):
    from deepinfer_jax.errors import InputError

    def fail(error):
        def stream(prompt, params=None):
            raise error
            yield

        return stream

    for error, shown in ((KeyboardInterrupt(), "Stopped"), (InputError("too long"), "too long")):
        talk.llm.stream = fail(error)
        lines(monkeypatch, "one", KeyboardInterrupt)
        chat_command.repl(talk)
        assert talk.messages == []
        assert shown in capsys.readouterr().err


def test_one_message_from_a_pipe(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    options = ["--no-thinking", "--max-tokens", "3", "--seed", "1", "--numerics", "float32"]
    code, out, err = run(capsys, "chat", *options)
    assert code == 0
    assert out.endswith("\n")
    assert "finish: " in err
    assert "nano" not in err


@pytest.mark.parametrize(
    ("stdin", "arguments", "complaint"),
    [
        (" \n", [], "it is empty"),
        ("hi", ["--effort", "huge"], "reasoning_effort must be one of"),
        ("hi", ["--effort", "low", "--no-thinking"], "None without thinking"),
        ("hi", ["--top-p", "2"], "top_p must be"),
    ],
)
def test_chat_refuses_before_it_loads_anything(stdin, arguments, complaint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    monkeypatch.setattr("deepinfer_jax.loading.load", None)
    code, _, err = run(capsys, "chat", *arguments)
    assert code == 2
    assert complaint in err
