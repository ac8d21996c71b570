"""Rounds on the corpus keep prompts, tasks and records together; the command writes the file."""

import json

import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.cli.main import main
from deepinfer_jax.cli.train import NANO_TOKENIZER
from deepinfer_jax.errors import TokenizerError
from deepinfer_jax.loading import Model, read_tokenizer
from deepinfer_jax.speculative.calibration import FILE_NAME, read_temperatures
from deepinfer_jax.speculative.rounds import GreedyRounds
from deepinfer_jax.training import draft_calibration as module
from deepinfer_jax.training.corpus import TASKS, make_item, prompt_text
from deepinfer_jax.training.draft_calibration import PROMPTS, corpus_rounds
from deepinfer_jax.training.export import export_checkpoint
from tests.deepinfer_jax.training.test_draft import SIZE, model


def fake_rounds(params, config, prompts, *, max_tokens, report):
    """Two rounds a prompt that carry its length and sum, in an order of their own."""
    sequence = np.arange(2 * len(prompts))[::-1] // 2
    sizes = np.asarray([len(prompt) for prompt in prompts])[sequence]
    report(len(sequence))
    return GreedyRounds(
        token_ids=tuple((sum(prompt),) for prompt in prompts),
        sequence=sequence,
        confidence_logit=np.repeat(sizes[:, None], SIZE, axis=1).astype(np.float32) / 100,
        accepted=sizes % (SIZE + 1),
        observed=np.full(len(sequence), SIZE),
    )


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(module, "greedy_rounds", fake_rounds)
    config, params = model()
    return Model(
        config=config, params=params, tokenizer=read_tokenizer(NANO_TOKENIZER), source="test"
    )


def test_rounds_belong_to_their_prompts_and_tasks(fake):
    seen = []
    found = corpus_rounds(fake, split="test", seed=3, scale=0.05, report=seen.append)
    counts = [max(1, round(0.05 * PROMPTS[task])) for task in TASKS]
    assert np.bincount(found.prompt_task).tolist() == counts
    assert found.completions == [(sum(prompt),) for prompt in found.prompts]
    item = make_item("story", split="test", seed=3, index=0)
    assert found.prompts[0] == fake.tokenizer.encode(prompt_text(item)).ids
    assert np.bincount(found.task).tolist() == [2 * count for count in counts]
    sizes = [len(prompt) for prompt in found.prompts]
    for task in range(len(TASKS)):
        wanted = sorted(s for s, t in zip(sizes, found.prompt_task, strict=True) if t == task)
        got = sorted(np.rint(found.confidence_logit[found.task == task, 0] * 100).tolist())
        assert got == sorted(2 * wanted)
    assert max(seen) == 2 * len(sizes)


def test_a_tokenizer_is_needed(fake):
    bare = Model(config=fake.config, params=fake.params, tokenizer=None, source="test")
    with pytest.raises(TokenizerError, match="corpus"):
        corpus_rounds(bare, split="test", seed=0)


def test_command_writes_temperatures_that_load(fake, tmp_path, capsys):
    folder = export_checkpoint(fake.params, fake.config, tmp_path, tokenizer_from=NANO_TOKENIZER)
    with pytest.raises(SystemExit) as stop:
        main(["train", "temperatures", str(folder), "--scale", "0.02"])
    assert not stop.value.code
    assert "calibration error" in capsys.readouterr().err
    loaded = di.load(folder)
    found = read_temperatures(folder, loaded.params, loaded.config)
    assert found is not None
    assert len(found.values) == SIZE
    assert found.error_after <= found.error_before
    assert found.rounds == 2 * sum(max(1, round(0.02 * PROMPTS[task])) for task in TASKS)
    # The identity is of the stored drafts, whatever the numerics they are loaded in.
    plain = di.load(folder, numerics="float32")
    assert read_temperatures(folder, plain.params, plain.config) == found
    record = json.loads((folder / FILE_NAME).read_text())
    assert record["verification"] == "greedy"
