"""Commands of `chat`, and tool calls whose results the user gives."""

import json

import pytest

from deepinfer_jax.cli import chat as chat_command
from deepinfer_jax.cli.talk import COMMANDS

from .test_cli import lines
from .test_conversations import ROME, SUM, call


def run(talk, monkeypatch, capsys, *given):
    lines(monkeypatch, *given)
    chat_command.repl(talk)
    return capsys.readouterr().err


def test_help_lists_every_command(talk, monkeypatch, capsys):
    written = run(talk, monkeypatch, capsys, "/help")
    assert all(name in written for name in (*COMMANDS, "/exit"))


def test_system_and_thinking_change_the_prompt(talk, monkeypatch, capsys):
    run(talk, monkeypatch, capsys, "/system Be brief.", "/think low", "one")
    first = talk.encoder.tokenizer.decode(talk.llm.prompts[0], skip_special_tokens=False)
    assert "Be brief." in first
    assert "Reasoning Effort: 50" in first
    talk.llm.ids = tuple(talk.encoder.tokenizer.encode("Yes.").ids)
    written = run(talk, monkeypatch, capsys, "/system", "/think off", "two")
    second = talk.encoder.tokenizer.decode(talk.llm.prompts[0], skip_special_tokens=False)
    assert "Be brief." not in second
    assert second.endswith("</think>")
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    assert "Thinking is off." in written


def test_a_saved_conversation_is_loaded_and_goes_on(talk, monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.json"
    written = run(
        talk, monkeypatch, capsys,
        "/system S", "one", f"/save {file}", "/clear", f"/load {file}", "two",
    )  # fmt: skip
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 2]
    assert "3 messages are loaded." in written
    assert json.loads(file.read_text())["thinking"] is True


def test_regen_answers_again_with_another_seed(talk, monkeypatch, capsys):
    run(talk, monkeypatch, capsys, "one", "/regen")
    assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["one"]
    assert talk.params.seed != 1


def test_results_of_tools_are_asked_for(talk, monkeypatch, capsys, tools, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(tools))
    texts = ["a</think>Wait." + call(ROME, SUM), "b</think>Done."]
    answers = [tuple(talk.encoder.tokenizer.encode(text).ids) for text in texts]
    original = talk.llm.stream

    def stream(prompt, params=None):
        talk.llm.ids = answers.pop(0)
        return original(prompt, params)

    monkeypatch.setattr(talk.llm, "stream", stream)
    run(talk, monkeypatch, capsys, f"/tools {file}", "go", "sunny", "3")
    roles = [m["role"] for m in talk.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    assert json.loads(talk.messages[1]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "Rome"
    }
    assert [m["content"] for m in talk.messages[2:4]] == ["sunny", "3"]
    assert talk.messages[4]["content"] == "Done."


def test_a_turn_whose_calls_get_no_result_is_forgotten(talk, monkeypatch, capsys, tools):
    talk.options["tools"] = tools
    talk.llm.ids = tuple(talk.encoder.tokenizer.encode("a</think>" + call(ROME)).ids)
    written = run(talk, monkeypatch, capsys, "go", KeyboardInterrupt)
    assert talk.messages == []
    assert "forgotten" in written


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/think maybe", "/think takes on, off or one of"),
        ("/tools nowhere.json", "readable JSON"),
        ("/load nowhere.json", "readable JSON"),
        ("/save", "the name of a file"),
        ("/regen", "there is none yet"),
        ("/what", "No command is named /what"),
    ],
)
def test_what_a_command_cannot_do_is_said(talk, line, complaint, monkeypatch, capsys):
    assert complaint in run(talk, monkeypatch, capsys, line)


def test_images_go_with_the_next_message_and_are_saved(talk, monkeypatch, capsys, tmp_path):
    from PIL import Image

    file, saved = tmp_path / "a.png", tmp_path / "talk.json"
    Image.new("RGB", (30, 20), "red").save(file)
    written = run(talk, monkeypatch, capsys, f"/image {file}", f"/image {file}", "/image", "one")
    assert "2 images go with the next message." in written
    assert "No image is attached." in written
    assert talk.llm.images == ()
    written = run(talk, monkeypatch, capsys, f"/image {tmp_path}/b.png", f"/image {file}", "two",
                  f"/save {saved}", "/clear", f"/load {saved}", "three")  # fmt: skip
    assert "must name a file" in written
    assert len(talk.llm.images) == 1  # that of the turn before, shown again
    assert talk.images == []
    assert talk.messages[2]["content"][1] == {"type": "text", "text": "two"}
    token = talk.encoder.config.image_token_id
    assert talk.llm.prompts[0].count(token) == 1
