"""Every public name says what it is, with its shapes, dtypes and errors, and its examples run."""

import ast
import doctest
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di

pytestmark = pytest.mark.accept(14)

ERRORS = tuple(
    name
    for name in di.__all__
    if isinstance(getattr(di, name), type) and issubclass(getattr(di, name), Exception)
)
#: What these say of the arrays they take or give: dtype and shape.
ARRAYS = {
    "Completion": "float32 [len(token_ids)]",
    "DraftOutput": "int32 [block]",
    "LLM": "float32 [3]",
    "Model": "float32",
    "RequestOutput": "float32",
    "ScoreOutput": "float32 [t - 1]",
    "StepOutput": "float32 [rows, v]",
    "draft": "float32 [block, v]",
    "hidden_states": "float32 [t, m, d]",
    "init_state": "int32",
    "make_plan": "int32 [n]",
    "prefill": "int32 [T]",
    "score": "float32 logits [t, v]",
}
#: Ways in which a docstring says what is raised: itself, or by what makes the object.
RAISING = (
    "Raises:",
    "say what they raise",
    "says what it raises",
    "raises",
    "Arguments and errors",
)


@pytest.fixture(scope="module")
def names():
    """What the examples use: one model, one engine, loaded once."""
    model = di.load("nano", numerics="float32")
    small = di.RuntimeConfig(max_seqs=2, max_tokens_per_step=32, max_len=256)
    with di.LLM(model, runtime=small) as llm:
        yield {"di": di, "jax": jax, "jnp": jnp, "np": np, "model": model, "llm": llm}


def docstring(name):
    value = getattr(di, name)
    if name != "PRESETS":
        return inspect.getdoc(value) or ""
    from deepinfer_jax.config import presets

    body = ast.parse(inspect.getsource(presets)).body
    [place] = [i for i, node in enumerate(body) if ast.unparse(node).startswith("PRESETS =")]
    return inspect.cleandoc(ast.literal_eval(ast.unparse(body[place + 1])))


@pytest.mark.parametrize("name", di.__all__)
def test_example_runs(name, names):
    text = docstring(name)
    test = doctest.DocTestParser().get_doctest(text, dict(names), name, None, 0)
    assert test.examples, f"{name} has no example"
    output = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed = runner.run(test, out=output.append).failed
    assert not failed, "".join(output)


@pytest.mark.parametrize("name", [name for name in di.__all__ if name not in ERRORS])
def test_docstring_says_what_is_raised(name):
    text = docstring(name)
    assert name == "PRESETS" or any(word in text for word in RAISING)


@pytest.mark.parametrize("name", ARRAYS)
def test_docstring_says_shapes_and_dtypes(name):
    assert ARRAYS[name] in docstring(name)


@pytest.mark.parametrize("name", [n for n in di.__all__ if inspect.isfunction(getattr(di, n))])
def test_docstring_says_what_each_argument_is(name):
    text = docstring(name)
    if "rguments" in text:  # as those of another function, which it names
        return
    arguments = inspect.signature(getattr(di, name)).parameters
    missing = [one for one in arguments if not _is_named(one, text)]
    assert len(arguments) == 1 or not missing


def _is_named(argument, text):
    return f"{argument}:" in text or f"`{argument}`" in text or f"`{argument}." in text
