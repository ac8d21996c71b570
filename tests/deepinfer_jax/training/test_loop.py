"""The training loop: B6 of issue 4, packed data, and errors a user can make."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.cli.main import main
from deepinfer_jax.cli.train import NANO_TOKENIZER
from deepinfer_jax.errors import ConfigError, InputError
from deepinfer_jax.loading import read_tokenizer
from deepinfer_jax.model.engram.vocabulary import build_token_map
from deepinfer_jax.training import data as training_data
from deepinfer_jax.training import loop as loops
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.data import Packed
from deepinfer_jax.training.init import init_params, stored_params
from deepinfer_jax.training.loop import LoopSettings, train
from deepinfer_jax.training.state import OptimiserSettings, initial_state
from tests.deepinfer_jax.training.tiny_training import (
    counting,
    every_role_config,
    parameters,
    two_layer_config,
)

SETTINGS = OptimiserSettings(steps=20, peak_rate=1e-2, warmup_steps=4)


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.mark.accept(4)
def test_twenty_steps_lower_the_loss_and_resume_bit_for_bit(tmp_path):
    config = every_role_config()
    batch_at = counting(config)

    def fresh():
        return initial_state(parameters(config), SETTINGS)

    straight = train(
        fresh(),
        config,
        batch_at,
        SETTINGS,
        LoopSettings(steps=20, log_every=1),
        folder=tmp_path / "a",
    )
    lines = [json.loads(line) for line in (tmp_path / "a/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["token_loss"] < 0.8 * lines[0]["token_loss"]
    first = train(
        fresh(), config, batch_at, SETTINGS, LoopSettings(steps=10), folder=tmp_path / "b"
    )
    assert int(first.step) == 10
    resumed, record = loops.resume(tmp_path / "b", fresh())
    assert record is not None
    assert record["step"] == 10
    assert bits(resumed) == bits(first)
    resumed = train(
        resumed, config, batch_at, SETTINGS, LoopSettings(steps=20), folder=tmp_path / "b"
    )
    assert bits(resumed) == bits(straight)


@pytest.mark.slow
@pytest.mark.accept(4)
def test_two_devices_that_share_a_batch_take_the_same_steps(tmp_path):
    script = """
import jax, numpy as np, sys
from deepinfer_jax.training.loop import LoopSettings, train
from deepinfer_jax.training.state import OptimiserSettings, initial_state
from tests.deepinfer_jax.training.tiny_training import counting, parameters, two_layer_config

config = two_layer_config()
settings = OptimiserSettings(steps=20, peak_rate=1e-2, warmup_steps=4)
batch_at, loop = counting(config), LoopSettings(steps=3, log_every=1)
for devices in (1, 2):
    state = initial_state(parameters(config), settings)
    state = train(state, config, batch_at, settings, loop, devices=devices, folder=None)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
    np.savez(f"{sys.argv[1]}/{devices}.npz", *leaves)
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment)
    one, two = (np.load(tmp_path / f"{devices}.npz") for devices in (1, 2))
    for name in one:
        np.testing.assert_allclose(two[name], one[name], atol=2e-4)
    before = jax.tree.leaves(parameters(two_layer_config()))
    assert any((one[f"arr_{i}"] != leaf).any() for i, leaf in enumerate(before))


def test_more_devices_than_there_are_raise():
    config = two_layer_config()
    state = initial_state(parameters(config), SETTINGS)
    with pytest.raises(ConfigError, match="needs as many"):
        train(state, config, counting(config), SETTINGS, LoopSettings(steps=1), devices=4096)


def test_a_run_needs_an_end():
    config = two_layer_config()
    state = initial_state(parameters(config), SETTINGS)
    with pytest.raises(ConfigError, match="steps or seconds"):
        train(state, config, counting(config), SETTINGS, LoopSettings())


def test_parameters_depend_on_seed_and_name_alone():
    config = two_layer_config()
    one, same, other = (parameters(config, seed) for seed in (0, 0, 1))
    assert bits(one) == bits(same)
    assert (one.head != other.head).any()
    with pytest.raises(ConfigError, match="token map"):
        init_params(config, 0)


def packed(count=10, length=8):
    ids = np.arange(count * length).reshape(count, length)
    return Packed(ids, np.ones_like(ids), np.arange(90, dtype=np.int32), {"bos_token_id": 0})


def test_packed_data_comes_back(tmp_path):
    training_data.save_packed(tmp_path / "data.npz", packed())
    found = training_data.load_packed(tmp_path / "data.npz")
    np.testing.assert_array_equal(found.ids, packed().ids)
    assert (found.ids.dtype, found.weights.dtype) == (np.uint16, np.uint8)
    assert (found.compressed_vocab_size, found.special) == (90, {"bos_token_id": 0})
    with pytest.raises(InputError, match=r"\.npz"):
        training_data.load_packed(tmp_path / "absent.npz")


def test_batches_are_a_function_of_seed_and_step():
    at = training_data.packed_batches(packed(), batch=3, length=4, seed=5)
    again = training_data.packed_batches(packed(), batch=3, length=4, seed=5)
    epoch = [at(step)[0] for step in range(6)]
    assert len({tuple(row) for ids in epoch for row in ids.tolist()}) == 18
    np.testing.assert_array_equal(again(11)[0], at(11)[0])
    np.testing.assert_array_equal(at(2)[0], epoch[2])
    other = training_data.packed_batches(packed(), batch=3, length=4, seed=6)
    assert (other(0)[0] != epoch[0]).any()
    with pytest.raises(InputError, match="divide"):
        training_data.packed_batches(packed(), batch=3, length=5, seed=0)
    with pytest.raises(InputError, match="batch of 11"):
        training_data.packed_batches(packed(), batch=11, length=8, seed=0)


def test_corpus_is_packed_with_what_the_model_needs_to_know():
    found = training_data.pack_corpus(NANO_TOKENIZER, items=40, length=256, seed=1)
    again = training_data.pack_corpus(NANO_TOKENIZER, items=40, length=256, seed=1)
    np.testing.assert_array_equal(found.ids, again.ids)
    config = nano_config(len(found.token_map), found.compressed_vocab_size, **found.special)
    assert found.ids.max() < config.vocab_size
    assert found.weights.sum() > 0
    assert (found.weights[found.ids == config.pad_token_id] == 0).all()
    token_map = training_data.packed_token_map(found, config.vocab_size)
    tokenizer = read_tokenizer(NANO_TOKENIZER)
    assert token_map == build_token_map(tokenizer, config.engram, config.vocab_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["micro", "--steps", "1"], "knows"),
        (["nano"], "--steps"),
        (["nano", "--steps", "1"], "npz"),
        (["nano", "--steps", "1", "--resume", "--plot"], "matplotlib"),
    ],
)
def test_command_says_what_is_wrong(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("deepinfer_jax.pictures.find_spec", lambda name: None)
    places = ["--data", str(tmp_path / "absent.npz"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments, *places])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.accept(4)
def test_command_trains_nano_and_the_checkpoint_loads(tmp_path):
    packed = training_data.pack_corpus(NANO_TOKENIZER, items=60, length=128, seed=1)
    training_data.save_packed(tmp_path / "data.npz", packed)
    options = ["--data", str(tmp_path / "data.npz"), "--out", str(tmp_path / "out")]
    options += ["--batch", "2", "--length", "128", "--log-every", "1"]
    for more in (["--seconds", "0"], ["--resume"]):
        with pytest.raises(SystemExit) as stop:
            main(["train", "nano", "--steps", "3", *options, *more])
        assert not stop.value.code
    lines = (tmp_path / "out/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    model = di.load(tmp_path / "out/checkpoint", numerics="float32")
    assert model.config.draft is not None
    assert model.tokenizer is not None


def test_training_goes_on_from_a_model_that_sees():
    """From its language weights, which it keeps; `train vision` comes after."""
    model = di.load("nano", determinism="run")
    assert model.config.vision is not None
    blind = replace(model.config, vision=None, image_token_id=None)
    params = stored_params(model, blind)
    assert params.vision is None
    given = np.asarray(params.head)
    initial_state(params, SETTINGS).params.head.delete()  # as a step does that takes it over
    np.testing.assert_array_equal(np.asarray(params.head), given)
    with pytest.raises(di.ConfigError, match="nano has another"):
        stored_params(model, replace(blind, num_hidden_layers=blind.num_hidden_layers + 1))
