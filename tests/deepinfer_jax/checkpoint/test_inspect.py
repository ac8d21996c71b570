"""`deepinfer-jax inspect` on presets, configs and folders."""

import json

import pytest

from deepinfer_jax.cli.inspect import collect, part_of
from deepinfer_jax.cli.main import main

pytestmark = pytest.mark.accept(2)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return caught.value.code or 0, captured.out, captured.err


def test_released_preset_prints_the_published_totals(capsys):
    code, out, _ = run(capsys, "deepseek-v4.1-flash")
    assert code == 0
    for text in (
        "763,205,315,794",
        "96,085",
        "510,286,023,000",
        "candidate source",
        "Engram tables",
    ):
        assert text in out


def test_json_holds_the_same_numbers(capsys):
    code, out, _ = run(capsys, "deepseek-v4-flash", "--json")
    record = json.loads(out)
    assert code == 0
    assert record["totals"]["tensors"] == 69_187
    parts = record["parts"].values()
    for key in ("elements", "tensors", "nbytes"):
        assert sum(part[key] for part in parts) == record["totals"][key]
    assert len(record["layers"]) == 43
    assert record["coverage"] is None


def test_folder_is_compared_with_its_config(capsys, fixtures_dir):
    code, out, _ = run(capsys, fixtures_dir / "tiny_v41")
    assert code == 0
    assert "complete: 1,016 tensors" in out
    assert collect(str(fixtures_dir / "tiny_v41" / "config.json"))["coverage"] is None


def test_the_embedded_checkpoint_has_a_name(capsys):
    code, out, _ = run(capsys, "nano")
    assert code == 0
    assert "complete: " in out


def test_incomplete_folder_is_reported_and_fails(capsys, copy_of):
    copy = copy_of("tiny_v41")
    copy.add("surplus", ["BF16", [1], bytes(2)])
    code, out, _ = run(capsys, copy.folder)
    assert code == 1
    assert "unused (1):" in out
    assert "surplus" in out


def test_unknown_source_is_refused(capsys):
    code, _, err = run(capsys, "no-such-model")
    assert code == 2
    assert "received 'no-such-model'" in err


def test_every_part_has_a_name():
    assert part_of("layers.1.engram.embed.scale") == "backbone/Engram tables"
    assert part_of("mtp.0.main_proj.weight") == "draft stages/projections and heads"
    assert part_of("mtp.2.norm.weight") == "draft stages/norms"
    assert part_of("image_end") == "vision/image vectors"
