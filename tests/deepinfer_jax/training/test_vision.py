"""Training of an image encoder: drawings, batches, the loss against inference, the command."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import deepinfer_jax as di
from deepinfer_jax.cli.main import main
from deepinfer_jax.errors import CheckpointError, ConfigError
from deepinfer_jax.loading import read_tokenizer
from deepinfer_jax.model.vision.encode import encode_images
from deepinfer_jax.model.vision.patches import patch_rows
from deepinfer_jax.training import drawings, evaluate
from deepinfer_jax.training import vision as seeing
from deepinfer_jax.training.corpus.template import IMAGE
from deepinfer_jax.training.export import export_checkpoint
from deepinfer_jax.training.forward import training_config, training_forward
from deepinfer_jax.training.vision_data import make_vision_data, vision_batches
from deepinfer_jax.training.vision_export import VISION_FILE, export_vision
from tests.deepinfer_jax.training.tiny_training import every_role_config, parameters
from tests.golden.network import TINY

pytestmark = pytest.mark.accept(12)
TASKS = drawings.DRAWING_TASKS


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(TINY)


@pytest.fixture(scope="module")
def config(tokenizer):
    return seeing.with_vision(every_role_config(), tokenizer.token_to_id(IMAGE))


@pytest.fixture(scope="module")
def data(config, tokenizer):
    return make_vision_data(config, tokenizer, drawings=24, seed=0, workers=1)


def run(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([*arguments])
    assert not caught.value.code


def test_drawings_are_functions_of_their_place():
    def digest(task, **place):
        given = {"split": "test", "seed": 0, "index": 0} | place
        return drawings.make_drawing(task, **given).pixels.tobytes()

    for task in TASKS:
        first = digest(task)
        assert first == digest(task)
        others = [digest(task, index=1), digest(task, seed=1), digest(task, split="train")]
        assert len({first, *others}) == 4


def test_drawings_show_what_they_answer():
    answers = {task: set() for task in TASKS}
    for index in range(300):
        task = drawings.training_task(index)
        found = drawings.make_drawing(task, split="validation", seed=0, index=index)
        assert found.pixels.shape == (drawings.SIDE, drawings.SIDE, 3)
        for name, answer in found.answers.items():
            answers[name].add(answer)
        ink = np.asarray(drawings.COLOURS[found.answers["vision_colour"]])
        near = np.abs(found.pixels.astype(int) - ink).max(axis=2) < 20
        assert 20 < near.sum() < drawings.SIDE**2 // 2
    assert answers == {
        "vision_colour": set(drawings.COLOURS),
        "vision_shape": set(drawings.SHAPES),
        "vision_count": set("12345"),
        "vision_digit": set("0123456789"),
    }
    with pytest.raises(ValueError, match="task must be one of"):
        drawings.make_drawing("vision_smell", split="test", seed=0, index=0)


def test_processes_draw_the_same_stream():
    (alone,) = drawings.draw_stream(5, split="train", seed=3, workers=1)
    (shared,) = drawings.draw_stream(5, split="train", seed=3, workers=2)
    assert [one.answers for one in alone] == [one.answers for one in shared]
    assert all((a.pixels == b.pixels).all() for a, b in zip(alone, shared, strict=True))


def test_batches_ask_what_fits_and_weigh_the_answer(data, config, tokenizer):
    at = vision_batches(data, batch=200, seed=1)
    ids, weights, place, task, answers, fits = at(4)
    assert all((a == b).all() for a, b in zip(at(4), (ids, weights, place, task), strict=False))
    assert not (at(5)[2] == place).all()
    assert fits[np.arange(200), task].all()
    assert set(task) == set(range(4))
    rows = (ids == config.image_token_id).sum(axis=1)
    assert (rows == 14).all()
    for row in range(20):
        answer = tokenizer.decode(ids[row][weights[row] > 0], skip_special_tokens=False)
        index = int(place[row])
        drawing = drawings.make_drawing(
            drawings.training_task(index), split="train", seed=0, index=index
        )
        expected = drawing.answers[TASKS[task[row]]]
        assert answer == expected + tokenizer.id_to_token(config.eos_token_id)
        assert (data.patches[index] == patch_rows(config, drawing.pixels)).all()
        assert data.of_task[task[row], answers[row, task[row]]]


def test_the_loss_sees_what_inference_sees(data, config):
    """Hidden rows of `training_forward` with images against those of the public functions."""
    learner = seeing.initial_learner(config, 0, len(data.ids))
    target = parameters(replace(every_role_config(), image_token_id=config.image_token_id))
    params = replace(target, vision=seeing.stored_vision(learner.vision, config))
    drawing = drawings.make_drawing("vision_count", split="train", seed=0, index=0)
    ids = data.ids[data.answers[0, TASKS.index("vision_count")]]
    plain = training_config(config)
    rows = encode_images(params, plain, [drawing.pixels])
    expected = di.hidden_states(params, plain, ids, rows)[-1]
    found, _ = training_forward(target, config, jnp.asarray(ids)[None], images=rows[None])
    np.testing.assert_allclose(found[0], expected, atol=2e-4)
    blank, _ = training_forward(target, config, jnp.asarray(ids)[None], images=0 * rows[None])
    assert np.abs(blank - found).max() > 0.01


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    config = every_role_config()
    return export_checkpoint(parameters(config), config, folder, tokenizer_from=TINY)


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    command = [
        "train", "vision", "--target", str(target), "--out", str(out), "--drawings", "24",
        "--batch", "8", "--workers", "1", "--lr", "0.003", "--warmup", "2", "--log-every", "1",
        "--save-every", "4",
    ]  # fmt: skip
    run(*command, "--steps", "8")
    before = (out / "checkpoint" / VISION_FILE).read_bytes()
    run(*command, "--steps", "8", "--resume")  # exports again what was saved
    assert (out / "checkpoint" / VISION_FILE).read_bytes() == before
    return out


def test_training_lowers_the_loss_and_resumes(trained):
    lines = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert lines[-1]["readout_loss"] < lines[0]["readout_loss"]
    with pytest.raises(SystemExit):
        main(["train", "vision", "--target", "x", "--out", str(trained), "--steps", "8"])


def test_the_export_leaves_language_tensors_as_they_are(trained, target):
    folder = trained / "checkpoint"
    for path in target.glob("model-*.safetensors"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    before = json.loads((target / "model.safetensors.index.json").read_text())
    with safe_open(folder / VISION_FILE, "np") as file:
        names = set(file.keys())
    assert set(index["weight_map"]) == set(before["weight_map"]) | names
    assert (folder / VISION_FILE).stat().st_size < 2e6
    model = di.load(folder, numerics="float32", determinism="off")
    assert model.config.vision.max_image_tokens == 16
    assert model.config.image_token_id == model.tokenizer.token_to_id(IMAGE)
    again = trained / "again"
    export_vision(model.params.vision, model.config, folder, again)
    assert sorted(path.name for path in again.iterdir()) == sorted(
        path.name for path in folder.iterdir()
    )
    for path in folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_checkpoint_without_an_index_or_with_nan_is_not_written(config, target, tmp_path):
    vision = seeing.initial_learner(config, 0, 1).vision
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors\.index"):
        export_vision(vision, config, tmp_path, tmp_path / "a")
    broken = replace(vision, norm=vision.norm * np.nan)
    with pytest.raises(CheckpointError, match=r"vision\.norm\.weight is not"):
        export_vision(broken, config, target, tmp_path / "b")


def test_a_model_needs_an_image_token():
    config = replace(every_role_config(), image_token_id=None)
    with pytest.raises(ConfigError, match="need an image token"):
        seeing.with_vision(config, None)


def test_eval_asks_no_model_that_does_not_see(target, capsys):
    with pytest.raises(SystemExit):
        main(["eval", str(target), "--tasks", "vision_colour,talk", "--numerics", "float32"])
    assert "has no image encoder" in capsys.readouterr().err


@pytest.mark.slow
def test_eval_asks_models_that_see(trained, tmp_path):
    rows = ",".join(TASKS)
    path = tmp_path / "found.json"
    command = ["eval", str(trained / "checkpoint"), "--tasks", rows, "--n", "2", "--workers", "1"]
    run(*command, "--numerics", "float32", "--determinism", "off", "--json", str(path))
    record = json.loads(path.read_text())
    assert [(row["name"], row["count"]) for row in record["rows"]] == [(t, 2) for t in TASKS]
    keys = {answer["key"] for answer in record["answers"]}
    assert keys == {f"test/{task}/0/{index}/0" for task in TASKS for index in range(2)}


def test_rows_about_drawings_are_left_out_for_the_blind(target):
    from deepinfer_jax.cli.eval import seen_rows

    model = di.load(target, numerics="float32", determinism="off")
    rows = evaluate.choose_rows(None)
    left = seen_rows(model, rows, were_named=False)
    assert {row.name for row in rows} - {row.name for row in left} == set(TASKS)
    assert jax.tree.leaves(model.params)  # loaded
