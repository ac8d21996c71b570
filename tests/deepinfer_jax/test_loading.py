"""`load`: options, bad checkpoints, bad tokenizers."""

import json
import shutil

import jax
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.determinism import ROW_TILES
from deepinfer_jax.loading import EMBEDDED, read_tokenizer, resolve_folder
from pallas_kernels.core import QuantArray
from tests.golden.ledger import Fixture
from tests.golden.network import TINY

pytestmark = pytest.mark.accept(2)


@pytest.fixture
def checkpoint(tmp_path, fixtures_dir):
    """A writable copy of the tiny checkpoint."""
    folder = tmp_path / "tiny"
    shutil.copytree(fixtures_dir / "tiny_v41", folder, ignore=shutil.ignore_patterns("golden*"))
    return folder


def test_nano_is_the_embedded_checkpoint_and_needs_nothing_else():
    assert resolve_folder("nano") == EMBEDDED
    assert read_config(EMBEDDED).model_type == "deepseek_v41"
    assert read_tokenizer(EMBEDDED) is not None
    # Weights, and nothing that a training run leaves beside them.
    assert {path.suffix for path in EMBEDDED.iterdir()} == {".json", ".safetensors"}


def test_float32_holds_floats_only_and_checkpoint_keeps_the_bytes():
    expanded = di.load(TINY, numerics="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(expanded.params)} == {np.dtype("float32")}
    assert expanded.config.execution == di.ExecutionConfig(numerics="float32")
    stored = di.load(TINY)
    assert isinstance(stored.params.layers.wq_a, QuantArray)
    assert stored.config.execution.numerics == "checkpoint"
    hash(stored.config)


@pytest.mark.parametrize("place", ["host", "mapped"])
@pytest.mark.parametrize("numerics", ["checkpoint"])
def test_engram_tables_off_the_device_give_the_same_bits(place, numerics):
    ids = np.array([3, 400, 7, 7, 9, 11, 12, 80, 81], np.int32)
    here = di.load(TINY, numerics=numerics)
    there = di.load(TINY, numerics=numerics, engram=place)
    one, other = (np.asarray(_score(m, ids)) for m in (here, there))
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def _score(model, ids):
    return jax.jit(di.score, static_argnums=1)(model.params, model.config, ids)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"numerics": "fp8"}, di.ConfigError, "numerics must be one of"),
        ({"determinism": "always"}, di.ConfigError, "determinism must be one of"),
        ({"mesh": {"dp": 2}}, di.ConfigError, "needs 2 devices"),
        ({"tp_chunks": 8}, di.ConfigError, "tp_chunks must be None"),
        ({"kernels": "pallas"}, di.KernelSelectionError, "pass kernels=.*pallas_interpret"),
        (
            {"kernels": {"output_projection": "fp8"}, "numerics": "float32"},
            di.KernelSelectionError,
            "quantisers only",
        ),
        ({"kernels": {"contract": "ascend"}}, di.KernelSelectionError, "the whole network"),
        ({"seed": 1}, di.ConfigError, "has weights"),
    ],
)
def test_an_option_that_cannot_be_honoured_raises(options, error, text):
    with pytest.raises(error, match=text):
        di.load(TINY, **options)


def test_a_flag_that_contradicts_batch_raises(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with pytest.raises(di.ConfigError, match="xla_cpu_enable_fast_math"):
        di.load(TINY)
    di.load(TINY, determinism="run")


def test_batch_on_a_gpu_has_taller_tiles_and_needs_pinned_kernels(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(di.ConfigError, match="autotune_level=0"):
        di.load(TINY)
    assert di.load(TINY, determinism="run").config.execution.row_tile == 8
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert di.load(TINY).config.execution.row_tile == ROW_TILES["gpu"]


@pytest.mark.parametrize("source", ["/no/such/folder", "no_such_name", "./a/b"])
def test_an_unknown_source_says_what_a_source_is(source):
    with pytest.raises(di.CheckpointError, match="a source is a folder"):
        di.load(source)


def test_v4_runs_in_float32_only(fixtures_dir):
    with pytest.raises(di.ConfigError, match='numerics="float32" only'):
        di.load(fixtures_dir / "tiny_v4")
    model = di.load(fixtures_dir / "tiny_v4", numerics="float32")
    prompt = [int(i) for i in Fixture("tiny_v4/golden_f32").input("A.ids")]
    params = di.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    (output,) = di.LLM(model).generate([prompt], params, progress=False)
    golden = Fixture("tiny_v4/golden_f32").input("A.greedy16")
    assert list(output.token_ids) == [int(t) for t in golden]
    with pytest.raises(di.InputError, match="DeepSeek-V4"):
        di.draft(model.params, model.config, np.array([3, 4, 5], np.int32))


def test_truncated_shard(checkpoint):
    shard = checkpoint / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(di.CheckpointError, match="model-00002-of-00003"):
        di.load(checkpoint)


def test_absent_file_of_the_index(checkpoint):
    (checkpoint / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(di.CheckpointError, match="model-00003-of-00003"):
        di.load(checkpoint)


def test_absent_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(di.TokenizerError, match="has none"):
        di.load(checkpoint)


def test_unreadable_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(di.TokenizerError, match="no readable tokenizer"):
        di.load(checkpoint)


def test_tokenizer_with_another_reduction(checkpoint):
    path = checkpoint / "tokenizer.json"
    record = json.loads(path.read_text())
    vocabulary = record["model"]["vocab"]
    merged = next(t for t in vocabulary if t.isalpha() and t.islower() and len(t) == 1)
    vocabulary["ZZZZQ"] = vocabulary.pop(max(vocabulary, key=vocabulary.get))
    assert merged in vocabulary
    record["model"]["merges"] = []
    path.write_text(json.dumps(record))
    with pytest.raises(di.TokenizerError, match="engram_compressed_vocab_size"):
        di.load(checkpoint)


def test_tokenizer_larger_than_the_model(checkpoint):
    path = checkpoint / "tokenizer.json"
    record = json.loads(path.read_text())
    record["added_tokens"].append(
        {**record["added_tokens"][-1], "id": 512, "content": "<|one too many|>"}
    )
    path.write_text(json.dumps(record))
    with pytest.raises(di.TokenizerError, match="more ids than the model"):
        di.load(checkpoint)


def test_a_converted_folder_loads_and_gives_the_same_bits(tmp_path):
    from deepinfer_jax.checkpoint.convert import save_converted

    ids = np.array([3, 400, 7, 7, 9, 11, 12, 80, 81], np.int32)
    stored = di.load(TINY)
    folder = save_converted(
        stored.params, stored.config, tmp_path / "converted", tokenizer_from=TINY
    )
    for numerics in ("checkpoint", "float32"):
        one, other = (
            np.asarray(_score(di.load(source, numerics=numerics), ids)) for source in (TINY, folder)
        )
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.fixture(scope="module", params=["tiny_v41", "tiny_v4"])
def without_weights(request, fixtures_dir, tmp_path_factory):
    """A folder with config and tokenizer of a model only, and how its arithmetic is named."""
    folder = tmp_path_factory.mktemp("without_weights")
    for path in (fixtures_dir / request.param).iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            shutil.copy(path, folder)
    return folder, {"tiny_v41": "checkpoint", "tiny_v4": "float32"}[request.param]


def test_a_seed_draws_weights_where_there_are_none(without_weights):
    folder, numerics = without_weights
    one, again, other = (di.load(folder, numerics=numerics, seed=n) for n in (3, 3, 4))
    pairs = list(zip(*map(jax.tree.leaves, (one.params, again.params)), strict=True))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)
    assert (np.asarray(one.params.embed) != np.asarray(other.params.embed)).any()
    scores = di.score(one.params, one.config, np.arange(3, 14))
    assert np.isfinite(scores).all()
    assert scores.std() > 0.01


def test_without_weights_and_seed_the_error_names_both(without_weights):
    folder, numerics = without_weights
    with pytest.raises(di.CheckpointError, match="safetensors"):
        di.load(folder, numerics=numerics)
    for seed in (-1, 2**32):
        with pytest.raises(di.ConfigError, match="from 0 to 2"):
            di.load(folder, numerics=numerics, seed=seed)
    with pytest.raises(di.ConfigError, match="one device"):
        di.load(folder, numerics=numerics, seed=1, mesh={"dp": 1})
