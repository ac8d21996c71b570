"""Training of draft stages: the bulk form against inference, the loss, steps, resume, command."""

import json
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.cli.main import main
from deepinfer_jax.errors import CheckpointError, ConfigError, InputError
from deepinfer_jax.model.draft import draft_blocks
from deepinfer_jax.training import draft as drafts
from deepinfer_jax.training import loop as loops
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.data import Packed, save_packed
from deepinfer_jax.training.draft_forward import Blocks, block_hidden, block_logits, target_rows
from deepinfer_jax.training.draft_loss import DraftLossSettings, draft_loss, draw_blocks
from deepinfer_jax.training.export import export_checkpoint
from deepinfer_jax.training.forward import training_config
from deepinfer_jax.training.loop import LoopSettings, run_steps
from deepinfer_jax.training.quantise import quantised_params
from deepinfer_jax.training.state import OptimiserSettings, initial_state
from tests.deepinfer_jax.training.tiny_training import SMALL, counting, parameters, random_ids

SIZE, ANCHORS = 3, 4
#: What `OPTIONS` say to the command, so that both run one program.
SETTINGS = OptimiserSettings(
    steps=10, peak_rate=1e-2, warmup_steps=2, loss=DraftLossSettings(anchors=ANCHORS, seed=3)
)
OPTIONS = ["--steps", "10", "--lr", "1e-2", "--warmup", "2", "--seed", "3"]
IN_CHUNKS = DraftLossSettings(anchors=3, position_scale=2.0, logit_rows=6)


HEADS = (
    "markov",
    "rnn",
    pytest.param("none", marks=[pytest.mark.slow, pytest.mark.accept(6)]),
)


def tiny_config(head):
    """Two layers (window; Full of ratio 2) and two draft stages, without Engram."""
    changes = {name: value for name, value in SMALL.items() if not name.startswith("engram_")}
    changes |= {"num_nextn_predict_layers": 2, "dspark_block_size": SIZE}
    changes |= {"dspark_target_layer_ids": [0, 1], "dspark_n_routed_experts": 2}
    changes |= {"dspark_num_experts_per_tok": 1, "dspark_markov_rank": 8}
    changes |= {"dspark_head": head}
    return training_config(
        nano_config(
            64,
            50,
            **changes,
            num_hidden_layers=2,
            compress_ratios=[0, 2, 0, 0],
            kv_source_layer_ids=[1],
            index_source_layer_ids=[1],
            candidate_source_layer_id=None,
            engram_layer_ids=[],
            n_routed_experts=2,
            index_topk=16,
        )
    )


@cache
def model(head="markov"):
    """Config and parameters at stored values, noise on what starts as a constant."""
    config, draw = tiny_config(head), np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jnp.asarray(draw.standard_normal(leaf.shape), jnp.float32),
        parameters(config),
    )
    return config, jax.jit(partial(quantised_params, config=config))(params)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("head", HEADS)
def test_bulk_form_equals_the_drafts_of_inference(head):
    config, params = model(head)
    ids = random_ids(config, (2, 24))
    # The shortest context, one within the window, one past it, and the last place of a row.
    row, anchor = np.array([0, 0, 1, 1], np.int32), np.array([1, 6, 13, 20], np.int32)
    blocks = Blocks(row=jnp.asarray(row), anchor=jnp.asarray(anchor))

    @jax.jit
    def bulk(params, previous):
        rows = target_rows(params, config, ids)
        hidden, _ = block_hidden(config, params.embed, params.draft, rows.taps, ids, blocks)
        return block_logits(config, params.head, params.draft, hidden, previous)

    # Every block has a sequence of its own, of which the tokens before the anchor are processed.
    processed = [(int(ids[r, p]), p, s) for s, r in enumerate(row) for p in range(anchor[s])]
    token, position, slot = (list(column) for column in zip(*processed, strict=True))
    serving = replace(config, execution=replace(config.execution, determinism="batch"))
    state = di.init_state(serving, di.RuntimeConfig(max_seqs=4, max_len=32))
    plan = di.make_plan(serving, token, position, [s + 1 for s in slot])
    state, _ = di.prefill(params, serving, state, plan)
    anchors = np.asarray(ids[row, anchor])
    drafts_of = jax.jit(partial(draft_blocks, with_logits=True), static_argnums=1)
    found = drafts_of(params, serving, state, anchors, anchor - 1, np.arange(1, 5), 4)

    previous = jnp.concatenate([anchors[:, None], found.token_ids[:, :-1]], axis=1)
    logits, confidence = bulk(params, previous)
    shape = found.logits.shape
    np.testing.assert_allclose(logits.reshape(shape), found.logits, rtol=1e-4, atol=2e-5)
    confidence = confidence.reshape(shape[:2])
    np.testing.assert_allclose(confidence, found.confidence_logit, rtol=1e-4, atol=2e-5)


def test_recurrent_head_remembers_the_block_and_every_part_of_it_learns():
    config, params = model("rnn")
    draw = np.random.default_rng(2)
    hidden = jnp.asarray(draw.standard_normal((2, SIZE, config.hidden_size)), jnp.float32)
    previous = jnp.asarray(draw.integers(0, 64, (2, SIZE)), jnp.int32)

    @jax.jit
    def pulled(draft, hidden, previous):
        def loss(draft):
            logits, _ = block_logits(config, params.head, draft, hidden, previous)
            picked = jax.nn.log_softmax(logits)[:, 5].sum()
            return picked, logits.reshape(2, SIZE, -1)

        return jax.value_and_grad(loss, has_aux=True)(draft)

    (_, logits), gradient = pulled(params.draft, hidden, previous)
    other = previous.at[0, 0].set((previous[0, 0] + 1) % 64)
    (_, changed), _ = pulled(params.draft, hidden, other)
    # The anchor matters to every position of its own block.
    assert (np.abs(logits - changed)[0].max(axis=1) > 1e-4).all()
    np.testing.assert_array_equal(logits[1], changed[1])
    for part in jnp.split(gradient.rnn_joint, 3):  # gate, candidate, output
        for columns in (part[:, :8], part[:, 8:16], part[:, 16:]):  # memory, token, hidden
            assert bool(jnp.any(columns != 0))
    assert bool(jnp.any(gradient.markov_embed != 0))
    assert bool(jnp.any(gradient.markov_head != 0))


def test_blocks_lie_inside_their_rows_and_follow_the_weights():
    weights = jnp.zeros((2, 40)).at[1, 20:24].set(4.0)
    drawn = draw_blocks(jax.random.key(0), weights, SIZE, 6)
    places = np.asarray(drawn.anchor).reshape(2, 6)
    assert np.asarray(drawn.row).tolist() == [0] * 6 + [1] * 6
    assert all(len(set(row)) == 6 for row in places.tolist())
    # Blocks that predict a weighted token: 17 + 1 is the first, 22 + 1 the last place of one.
    assert sorted(places[1].tolist()) == [17, 18, 19, 20, 21, 22]
    again = draw_blocks(jax.random.key(0), weights, SIZE, 6)
    np.testing.assert_array_equal(drawn.anchor, again.anchor)
    every = draw_blocks(jax.random.key(1), jnp.ones((1, 9)), SIZE, 5)
    assert sorted(every.anchor.tolist()) == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="5 places"):
        draw_blocks(jax.random.key(0), jnp.ones((1, 9)), SIZE, 6)


@cache
def losses():
    """Jitted (loss, metrics) and gradient of one batch, and what it was made of."""
    config, params = model()
    ids = random_ids(config, (2, 24), seed=4)
    weights = jnp.asarray(np.random.default_rng(0).integers(0, 3, ids.shape), jnp.float32)
    blocks = Blocks(
        row=jnp.asarray([0, 0, 1], jnp.int32), anchor=jnp.asarray([2, 9, 20], jnp.int32)
    )

    def loss(draft, settings):
        rows = target_rows(params, config, ids)
        return draft_loss(draft, params, rows, config, ids, weights, blocks, settings)

    pulled = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    return pulled, ids, weights, blocks


def test_loss_is_the_one_of_the_specification():
    config, params = model()
    pulled, ids, weights, blocks = losses()
    (value, metrics), _ = pulled(params.draft, IN_CHUNKS)
    before = blocks.positions(SIZE)

    @jax.jit
    def pieces(params):
        rows = target_rows(params, config, ids)
        hidden, _ = block_hidden(config, params.embed, params.draft, rows.taps, ids, blocks)
        target = jnp.einsum("btd,vd->btv", rows.hidden, params.head)
        previous = ids[blocks.row[:, None], before]
        return target, *block_logits(config, params.head, params.draft, hidden, previous)

    target, logits, raw = (np.asarray(x, np.float64) for x in pieces(params))
    logits, raw = logits.reshape(3, SIZE, -1), raw.reshape(3, SIZE)
    sums = dict.fromkeys(("cross_entropy", "l1", "confidence_loss"), 0.0)
    total = 0.0
    for block, (row, anchor) in enumerate(
        zip(blocks.row.tolist(), blocks.anchor.tolist(), strict=True)
    ):
        for k in range(1, SIZE + 1):
            q = np.exp(logits[block, k - 1])
            p = np.exp(target[row, anchor + k - 1])  # the row before the token predicts it
            q, p = q / q.sum(), p / p.sum()
            weight = float(weights[row, anchor + k]) * np.exp(-(k - 1) / 2.0)
            distance = np.abs(q - p).sum()
            survives, z = 1 - distance / 2, raw[block, k - 1]
            sums["cross_entropy"] -= weight * np.log(q[int(ids[row, anchor + k])])
            sums["l1"] += weight * distance
            sums["confidence_loss"] += weight * (np.log1p(np.exp(z)) - survives * z)
            total += weight
    for name, found in sums.items():
        assert float(metrics[name]) == pytest.approx(found / total, rel=1e-4), name
    wanted = 0.1 * sums["cross_entropy"] + 0.9 * sums["l1"] + sums["confidence_loss"]
    assert float(value) == pytest.approx(wanted / total, rel=1e-4)
    assert float(metrics["weight"]) == pytest.approx(total, rel=1e-5)
    assert metrics["load"].shape == (2, 2)
    assert float(metrics["load"].sum()) == 2 * 3 * SIZE


@pytest.mark.slow
def test_loss_does_not_depend_on_the_chunk():
    _, params = model()
    pulled, *_ = losses()
    whole, cut = (
        pulled(params.draft, replace(IN_CHUNKS, logit_rows=rows))
        for rows in (64, IN_CHUNKS.logit_rows)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), whole, cut)


def test_every_draft_leaf_gets_a_gradient_except_selection_biases():
    _, params = model()
    pulled, *_ = losses()
    _, gradient = pulled(params.draft, IN_CHUNKS)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        assert bool(jnp.any(leaf != 0)) != ("gate_bias" in name), name


@pytest.mark.accept(4)
def test_ten_steps_lower_the_loss_and_resume_bit_for_bit(tmp_path):
    target_files(tmp_path)
    loaded = di.load(tmp_path / "target", numerics="float32", determinism="off")
    config, params = drafts.with_draft_settings(loaded.config), loaded.params
    frozen = bits(params)
    batch_at = counting(config, batch=2, length=16)
    run = drafts.compiled_draft_step(params, config, SETTINGS)

    def fresh():
        return initial_state(drafts.initial_draft(params, config, config, seed=0), SETTINGS)

    def run_to(state, steps, folder):
        return run_steps(
            state, run, batch_at, LoopSettings(steps=steps, log_every=1), folder=tmp_path / folder
        )

    straight = run_to(fresh(), 10, "a")
    lines = [json.loads(line) for line in (tmp_path / "a/log.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert lines[-1]["l1"] < 0.95 * lines[0]["l1"]
    run_to(fresh(), 5, "b")
    resumed, record = loops.resume(tmp_path / "b", fresh())
    assert record is not None
    assert record["step"] == 5
    assert bits(run_to(resumed, 10, "b")) == bits(straight)
    assert bits(params) == frozen
    moved = straight.params.stages.gate_bias != params.draft.stages.gate_bias
    assert bool(moved.any())


def test_stages_begin_as_the_targets_where_it_has_the_tensor():
    target, params = model()
    own, rnn = params.draft, drafts.with_draft_settings(target, head="rnn", block=5)
    start = drafts.initial_draft(params, target, rnn, seed=0)
    assert bits(start.replace(rnn_joint=None)) == bits(own)
    assert start.rnn_joint.shape == (3 * 8, 2 * 8 + 64)
    assert bits(drafts.initial_draft(params, target, rnn, seed=0)) == bits(start)
    assert bits(drafts.initial_draft(params, target, rnn, seed=1)) != bits(start)
    # The recurrent head begins as the Markov head it extends.
    draw = np.random.default_rng(2)
    hidden = jnp.asarray(draw.standard_normal((2, 5, 64)), jnp.float32)
    previous = jnp.asarray(draw.integers(0, 64, (2, 5)), jnp.int32)
    found, wanted = (
        block_logits(config, params.head, stages, hidden, previous)
        for config, stages in ((rnn, start), (target, own))
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)
    none = drafts.with_draft_settings(target, head="none")
    start = drafts.initial_draft(params, target, none, seed=0)
    assert start.markov_embed is None
    assert start.confidence.shape == (1, 64)
    assert bits(start.stages) == bits(own.stages)
    fresh = drafts.initial_draft(params, target, target, seed=0, fresh=True)
    assert bits(fresh.stages.wq_a) != bits(own.stages.wq_a)
    with pytest.raises(ConfigError, match="at least one position"):
        drafts.with_draft_settings(target, block=0)


def test_data_must_be_of_the_target(tmp_path):
    config, params = model()
    ids = np.full((2, 8), 64)
    with pytest.raises(InputError, match="vocabulary"):
        drafts.check_data(Packed(ids, ids, np.arange(64), {}), params, config)
    with pytest.raises(InputError, match="draft stages"):
        drafts.initial_draft(params.replace(draft=None), config, config, seed=0)
    with pytest.raises(InputError, match="draft stages"):
        drafts.with_draft_settings(replace(config, draft=None), block=2)
    layers = params.layers.replace(gate_bias_vl=params.layers.gate_bias + 1)
    with pytest.raises(ConfigError, match="image"):
        drafts.check_exportable(params.replace(layers=layers))


@cache
def target_files(folder):
    """Writes the tiny target and data of its tokenizer; returns the options that name them."""
    config, params = model()
    layers = params.layers.replace(gate_bias_vl=params.layers.gate_bias)
    export_checkpoint(params.replace(layers=layers), config, folder / "target")
    ids, weights = counting(config, batch=8, length=16)(0)
    save_packed(folder / "data.npz", Packed(ids, weights, np.arange(64), {}))
    options = ["--target", str(folder / "target"), "--data", str(folder / "data.npz")]
    return [*options, "--batch", "2", "--length", "16", "--log-every", "1"]


def command(folder, *more):
    """Returns the exit status of `train draft`."""
    with pytest.raises(SystemExit) as stop:
        main(["train", "draft", *target_files(folder), "--out", str(folder / "out"), *more])
    return stop.value.code


def test_drafts_load_with_the_target_they_were_trained_for_only(tmp_path):
    assert not command(tmp_path, *OPTIONS)
    folder = tmp_path / "out/checkpoint"
    di.load(folder, determinism="off")
    written = json.loads((folder / "dspark_target.json").read_text())
    config, params = model()
    other = params.layers.replace(
        gate_bias_vl=params.layers.gate_bias, attn_norm=params.layers.attn_norm * 1.5
    )
    export_checkpoint(params.replace(layers=other), config, tmp_path / "other")
    (tmp_path / "other/dspark_target.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match="identity"):
        di.load(tmp_path / "other", determinism="off")
    for change, message in (
        ({"block_size": 4}, "block_size=4"),
        ({"head": "rnn"}, "head='rnn'"),
        ({"format": 9}, "cannot be read"),
    ):
        (folder / "dspark_target.json").write_text(json.dumps(written | change))
        with pytest.raises(CheckpointError, match=message):
            di.load(folder, determinism="off")


def test_command_writes_a_checkpoint_whose_backbone_is_the_target(tmp_path, capsys):
    stale = tmp_path / "out/checkpoint/dspark_temperatures.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    assert not command(tmp_path, *OPTIONS, "--seconds", "0")
    assert not stale.exists()
    assert command(tmp_path, *OPTIONS) == 2
    assert "--resume" in capsys.readouterr().err
    assert command(tmp_path, *OPTIONS, "--resume", "--head", "rnn") == 2
    assert "same options" in capsys.readouterr().err
    assert not command(tmp_path, *OPTIONS, "--resume")
    lines = (tmp_path / "out/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))
    before, after = (
        di.load(tmp_path / folder, numerics="float32").params
        for folder in ("target", "out/checkpoint")
    )
    assert bits(after.replace(draft=None)) == bits(before.replace(draft=None))
    assert bits(after.draft) != bits(before.draft)
    written = json.loads((tmp_path / "out/checkpoint/config.json").read_text())
    assert written == json.loads((tmp_path / "target/config.json").read_text())


@pytest.mark.accept(6)
@pytest.mark.parametrize(
    ("head", "block"), [("rnn", 4), pytest.param("none", 2, marks=pytest.mark.slow)]
)
def test_command_trains_another_head_and_block_and_writes_its_config(head, block, tmp_path):
    options = ["--lr", "1e-2", "--warmup", "2", "--head", head, "--block", str(block)]
    assert not command(tmp_path, "--steps", "12", *options)
    lines = (tmp_path / "out/log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < 0.9 * losses[0]
    folder = tmp_path / "out/checkpoint"
    loaded = di.load(folder, numerics="float32")
    settings = loaded.config.draft
    assert (settings.dspark_head, settings.dspark_block_size) == (head, block)
    assert (loaded.params.draft.rnn_joint is None) == (head == "none")
    assert (loaded.params.draft.markov_head is None) == (head == "none")
    # The head is part of what the tensors are checked against.
    path = folder / "config.json"
    written = json.loads(path.read_text())
    del written["text_config"]["dspark_head"]
    path.write_text(json.dumps(written))
    name = {"rnn": r"mtp\.1\.rnn_head\.joint\.weight", "none": "markov_head"}[head]
    with pytest.raises(CheckpointError, match=name):
        di.load(folder)
    written["text_config"]["dspark_head"] = "gated"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match='"markov" or "rnn" or "none", received "gated"'):
        di.load(folder)
