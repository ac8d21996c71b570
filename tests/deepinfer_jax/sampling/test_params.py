"""SamplingParams: every field with legal and illegal values, unknown keywords."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest

from deepinfer_jax.errors import DeepInferError, InputError
from deepinfer_jax.sampling.params import SamplingParams

HUGE = 10**400
NOT_NUMBERS = (None, True, False, "1", b"1", [1], math.nan, math.inf, -math.inf, HUGE, 1j)
NOT_INTEGERS = (True, False, "1", 1.0, 1.5, math.nan, math.inf, [1])

LEGAL = {
    "temperature": (0, 0.0, 1e-6, 1, 2.5, 1e300),
    "top_p": (1, 1.0, 1e-9, 0.5),
    "top_k": (-1, 0, 1, 2**40),
    "min_p": (0, 0.0, 0.5, 1, 1.0),
    "max_tokens": (0, 1, 10**9),
    "min_tokens": (0, 1, 256),
    "seed": (None, 0, 7, 2**64 - 1),
    "stop": ((), ("a",), tuple("abcdefghijklmnop")),
    "stop_token_ids": ((), (0,), (5, 6)),
    "ignore_eos": (True, False),
    "logprobs": (None, 0, 1000),
    "prompt_logprobs": (None, 0, 1000),
    "n": (1, 16),
    "logit_bias": (None, {}, {5: -100, 6: 100.0}, {i: 0 for i in range(300)}),
    "presence_penalty": (-2, 0, 2.0),
    "frequency_penalty": (-2, 0, 2.0),
    "repetition_penalty": (1e-3, 1, 2.0),
    "grammar": (None,),
    "max_draft": (None, 0, 5),
    "verify": ("exact", "rejection", "block"),
    "deadline_s": (None, 1, 0.5),
    "priority": (-5, 0, 7),
    "logprobs_mode": ("raw", "processed"),
    "allowed_token_ids": (None, (0,), (5, 6)),
    "bad_words": ((), ("a",)),
    "include_stop_str_in_output": (True, False),
    "skip_special_tokens": (True, False),
    "detokenize": (True, False),
    "cache_salt": ("", "tenant"),
    "bypass_prefix_cache": (True, False),
}
ILLEGAL = {
    "temperature": (*NOT_NUMBERS, -0.1, -1),
    "top_p": (*NOT_NUMBERS, 0, 0.0, -0.5, 1.0000001),
    "top_k": (*NOT_INTEGERS, None, -2),
    "min_p": (*NOT_NUMBERS, -0.1, 1.1),
    "max_tokens": (*NOT_INTEGERS, None, -1),
    "min_tokens": (*NOT_INTEGERS, None, -1, 257),
    "seed": (*NOT_INTEGERS, -1, 2**64),
    "stop": (None, "a", ["a"], ("",), (b"a",), (1,), tuple("abcdefghijklmnopq")),
    "stop_token_ids": (None, 5, [5], (-1,), (True,), (1.0,), ("5",)),
    "ignore_eos": (None, 0, 1, "true"),
    "logprobs": (*NOT_INTEGERS, -1, 1001),
    "prompt_logprobs": (*NOT_INTEGERS, -1, 1001),
    "n": (*NOT_INTEGERS, None, 0, 17),
    "logit_bias": (
        [],
        "x",
        {5: math.nan},
        {5: 101},
        {-1: 0.0},
        {"5": 0.0},
        {True: 0.0},
        {5: True},
        {5: "1"},
        {i: 0 for i in range(301)},
    ),
    "presence_penalty": (*NOT_NUMBERS, -2.1, 2.1),
    "frequency_penalty": (*NOT_NUMBERS, -2.1, 2.1),
    "repetition_penalty": (*NOT_NUMBERS, 0, -1, 2.1),
    "grammar": (),
    "max_draft": (*NOT_INTEGERS, -1),
    "verify": (None, True, "greedy", "Exact", 0),
    "deadline_s": (True, "1", math.nan, math.inf, HUGE, 0, -1),
    "priority": (*NOT_INTEGERS, None),
    "logprobs_mode": (None, True, "Raw", 0),
    "allowed_token_ids": (5, [5], (), (-1,), (True,), (1.0,)),
    "bad_words": (None, "a", ["a"], ("",), (b"a",), (1,)),
    "include_stop_str_in_output": (None, 0, 1, "true"),
    "skip_special_tokens": (None, 0, 1, "true"),
    "detokenize": (None, 0, 1, "true"),
    "cache_salt": (None, 0, b"x", "\ud800"),
    "bypass_prefix_cache": (None, 0, 1, "true"),
}


def test_every_field_is_in_both_tables():
    names = {field.name for field in fields(SamplingParams)}
    assert names == set(LEGAL) == set(ILLEGAL)


@pytest.mark.parametrize("name", LEGAL)
def test_legal_values_are_kept(name):
    for value in LEGAL[name]:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_values_raise_with_the_field_name(name):
    for value in ILLEGAL[name]:
        with pytest.raises(InputError, match=name) as caught:
            SamplingParams(**{name: value})
        assert isinstance(caught.value, ValueError | DeepInferError)


def test_min_tokens_above_max_tokens():
    with pytest.raises(InputError, match="5 > 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("max_new_tokens", "max_tokens"),
        ("seq_seed", "seed"),
        ("top_logprobs", "logprobs"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(name, hint):
    with pytest.raises(TypeError, match=f"'{name}'; did you mean '{hint}'"):
        SamplingParams(**{name: 1})


def test_an_unknown_keyword_without_a_neighbour():
    with pytest.raises(TypeError, match=r"no field 'xyzzy'$"):
        SamplingParams(xyzzy=1)
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_immutable_copied_and_pickled():
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0})
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert replace(params, seed=3).seed == 3
    with pytest.raises(InputError, match="temperature"):
        replace(params, temperature=-1)


def test_greedy_border():
    assert SamplingParams(temperature=np.nextafter(1e-5, 0)).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
