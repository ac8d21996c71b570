"""tiny_v41 against the released code in float32: logits, every layer, greedy tokens, a draft.

1e-4 relative to the largest value; discrete choices equal.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.engram_primes import engram_primes
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.model import draft, forward
from deepinfer_jax.model.attention.window import read_window
from deepinfer_jax.model.engram import hashing
from deepinfer_jax.model.vision.encode import encode_images
from deepinfer_jax.vision.image import read_image
from deepinfer_jax.vision.plan import token_kinds
from deepinfer_jax.vision.prompt import expand_images
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite
from tests.golden.network import ops, tiny_config, tiny_params
from tests.golden.test_engram import context_of
from tests.golden.tiny import Run, run_prompt

FILE = "tiny_v41/golden_f32"
LAYERS = 10
close = partial(compare.relative, tolerance=1e-4)


def check_logits(fixture: Fixture, prompt: str) -> None:
    """`score` of a prompt."""
    config, ids = tiny_config(), fixture.input(f"{prompt}.ids")
    got = jax.jit(forward.score, static_argnums=1)(tiny_params(), config, jnp.asarray(ids))
    if prompt == "C":
        got = got[fixture.input("C.logits_positions")]
    key = f"{prompt}.logits_{'sampled' if prompt == 'C' else 'all'}"
    close(key, got, fixture.take(key))


def check_layers(fixture: Fixture, prompt: str) -> None:
    """Everything the file saves of every layer."""
    ids = fixture.input(f"{prompt}.ids")
    _check_layers(fixture, prompt, ids, run_prompt(ids))


def check_image(fixture: Fixture) -> None:
    """The prompt with an image in its middle: ids, every layer, logits; from the PNG's bytes."""
    config, ids = tiny_config(), fixture.input("IMG.ids")
    image = read_image(fixture.input("IMG.png_bytes").tobytes(), config.vision)
    types, grid = fixture.take("IMG.types"), image.plan
    compare.exact("IMG.types", types >= 0, ids == config.image_token_id)
    compare.exact("IMG.types", types[types >= 0], token_kinds(grid))
    sides = (grid.patch_rows, grid.patch_columns, grid.cell_rows, grid.cell_columns)
    compare.exact("IMG.grid", np.asarray(sides), fixture.take("IMG.grid"))
    text = np.delete(ids, np.flatnonzero(types > 0))
    expanded, _ = expand_images(text.tolist(), [image], config)
    compare.exact("IMG.ids", np.asarray(expanded), ids)
    rows = encode_images(tiny_params(), config, [image.pixels])
    run = run_prompt(ids, image_rows=rows)
    _check_layers(fixture, "IMG", ids, run)
    run_score = jax.jit(forward.score, static_argnums=1)
    logits = run_score(tiny_params(), config, jnp.asarray(ids), rows)
    close("IMG.logits_all", logits, fixture.take("IMG.logits_all"))


def _check_layers(fixture: Fixture, prompt: str, ids: np.ndarray, run: Run) -> None:
    close(f"{prompt}.final_normed", run.normed, fixture.take(f"{prompt}.final_normed"))
    for layer in range(LAYERS):
        _check_layer(fixture, f"{prompt}.layers.{layer}", layer, run, ids)
    if f"{prompt}.main_hidden" in fixture.arrays:
        key = f"{prompt}.main_hidden"
        close(key, _joined_taps(run), fixture.take(key))


def _joined_taps(run: Run) -> np.ndarray:
    """Returns the three taps side by side."""
    taps = run.seen["tap"][list(tiny_config().draft.dspark_target_layer_ids)]
    return taps.swapaxes(0, 1).reshape(taps.shape[1], -1)


def _check_layer(fixture: Fixture, name: str, layer: int, run: Run, ids: np.ndarray) -> None:
    seen = {key: array[layer] for key, array in run.seen.items()}
    role, previous = layer_roles(tiny_config())[layer], layer - 1
    if layer:
        before, mix = run.seen["x_out"][previous], run.seen["pre_out"][previous]
    else:
        before, mix = seen["x_in"], np.eye(4, dtype=np.float32)[np.zeros(len(ids), int)]
    seen |= {"pre_in": mix, "engram_in": before}
    if role.ratio:
        closed = np.arange(len(ids)) % role.ratio == role.ratio - 1
        for key in ("compressed_rows", "index_keys"):
            seen[key] = seen[key][closed]
    for key in (*seen, "x_out_sampled", "engram_hash_ids"):
        full = f"{name}.{key}"
        if full not in fixture.arrays:
            continue
        want = fixture.take(full)
        if key in ("expert_ids", "topk"):
            compare.same_sets(full, seen[key], want)
        elif key == "expert_weights":
            wanted_ids = fixture.arrays[f"{name}.expert_ids"]
            got = compare.by_id(seen[key], seen["expert_ids"])
            close(full, got, compare.by_id(want, wanted_ids))
        elif key == "engram_hash_ids":
            compare.exact(full, _hash_ids(layer, ids), want)
        elif key == "x_out_sampled":
            close(full, seen["x_out"][fixture.input("C.sampled_positions")], want)
        else:
            close(full, seen[key], want)


def _hash_ids(layer: int, ids: np.ndarray) -> jax.Array:
    config, token_map = tiny_config(), tiny_params().engram.token_map.ids
    is_text = ids != config.image_token_id
    context = context_of(ids, is_text, token_map, config.engram.engram_max_ngram_size)
    pad = int(token_map[config.engram.engram_pad_token_id])
    place = config.engram.engram_layer_ids.index(layer)
    return hashing.hash_ids(
        engram_primes(config), place, jnp.asarray(context.astype(np.int32)), pad
    )


def check_greedy(fixture: Fixture) -> None:
    """16 tokens after prompt B, recomputed at every step."""
    tokens, wanted = fixture.take("greedy.tokens"), fixture.take("greedy.logits")
    ids, found = fixture.input("B.ids"), []
    for token in tokens:
        found.append(run_prompt(ids).logits[-1])
        ids = np.append(ids, token)
    close("greedy.logits", np.stack(found), wanted)
    compare.exact("greedy.tokens", np.stack(found).argmax(axis=1), tokens)


def check_draft(fixture: Fixture) -> None:
    """One DSpark round: taps, rings, stages, logits before and after Markov, ids, confidence."""
    config, params, prims = tiny_config(), tiny_params(), ops("float32")
    prefix, anchor = fixture.input("dspark.prefix_tokens"), fixture.input("dspark.new_token")
    last = int(fixture.input("dspark.last_accepted_position"))
    run = run_prompt(prefix)
    close("dspark.taps", _joined_taps(run), fixture.take("dspark.taps"))
    for stage in range(3):
        key = f"dspark.stage{stage}.context_kv_ring"
        close(key, _ring(run, stage, last), fixture.take(key))

    begin = draft.Anchors(*(jnp.asarray([x], jnp.int32) for x in (anchor[0], last, 1)))
    tile = draft.block_rows(config, begin, jnp.ones((1,), bool))
    assert tile.valid.tolist() == [True] * 5 + [False] * 3

    def stages(params, state, tile, begin):
        return draft.run_stages(prims, config, params, state, tile, begin)

    hidden, seen = jax.jit(stages)(params, run.state, tile, begin)
    for stage in range(3):
        for name in ("x_out", "pre_out"):
            key = f"dspark.stage{stage}.{name}"
            close(key, seen[name][stage, :5], fixture.take(key))
    close("dspark.h", hidden[:5], fixture.take("dspark.h"))
    normed = prims.norm(hidden, params.draft.norm, config.rms_norm_eps)
    base = prims.contract(normed, params.head)[:5]
    close("dspark.base_logits", base, fixture.take("dspark.base_logits"))

    ids = jnp.asarray(np.concatenate([prefix, anchor]))
    got = jax.jit(forward.draft, static_argnums=1)(params, config, ids)
    compare.exact(
        "dspark.output_ids",
        np.concatenate([anchor, got.token_ids]),
        fixture.take("dspark.output_ids"),
    )
    for key, array in {
        "draft_logits": got.logits,
        "confidence_logit": got.confidence_logit,
        "confidence_prob": got.confidence,
    }.items():
        close(f"dspark.{key}", array, fixture.take(f"dspark.{key}"))


def _ring(run: Run, stage: int, last: int) -> np.ndarray:
    """Returns the context rows of a stage by slot = position mod window."""
    config = tiny_config()
    rows, _ = read_window(
        config,
        run.state,
        config.num_hidden_layers + stage,
        jnp.ones((1,), jnp.int32),
        jnp.full((1,), last),
    )
    window = config.attention.sliding_window
    ring = np.zeros(rows.shape[1:], np.float32)
    ring[np.arange(last - window + 1, last + 1) % window] = rows[0]
    return ring


def _prompt(check: Callable[..., None], prompt: str) -> Callable[[Fixture], None]:
    return lambda fixture: check(fixture, prompt)


CASES = (
    {f"logits {prompt}": _prompt(check_logits, prompt) for prompt in "ABC"}
    | {f"layers {prompt}": _prompt(check_layers, prompt) for prompt in "ABC"}
    | {"greedy": check_greedy, "draft": check_draft, "image": check_image}
)
SUITE = Suite(FILE, CASES)
pytestmark = [pytest.mark.accept(2), pytest.mark.accept(12)]


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
