"""Ten conversations of several turns: what the model wrote comes back byte for byte (H7)."""

import pytest

from deepinfer_jax.chat.parse import parse_ids

BAR = "\uff5c"
EOS = f"<{BAR}end\u2581of\u2581sentence{BAR}>"
USER, ASSISTANT = f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>"


def call(*invocations):
    """A block of tool calls as the model writes it; values are (is text, spelling)."""
    lines = []
    for name, arguments in invocations:
        lines.append(f'<{BAR}DSML{BAR} invoke name="{name}">')
        if not arguments:
            lines.append("")  # so the prompt format has it
        for key, (is_text, value) in arguments.items():
            kind = "true" if is_text else "false"
            lines.append(
                f'<{BAR}DSML{BAR} parameter name="{key}" string="{kind}">{value}'
                f"</{BAR}DSML{BAR} parameter>"
            )
        lines.append(f"</{BAR}DSML{BAR} invoke>")
    body = "\n".join(lines)
    return f"\n\n<{BAR}DSML{BAR} calls>\n{body}\n</{BAR}DSML{BAR} calls>"


ROME = ("get_weather", {"city": (True, "Rome")})
SAO = ("get_weather", {"city": (True, 'S\u00e3o "P" </div>\n\u5317\u4eac')})
SUM = ("add", {"x": (False, "1"), "y": (False, '{"a": [1, 2.5, null]}')})
EMPTY = ("add", {})
# Turns: a text of the user, or results of tools; then what the model writes.
TALKS = {
    "two turns": (False, True, ["hi", "why</think>Hello!", "more", "again</think>Bye."]),
    "no thinking": (False, False, ["hi", "Hello!", "more", "Bye.", "and", "Really."]),
    "empty reasoning": (False, True, ["hi", "</think>Yes.", "more", "x</think>No."]),
    "scripts": (False, True, ["\u5317\u4eac \U0001f389", "\u3042</think>e\u0301\n\n- a\U0001f389"]),
    "quoted tags": (False, False, ["<think>", "Use &lt;div> or </div>.", f"{USER}", "ok"]),
    "one call": (True, True, ["go", "need it</think>Wait." + call(ROME), ["sunny"],
                              "fine</think>Sunny."]),
    "two calls": (True, True, ["go", "both</think>" + call(ROME, SUM), ["sunny", "3"],
                               "ok</think>Done.", "and?", "none</think>No."]),
    "call after call": (True, True, ["go", "a</think>" + call(ROME), ["x"],
                                     "b</think>Now." + call(SUM), ["y"], "c</think>End."]),
    "odd arguments": (True, True, ["go", "a</think>" + call(SAO, EMPTY), ["</tool_result>", ""],
                                   "b</think>End."]),
    "calls without thinking": (True, False, ["go", "Let me see." + call(SUM), ["3"], "It is 3."]),
}  # fmt: skip


@pytest.mark.parametrize("name", TALKS)
def test_history_is_what_was_written(name, encoder, tools):
    has_tools, thinking, turns = TALKS[name]
    options = {"thinking": thinking} | ({"tools": tools} if has_tools else {})
    opening = "<think>" if thinking else "</think>"
    messages, text = [], None
    for given, written in zip(turns[::2], turns[1::2], strict=True):
        if isinstance(given, str):
            messages.append({"role": "user", "content": given})
            shown = given
        else:
            calls = messages[-1]["tool_calls"]
            for made, result in zip(calls, given, strict=True):
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": result})
            shown = "\n\n".join(f"<tool_result>{result}</tool_result>" for result in given)
        prompt = encoder.prepare(messages, **options)
        rendered = encoder.render(prompt.conversation).text
        if text is not None:
            assert rendered == f"{text}{EOS}{USER}{shown}{ASSISTANT}{opening}"
        # The ids are those of the text, special tokens inside the ranges alone.
        decoded = encoder.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
        assert decoded == rendered
        ids = encoder.tokenizer.encode(written, add_special_tokens=False).ids
        message = parse_ids(encoder, prompt.conversation, ids)
        messages.append(message.as_dict())
        if thinking and not has_tools:  # reasoning of earlier turns is left out
            assert message.reasoning == written.partition("</think>")[0]
            text = rendered.removesuffix(opening) + "</think>" + written.partition("</think>")[2]
        else:
            text = rendered + written
