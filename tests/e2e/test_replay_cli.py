"""`deepinfer-jax replay`: records of other processes run again here, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.cli import main as cli
from tests.golden.network import TINY

PROMPT = [5, 6, 7, 8, 9]
# Two requests that share steps; the record of the first one is printed.
SCRIPT = f"""
import sys
import deepinfer_jax as di
sizes = dict(max_seqs=4, max_len=128, max_tokens_per_step=32, block_tokens=16)
llm = di.LLM({str(TINY)!r}, numerics="float32", runtime=di.RuntimeConfig(**sizes, record="logits"))
params = di.SamplingParams(max_tokens=8, seed=3, ignore_eos=True, deadline_s=1000, max_draft=3)
outputs = llm.generate([{PROMPT}, [9] * 40], params, progress=False)
sys.stdout.write(outputs[0].record.to_json())
"""


@pytest.fixture(scope="module")
def two_texts():
    """The records that two fresh processes print, one after the other."""
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    return found


@pytest.fixture
def path(two_texts, tmp_path):
    """A file with the record."""
    path = tmp_path / "record.json"
    path.write_text(two_texts[0])
    return path


def change(path, **sections):
    """Writes the record of a file with other values in some sections."""
    fields = json.loads(path.read_text())
    for name, values in sections.items():
        fields[name] = fields[name] | values if isinstance(values, dict) else values
    path.write_text(json.dumps(fields))


def replay(capsys, path, *flags):
    """Returns (exit code, stdout, stderr) of the command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(["replay", str(path), *flags])
    return (stop.value.code, *capsys.readouterr())


def flip_bit_of_embedding(folder, token):
    """Flips the highest mantissa bit of the first number of a token's embedding."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "embed.weight"
    with (folder / index[name]).open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
        assert entry["dtype"] == "BF16"
        file.seek(8 + size + entry["data_offsets"][0] + token * entry["shape"][1] * 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x40]))


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of tiny_v41 without its golden files."""
    ignored = shutil.ignore_patterns("golden*")
    return shutil.copytree(TINY, tmp_path / "checkpoint", ignore=ignored)


@pytest.mark.accept(7)
def test_two_fresh_processes_give_one_record(two_texts):
    one, two = two_texts
    assert one == two
    assert len(json.loads(one)["outputs"][0]["logit_hashes"]) == 8


@pytest.mark.accept(7)
def test_a_record_of_another_process_is_equal_here(path, tmp_path, capsys):
    code, out, err = replay(capsys, path, "--save", str(tmp_path / "again.json"))
    assert (code, out) == (0, "equal: ids and logits of 8 tokens, 1 completion(s)\n")
    assert "warning" not in err
    before, after = di.read_record(path), di.read_record(tmp_path / "again.json")
    alone = {"max_seqs": 1, "drafting": False, "prefix_cache": False}
    assert after == replace(before, runtime=before.runtime | alone, promises=after.promises)


@pytest.mark.accept(7)
def test_stripped_outputs_are_generated_again(path, tmp_path, capsys):
    before = di.read_record(path)
    change(path, outputs=None, environment={"versions": {"jax": "0.0"}})
    code, out, err = replay(capsys, path, "--save", str(tmp_path / "again.json"))
    assert code == 0
    assert "nothing was compared" in err
    assert "warning: environment.versions.jax: the record has '0.0'" in err
    assert di.read_record(tmp_path / "again.json").outputs == before.outputs
    tokenizer = di.load(TINY, numerics="float32").tokenizer
    assert out == tokenizer.decode(list(before.outputs[0].token_ids)) + "\n"


@pytest.mark.accept(7)
def test_a_flipped_bit_is_reported_at_its_first_position(path, checkpoint, capsys):
    (output,) = di.read_record(path).outputs
    ids = output.token_ids
    place = next(n for n in range(2, 7) if ids[n] not in (*PROMPT, *ids[:n]))
    flip_bit_of_embedding(checkpoint, ids[place])
    code, _, err = replay(capsys, path, "--model", str(checkpoint))
    assert code == 2
    assert "weights_sha256: the record has" in err
    code, out, err = replay(capsys, path, "--model", str(checkpoint), "--ignore-weights")
    assert code == 1
    assert "warning: weights_sha256" in err
    # The first logits that see the token are those after it.
    expected = f"expected id {ids[place + 1]} (logits {output.logit_hashes[place + 1]})"
    assert f"different: completion 0, token {place + 1}: {expected}, got id" in out


@pytest.mark.accept(7)
def test_a_foreign_config_is_refused_by_name(path, checkpoint, capsys):
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["routed_scaling_factor"] = 2.5
    (checkpoint / "config.json").write_text(json.dumps(config))
    for shard in checkpoint.glob("*.safetensors"):
        shard.unlink()  # the config alone decides
    code, out, err = replay(capsys, path, "--model", str(checkpoint))
    assert (code, out) == (2, "")
    assert "config.moe.routed_scaling_factor: the record has 1.5, here it is 2.5" in err


@pytest.mark.accept(7)
@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"execution": {"numerics": "checkpoint"}}, "weights_sha256: the record has"),
        ({"execution": {"network_row_tile": 16}}, "execution.network_row_tile: the record has 16"),
        ({"options": {"max_len": 9999}}, "options.max_len: the record has 9999"),
        ({"runtime": {"novel": 1}}, "another version.*novel"),
        ({"request": {"params": {"n": 1, "novel": 1}}}, "no field 'novel'"),
    ],
)
def test_what_cannot_be_run_again_is_refused_by_name(path, capsys, sections, complaint):
    import re

    change(path, **sections)
    code, out, err = replay(capsys, path)
    assert (code, out) == (2, "")
    assert re.search(complaint, err), err


def test_a_model_that_is_not_there_is_no_wrong_usage(path, capsys):
    change(path, model={"source": "no_such_place"})
    code, out, err = replay(capsys, path)
    assert (code, out) == (3, "")
    assert "a source is a folder" in err


def test_a_level_that_cannot_be_held_here_is_refused(path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    code, _, err = replay(capsys, path)
    assert code == 2
    assert 'determinism="batch" cannot be held' in err


@pytest.mark.accept(12)
def test_a_record_with_images_needs_them_again(tmp_path, capsys):
    from PIL import Image

    draw = np.random.default_rng(6).integers
    files = [tmp_path / f"{number}.png" for number in range(2)]
    for file in files:
        Image.fromarray(draw(0, 256, (20, 28, 3), dtype=np.uint8)).save(file)
    sizes = {"max_seqs": 4, "max_len": 128, "max_tokens_per_step": 32, "block_tokens": 16}
    runtime = di.RuntimeConfig(**sizes, record="logits")
    params = di.SamplingParams(max_tokens=5, seed=3, ignore_eos=True)
    with di.LLM(TINY, numerics="float32", runtime=runtime) as llm:
        token = llm.model.config.image_token_id
        output = llm.generate([5, token, 6, token, 7], params, images=files, progress=False)[0]
    path = tmp_path / "record.json"
    output.record.write(path)
    assert [one["start"] for one in output.record.request["images"]] == [1, 12]
    given = [word for file in files for word in ("--image", str(file))]
    code, out, _ = replay(capsys, path, *given)
    assert (code, out) == (0, "equal: ids and logits of 5 tokens, 1 completion(s)\n")
    code, _, err = replay(capsys, path, *given[:2])
    assert code == 2
    assert "needs 2 images, got 1" in err
    code, _, err = replay(capsys, path, *given[:2], *given[:2])
    assert code == 2
    assert "image 2" in err
