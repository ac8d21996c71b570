"""Chat Completions bodies: uniform names, and the values the user gave."""

import pytest

from deepinfer_jax.chat.request import normalise, prompt_arguments, sampling_arguments
from deepinfer_jax.errors import InputError

USER = {"role": "user", "content": "hi"}
DEVELOPER = {"role": "developer", "content": "s"}


def test_names_become_uniform_and_the_body_stays_as_it_was():
    body = {"messages": [DEVELOPER, USER], "max_completion_tokens": 7}
    assert normalise(body) == {
        "messages": [{"role": "system", "content": "s"}, USER],
        "max_tokens": 7,
    }
    assert body == {"messages": [DEVELOPER, USER], "max_completion_tokens": 7}


def test_two_limits_must_agree():
    assert normalise({"max_tokens": 7, "max_completion_tokens": 7}) == {"max_tokens": 7}
    assert normalise({"max_tokens": 7, "max_completion_tokens": None}) == {"max_tokens": 7}
    with pytest.raises(InputError, match="must be equal"):
        normalise({"max_tokens": 7, "max_completion_tokens": 8})


def test_recipe_takes_the_normalised_body():
    import deepseek_recipe as recipe

    body = {"model": "DeepSeek-V4.1-Flash", "messages": [DEVELOPER, USER]}
    body |= {"max_completion_tokens": 7}
    with pytest.raises(ValueError, match="developer"):
        recipe.ChatCompletionRequest(body)
    request = recipe.ChatCompletionRequest(normalise(body)).convert(recipe.ConversionOptions())
    assert request.inference_options.max_tokens == 7


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_temperature_and_top_p_are_those_of_the_user(thinking):
    body = {"messages": [USER], "thinking": {"type": thinking}, "temperature": 0.3, "top_p": 0.5}
    assert sampling_arguments(body) == {"temperature": 0.3, "top_p": 0.5}
    more = {"stop": "x", "seed": 3, "max_completion_tokens": 4, "temperature": None}
    assert sampling_arguments({"messages": [USER], **more}) == {
        "stop": ("x",),
        "seed": 3,
        "max_tokens": 4,
    }
    assert sampling_arguments({"stop": ["x", "y"]}) == {"stop": ("x", "y")}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled"}}, {"thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({"reasoning_effort": "none"}, {"thinking": False}),
        ({"reasoning_effort": "low", "temperature": 2, "tools": None}, {"reasoning_effort": "low"}),
        ({"model": "m", "stream": True, "tool_choice": "none"}, {"tool_choice": "none"}),
    ],
)
def test_prompt_arguments_of_a_body(body, expected):
    assert prompt_arguments({"messages": [USER], **body}) == {"messages": [USER], **expected}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"messages": "hi"}, "messages must be a list"),
        ({}, "messages must be a list"),
        ({"messages": [USER], "top_k": 5}, "the body may have .*'top_k'"),
        ({"messages": [USER], "thinking": True}, "thinking must be an object"),
        ({"messages": [USER], "thinking": {"type": "off"}}, r"thinking\.type must be one of"),
        ({"messages": [USER], "thinking": {"budget_tokens": 5}}, "'budget_tokens'"),
        ({"messages": [USER], "thinking": {"type": "enabled"}, "reasoning_effort": "none"},
         "give one of them"),
    ],
)  # fmt: skip
def test_bad_body_is_refused(body, complaint):
    with pytest.raises(InputError, match=complaint):
        prompt_arguments(body)
