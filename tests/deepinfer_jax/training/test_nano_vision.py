"""What the embedded checkpoint sees: L3 of issue 12, on drawings that training never drew."""

import json

import pytest

from deepinfer_jax.cli.main import main
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.loading import resolve_folder
from deepinfer_jax.training.drawings import DRAWING_TASKS
from deepinfer_jax.training.vision_export import VISION_FILE

NANO = resolve_folder("nano")
pytestmark = [
    pytest.mark.accept(12),
    pytest.mark.skipif(read_config(NANO).vision is None, reason="nano does not see yet"),
]
LEAST = {"vision_colour": 0.85, "vision_shape": 0.85, "vision_count": 0.7, "vision_digit": 0.7}


def test_the_vision_part_is_small():
    assert (NANO / VISION_FILE).stat().st_size < 2e6


@pytest.mark.slow
def test_drawings_are_understood(tmp_path):
    path = tmp_path / "nano.json"
    with pytest.raises(SystemExit) as stop:
        main(["eval", "nano", "--tasks", ",".join(DRAWING_TASKS), "--json", str(path)])
    assert not stop.value.code
    rows = json.loads(path.read_text())["rows"]
    print(json.dumps(rows, indent=1))
    assert {row["name"] for row in rows} == set(LEAST)
    for row in rows:
        assert row["count"] >= 60
        assert row["rate"] >= LEAST[row["name"]], row
