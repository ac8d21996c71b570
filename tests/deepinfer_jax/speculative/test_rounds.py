"""Greedy rounds emit the tokens of plain greedy decoding, whatever is drafted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.errors import InputError
from deepinfer_jax.loading import Model
from deepinfer_jax.model.draft import DraftOutput
from deepinfer_jax.speculative import rounds as module
from deepinfer_jax.speculative.rounds import greedy_rounds
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.init import init_params
from tests.deepinfer_jax.training.tiny_training import SMALL

SIZE, NEW = 3, 20
PROMPTS = [[5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6], [8, 8], [11, 12]]


@pytest.fixture(scope="module")
def model():
    changes = {"num_hidden_layers": 2, "compress_ratios": [0, 2, 0], "kv_source_layer_ids": [1]}
    changes |= {"index_source_layer_ids": [1], "candidate_source_layer_id": None}
    changes |= {"engram_layer_ids": [], "num_nextn_predict_layers": 1, "n_routed_experts": 2}
    changes |= {"dspark_target_layer_ids": [1], "dspark_block_size": SIZE}
    config = nano_config(64, 50, **{**SMALL, **changes}, eos_token_id=63)
    params, draw = init_params(config, 0), np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + 0.3 * jnp.asarray(draw.standard_normal(leaf.shape), jnp.float32),
        params,
    )
    return config, params


@pytest.fixture(scope="module")
def plain(model):
    """Plain greedy continuations, the end token disregarded."""
    config, params = model
    llm = di.LLM(Model(config=config, params=params, tokenizer=None, source="test"))
    rules = di.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(PROMPTS, rules)]


def test_tokens_are_those_of_plain_decoding(model, plain):
    config, params = model
    assert all(len(set(tokens)) > 3 for tokens in plain)
    unused = next(token for token in range(64) if all(token not in tokens for tokens in plain))
    config = replace(config, eos_token_id=unused)
    found = greedy_rounds(params, config, PROMPTS, max_tokens=NEW, slots=2)
    assert [list(tokens) for tokens in found.token_ids] == plain
    assert found.confidence_logit.shape == (len(found.accepted), SIZE)
    # Every round emits its accepted drafts and one token; the last one may be cut.
    for number, tokens in enumerate(plain):
        emitted = 1 + (found.accepted[found.sequence == number] + 1).sum()
        assert len(tokens) <= emitted < len(tokens) + SIZE + 1


def test_a_block_longer_than_a_tile_can_be_taken_back(model, plain):
    config, params = model
    unused = next(token for token in range(64) if all(token not in tokens for tokens in plain))
    settings = replace(config.draft, dspark_block_size=14)  # the window is 8, a tile as well
    config = replace(config, eos_token_id=unused, draft=settings)
    found = greedy_rounds(params, config, PROMPTS[:2], max_tokens=NEW, slots=2)
    assert [list(tokens) for tokens in found.token_ids] == plain[:2]
    assert found.accepted.max() < 8


def test_first_round_drafts_what_the_full_recomputation_drafts(model, plain):
    config, params = model
    found = greedy_rounds(params, config, PROMPTS[:1], max_tokens=2, slots=2)
    wanted = di.draft(params, config, [*PROMPTS[0], plain[0][0]])
    np.testing.assert_array_equal(found.confidence_logit[0], wanted.confidence_logit)


def test_accepted_drafts_and_an_end_among_them(model, plain, monkeypatch):
    """Drafts are the true continuation, every fourth one spoilt; the end comes in a block."""
    config, params = model
    end = next(t for place, t in enumerate(plain[2]) if place > 5 and plain[2].index(t) == place)
    config = replace(config, eos_token_id=end)
    stops = [t.index(end) if end in t else NEW for t in plain]

    def forced(params, config, state, anchor, last, slot, count):
        drafts = np.zeros((len(anchor), SIZE), np.int32)
        for row in range(int(count)):
            number = slots_of[int(slot[row])]
            first = int(last[row]) + 2 - len(PROMPTS[number])  # of the completion
            for k in range(SIZE):
                place = first + k
                true = plain[number][place] if place < NEW else 0
                drafts[row, k] = (true + 1) % 64 if place % 4 == 3 else true
        confidence = jnp.zeros((len(anchor), SIZE))
        return DraftOutput(
            logits=None, token_ids=drafts, confidence=confidence, confidence_logit=confidence
        )

    slots_of = {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
    monkeypatch.setattr(module, "draft_round", forced)
    found = greedy_rounds(params, config, PROMPTS, max_tokens=NEW, slots=5)
    for number, (tokens, stop) in enumerate(zip(plain, stops, strict=True)):
        assert list(found.token_ids[number]) == tokens[:stop]
    third = found.sequence == 2
    assert third.sum() < stops[2]
    assert found.accepted[third].max() == SIZE
    # Positions up to the end token count, those after it do not.
    place, last = 1, np.flatnonzero(third)[-1]
    for row in np.flatnonzero(third)[:-1]:
        assert found.observed[row] == SIZE
        place += found.accepted[row] + 1
    is_drafted = place + found.accepted[last] > stops[2]
    assert found.observed[last] == (stops[2] - place + 1 if is_drafted else SIZE)


def test_prompts_must_fit(model):
    config, params = model
    with pytest.raises(InputError, match="room"):
        greedy_rounds(params, config, [[]], max_tokens=4)
    with pytest.raises(InputError, match="max_position_embeddings"):
        greedy_rounds(params, config, [[1]], max_tokens=config.max_position_embeddings)
    with pytest.raises(InputError, match="draft stages"):
        greedy_rounds(params.replace(draft=None), config, [[1]], max_tokens=4)
