"""tiny_v41 against the released code in checkpoint arithmetic: prompt A whole, layers one by one.

A model of random weights is chaotic under BF16, so every layer starts from the golden output of
the one before it (README): relative Frobenius error at most 0.03, and at least 95 % of tokens
within 5 % of their own largest value.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.model import mhc
from deepinfer_jax.model.attention.sublayer import empty_selection
from deepinfer_jax.model.engram.hashing import compressed_ids
from deepinfer_jax.model.layer import apply_layer
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.registry import single_sequence
from deepinfer_jax.model.state import CacheState
from deepinfer_jax.model.tile import Flow, Rows, Selection
from deepinfer_jax.model.vision.encode import encode_images
from deepinfer_jax.vision.image import ImageInput, read_image
from tests.golden import compare
from tests.golden.ledger import Fixture, Left, Suite
from tests.golden.network import TILE, ops, role, rows_of, tiles, tiny_config, tiny_params
from tests.golden.tiny import run_prompt

FILE = "tiny_v41/golden_rounded"
LAYERS = 10


@lru_cache(maxsize=1)
def _layer_program() -> Any:
    config, prims = tiny_config("checkpoint"), ops("checkpoint")

    def run(params, role, state, flow, tile):
        # The look-back ring holds one tile's past only, so it is filled again for every layer.
        state = remember_ids(params, state, tile)
        state, flow, _ = apply_layer(prims, config, params, role, state, flow, tile)
        return state, flow

    return jax.jit(run)


def remember_ids(params: Params, state: CacheState, tile: Rows) -> CacheState:
    """Returns the state with the tile's compressed ids in the look-back ring."""
    compressed = compressed_ids(tiny_config("checkpoint"), params.engram, tile.ids)
    slot = jnp.where(tile.valid, tile.slot, state.engram_ids.shape[0])
    ring = tile.position % state.engram_ids.shape[1]
    return state.replace(engram_ids=state.engram_ids.at[slot, ring].set(compressed, mode="drop"))


def check_layers(fixture: Fixture, prompt: str) -> None:
    """x_out of every layer from golden inputs, rows and selections shared in order."""
    config, params = tiny_config("checkpoint"), tiny_params("checkpoint")
    ids = fixture.input(f"{prompt}.ids")
    state = single_sequence(config, len(ids), row_tile=TILE)
    selections = [empty_selection(config, state, TILE) for _ in tiles(len(ids))]
    embedded = np.asarray(params.embed)[ids].astype(np.float32)
    streams = np.broadcast_to(embedded[:, None], (len(ids), 4, embedded.shape[1]))
    mix = np.asarray(mhc.initial_mix(len(ids), 4))
    for layer in range(LAYERS):
        name = f"{prompt}.layers.{layer}"
        state, outputs = _run_layer(layer, ids, state, streams, mix, selections)
        streams = fixture.take(f"{name}.x_out")
        if layer + 1 < LAYERS:
            mix = fixture.value(f"{name}.pre_out")
        check_streams(f"{name}.x_out", outputs, streams)


def _run_layer(
    layer: int,
    ids: np.ndarray,
    state: CacheState,
    streams: np.ndarray,
    mix: np.ndarray,
    selections: list[Selection],
) -> tuple[CacheState, np.ndarray]:
    """Returns (state, streams) after a layer, tile by tile; replaces the tiles' selections."""
    params, outputs = tiny_params("checkpoint"), []
    for index, positions in enumerate(tiles(len(ids))):
        tile = rows_of(positions).replace(ids=_fill(ids, positions).astype(jnp.int32))
        flow = Flow(
            streams=_fill(streams, positions),
            mix=_fill(mix, positions),
            selection=selections[index],
        )
        state, flow = _layer_program()(params, role(layer), state, flow, tile)
        selections[index] = flow.selection
        outputs.append(np.asarray(flow.streams)[positions >= 0])
    return state, np.concatenate(outputs)


def check_image(fixture: Fixture) -> None:
    """The image's rows among the embeddings from the PNG's bytes, and the first layer.

    The file has no input mixes of later layers.
    """
    config, ids = tiny_config("checkpoint"), fixture.input("IMG.ids")
    image = read_image(fixture.input("IMG.png_bytes").tobytes(), config.vision)
    types = fixture.input("IMG.types")
    compare.exact("IMG.grid", np.asarray(_sides(image)), fixture.take("IMG.grid"))
    params = tiny_params("checkpoint")
    embedded = np.array(params.embed)[ids].astype(np.float32)
    embedded[types >= 0] = encode_images(params, config, [image.pixels])
    want = fixture.take("IMG.layers.0.x_in")
    compare.rounded("IMG.layers.0.x_in", np.broadcast_to(embedded[:, None], want.shape), want)
    state = single_sequence(config, len(ids), row_tile=TILE)
    selections = [empty_selection(config, state, TILE) for _ in tiles(len(ids))]
    _, got = _run_layer(0, ids, state, want, np.asarray(mhc.initial_mix(len(ids), 4)), selections)
    check_streams("IMG.layers.0.x_out", got, fixture.take("IMG.layers.0.x_out"))


def _sides(image: ImageInput) -> tuple[int, int, int, int]:
    plan = image.plan
    return plan.patch_rows, plan.patch_columns, plan.cell_rows, plan.cell_columns


def _fill(array: np.ndarray, positions: np.ndarray) -> jax.Array:
    """Returns the rows of one tile, zeros where it is not full."""
    out = np.zeros((len(positions), *array.shape[1:]), array.dtype)
    out[positions >= 0] = array[positions[positions >= 0]]
    return jnp.asarray(out)


def check_streams(label: str, got: np.ndarray, want: np.ndarray) -> None:
    """The README's bound for one layer in checkpoint arithmetic."""
    error = np.abs(got.astype(np.float64) - want)
    frobenius = np.sqrt(np.square(error).sum() / np.square(want, dtype=np.float64).sum())
    axes = tuple(range(1, want.ndim))
    within = error.max(axis=axes) <= 0.05 * np.abs(want).max(axis=axes)
    compare.note("layer, relative Frobenius, at most 0.03", float(frobenius))
    compare.note("layer, share of tokens beyond 5 %, at most 0.05", float(1 - within.mean()))
    if frobenius > 0.03 or within.mean() < 0.95:
        at = np.unravel_index(int(error.argmax()), error.shape)
        raise AssertionError(
            f"{label}: relative Frobenius {frobenius:.4g} (<= 0.03), {within.mean():.1%} of tokens "
            f"within 5 % (>= 95 %); worst at {tuple(map(int, at))}: got {got[at]}, want {want[at]}"
        )


def check_prompt_a(fixture: Fixture) -> None:
    """Prompt A end to end: logits within 0.15."""
    run = run_prompt(fixture.input("A.ids"), "checkpoint")
    compare.absolute("A.logits_all", run.logits, fixture.take("A.logits_all"), 0.15)
    for layer in (layer for layer in range(LAYERS) if layer_roles(tiny_config())[layer].ratio):
        key = f"A.layers.{layer}.topk"
        if key in fixture.arrays:
            compare.same_sets(key, run.seen["topk"][layer], fixture.take(key))


def _layers(prompt: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_layers(fixture, prompt)


CASES = {
    "layers A": _layers("A"),
    "layers B": _layers("B"),
    "prompt A": check_prompt_a,
    "image": check_image,
}


def _left() -> list[Left]:
    """Returns every key that is not comparable by the README."""
    used = {"A.ids", "B.ids", "A.logits_all", "A.layers.6.topk", "A.layers.8.topk"}
    used |= {f"{p}.layers.{layer}.x_out" for p in "AB" for layer in range(LAYERS)}
    used |= {f"{p}.layers.{layer}.pre_out" for p in "AB" for layer in range(LAYERS - 1)}
    used |= {f"IMG.{name}" for name in ("ids", "types", "grid", "png_bytes")}
    used |= {"IMG.layers.0.x_in", "IMG.layers.0.x_out"}
    rest = tuple(key for key in Fixture(FILE).arrays if key not in used)
    why = "not comparable end to end under rounding (README); inside a layer x_out"
    return [Left(2, why, rest)]


SUITE = Suite(FILE, CASES, _left())
pytestmark = pytest.mark.accept(3)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
