"""Sequential temperature scaling on synthetic rounds, and the file beside a checkpoint."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.model.params import DraftParams
from deepinfer_jax.speculative.calibration import (
    FILE_NAME,
    Temperatures,
    calibration_error,
    calibration_errors,
    draft_identity,
    fit_temperatures,
    prefix_survival,
    read_temperatures,
    write_temperatures,
)
from deepinfer_jax.speculative.confidence import calibrated_confidence, survival
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.init import init_params
from tests.deepinfer_jax.training.tiny_training import SMALL

TRUE = np.asarray([2.0, 0.5, 3.0])


def synthetic(rounds, seed):
    """Rounds whose drafts survive with sigmoid(logit / TRUE), each given the ones before it."""
    draw = np.random.default_rng(seed)
    logit = draw.normal(1.0, 2.0, (rounds, len(TRUE))) * TRUE
    survives = draw.random(logit.shape) < 1 / (1 + np.exp(-logit / TRUE))
    accepted = np.cumprod(survives, axis=1).sum(axis=1)
    return logit, accepted, np.full(rounds, len(TRUE))


def test_calibration_error_by_hand():
    estimate = np.asarray([0.05, 0.06, 0.5, 1.0])
    outcome = np.asarray([False, True, True, True])
    # Bin 0 holds two samples (mean 0.055 against 0.5), bins 7 and 14 one each.
    wanted = (abs(0.11 - 1) + abs(0.5 - 1) + 0) / 4
    assert calibration_error(estimate, outcome) == pytest.approx(wanted)
    assert calibration_error(np.zeros(0), np.zeros(0, bool)) == 0.0


def test_fit_recovers_temperatures_and_lowers_the_error_of_new_rounds():
    fitted = fit_temperatures(*synthetic(40_000, seed=0))
    step = 10 ** (2 / 40)  # of the grid
    np.testing.assert_array_less(np.abs(np.log(fitted / TRUE)), 1.6 * np.log(step))
    fresh = synthetic(20_000, seed=1)
    before, alone_before = calibration_errors(*fresh, np.ones(3))
    after, alone_after = calibration_errors(*fresh, fitted)
    assert after < 0.01 < 0.04 < before
    assert all(a < b for a, b in zip(alone_after, alone_before, strict=True))
    # Order is kept at each position, and calibrated rounds stay as they are.
    assert (np.argsort(fresh[0][:, 0]) == np.argsort(fresh[0][:, 0] / fitted[0])).all()
    calm = (fresh[0] / TRUE, *fresh[1:])
    np.testing.assert_array_less(np.abs(np.log(fit_temperatures(*calm))), 1.6 * np.log(step))


def test_positions_after_an_accepted_end_do_not_count():
    logit, accepted, _ = synthetic(4_000, seed=2)
    observed = np.where(accepted >= 1, 1, 3)
    broken = logit.copy()
    broken[observed == 1, 1:] = 50.0
    labels = accepted, observed
    ones = np.ones(3)
    assert calibration_errors(broken, *labels, ones) == calibration_errors(logit, *labels, ones)
    np.testing.assert_array_equal(
        fit_temperatures(broken, *labels), fit_temperatures(logit, *labels)
    )


def test_survival_is_what_the_device_computes():
    logit = np.asarray([[1.0, -2.0, 400.0], [0.0, 0.5, -400.0]], np.float32)
    wanted = survival(calibrated_confidence(jnp.asarray(logit), jnp.asarray(TRUE, jnp.float32)))
    np.testing.assert_allclose(prefix_survival(logit, TRUE), wanted, rtol=1e-5, atol=1e-30)


def test_rounds_are_needed():
    with pytest.raises(InputError, match="at least one round"):
        fit_temperatures(np.zeros((0, 3)), np.zeros(0, int), np.zeros(0, int))
    with pytest.raises(InputError, match="finite"):
        fit_temperatures(np.full((1, 3), np.nan), np.zeros(1, int), np.ones(1, int))


def model():
    changes = {"num_hidden_layers": 1, "compress_ratios": [2, 0], "kv_source_layer_ids": [0]}
    changes |= {"index_source_layer_ids": [0], "candidate_source_layer_id": None}
    changes |= {"engram_layer_ids": [], "num_nextn_predict_layers": 1}
    changes |= {"dspark_target_layer_ids": [0], "n_routed_experts": 2}
    config = nano_config(64, 50, **{**SMALL, **changes})
    return config, init_params(config, 0)


def test_file_comes_back_and_belongs_to_its_drafts(tmp_path):
    config, params = model()
    size = config.draft.dspark_block_size
    assert read_temperatures(tmp_path, params, config) is None
    written = Temperatures(
        values=(1.5,) * size,
        identity=draft_identity(params, config),
        verification="greedy",
        rounds=10,
        error_before=0.25,
        error_after=0.125,
    )
    path = write_temperatures(tmp_path, written)
    assert path.name == FILE_NAME
    assert read_temperatures(tmp_path, params, config) == written
    # Another form of the same stages is the same stages; trained ones are not.
    assert isinstance(params.draft, DraftParams)
    stored = params.draft.replace(norm=params.draft.norm.astype(jnp.bfloat16))
    assert read_temperatures(tmp_path, params.replace(draft=stored), config) == written
    trained = params.draft.replace(confidence=params.draft.confidence + 1)
    with pytest.raises(CheckpointError, match="fitted on"):
        read_temperatures(tmp_path, params.replace(draft=trained), config)


@pytest.mark.parametrize(
    "change",
    [{"values": [0.0] * 5}, {"values": ["x"]}, {"format": 2}, {"extra": 1}, {"values": None}],
)
def test_damaged_file_is_refused(tmp_path, change):
    config, params = model()
    written = Temperatures(
        values=(1.0,) * 5,
        identity=draft_identity(params, config),
        verification="greedy",
        rounds=1,
        error_before=0.0,
        error_after=0.0,
    )
    path = write_temperatures(tmp_path, written)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_temperatures(tmp_path, params, config)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_temperatures(tmp_path, params, config)
