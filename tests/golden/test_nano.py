"""The embedded checkpoint: complete, small, and its numbers are those of tools/nano_goldens.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.checkpoint.coverage import compare as compare_coverage
from deepinfer_jax.checkpoint.safetensors import open_store
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.loading import EMBEDDED
from deepinfer_jax.training.vision_export import VISION_FILE
from tests.golden import compare
from tools import nano_goldens

pytestmark = pytest.mark.accept(4)


@pytest.fixture(scope="module")
def golden():
    with np.load(nano_goldens.OUT) as file:
        return dict(file)


@pytest.fixture(scope="module")
def model():
    return di.load("nano", numerics="float32")


def test_goldens_are_of_this_checkpoint(golden):
    found = str(golden["fingerprint"])
    assert found == nano_goldens.fingerprint(EMBEDDED), "run tools/nano_goldens.py"
    wanted = {
        f"{task}.{part}" for task in nano_goldens.TASKS for part in ("ids", "logits", "greedy")
    }
    assert set(golden) == wanted | {"fingerprint"}


def test_every_stored_tensor_is_used_and_none_is_missing():
    store = open_store(EMBEDDED)
    coverage = compare_coverage(store, read_config(EMBEDDED))
    assert coverage.is_complete, coverage.report()
    assert not coverage.ignored
    assert len(store) == coverage.expected


def test_checkpoint_is_within_its_budget():
    sizes = {path.name: path.stat().st_size for path in EMBEDDED.iterdir()}
    vision = sizes.pop(VISION_FILE)
    assert sum(sizes.values()) <= 14_000_000
    assert vision <= 2_000_000


def test_logits(golden, model):
    score = jax.jit(di.score, static_argnums=1)
    longest = max(len(golden[f"{task}.ids"]) for task in nano_goldens.TASKS)
    for task in nano_goldens.TASKS:
        ids = golden[f"{task}.ids"]
        padded = jnp.asarray(np.pad(ids, (0, longest - len(ids))))
        got = np.asarray(score(model.params, model.config, padded))[: len(ids)]
        want = golden[f"{task}.logits"]
        compare.relative(f"{task}.logits", got[-len(want) :], want, 1e-4)


def test_greedy_ids_through_the_cache(golden, model):
    prompts = [golden[f"{task}.ids"].tolist() for task in nano_goldens.TASKS]
    params = di.SamplingParams(temperature=0, max_tokens=nano_goldens.GREEDY, ignore_eos=True)
    llm = di.LLM(model, runtime=di.RuntimeConfig(max_seqs=7, max_tokens_per_step=16))
    outputs = llm.generate(prompts, params, progress=False)
    for task, output in zip(nano_goldens.TASKS, outputs, strict=True):
        assert list(output.token_ids) == golden[f"{task}.greedy"].tolist(), task
