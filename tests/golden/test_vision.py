"""Golden file vision: PNG bytes to patches, rotary tables, encoder and projector."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.presets import preset
from deepinfer_jax.model.params import VisionBlockParams, VisionParams
from deepinfer_jax.model.vision import encoder, insert, patches
from deepinfer_jax.vision.image import read_image
from deepinfer_jax.vision.plan import token_kinds
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite
from tests.golden.network import NUMERICS, Weights, ops, tiny_config

IMAGES = "abcde"
PATCHES = 192  # those of the most tokens, in whole tiles
TOKENS = 24
#: Image vectors that name themselves: the file holds none.
START, END, NEWLINE = 1.0, 2.0, 3.0


def _params(fixture: Fixture, mode: str) -> VisionParams:
    weights, width = Weights(fixture, "w", mode), tiny_config().hidden_size
    names = {
        **{name: f"{name}.weight" for name in ("norm1", "norm2")},
        **{name: f"attn.{name}.weight" for name in ("wqkv", "wo")},
        **{f"{name}_bias": f"attn.{name}.bias" for name in ("wqkv", "wo")},
        **{name: f"mlp.{name}.weight" for name in ("w1", "w2")},
    }
    blocks = {
        name: jnp.stack([weights.plain(f"vision.blocks.{b}.{suffix}") for b in range(2)])
        for name, suffix in names.items()
    }
    aligner = {
        f"aligner_{part[0]}{layer}": weights.plain(f"aligner.w{layer}.{suffix}")
        for layer in (1, 2)
        for part, suffix in (("w", "weight"), ("b", "bias"))
    }
    return VisionParams(
        patch_proj=weights.plain("vision.patch_embed.proj.weight"),
        patch_bias=weights.plain("vision.patch_embed.proj.bias"),
        blocks=VisionBlockParams(**blocks),
        norm=weights.plain("vision.norm.weight"),
        **aligner,
        image_start=jnp.full((width,), START),
        image_end=jnp.full((width,), END),
        image_newline=jnp.full((width,), NEWLINE),
    )


@lru_cache(maxsize=2)
def _program(mode: str):
    config, prims = tiny_config(mode), ops(mode)

    prims = encoder.vision_ops(prims)

    def run(params, values, grid):
        place = jnp.arange(PATCHES)
        features = encoder.encode(
            prims,
            config.vision,
            params,
            values,
            place // grid[1],
            place % grid[1],
            place < grid[0] * grid[1],
        )
        place = (grid[0], grid[1])
        return features, insert.joined_rows(prims, config.vision, params, features, place, TOKENS)

    return jax.jit(run)


def check_patches(fixture: Fixture, name: str) -> None:
    """Grid, token kinds and patch values from the bytes of the file; exact."""
    config = tiny_config() if name != "real" else preset("deepseek-v4.1-flash")
    image = read_image(fixture.input(f"{name}.png_bytes").tobytes(), config.vision)
    plan = image.plan
    sides = (plan.patch_rows, plan.patch_columns, plan.cell_rows, plan.cell_columns)
    compare.exact(f"{name}.grid", np.asarray(sides), fixture.take(f"{name}.grid"))
    grid = patches.grid_of(config, image.pixels)
    assert (grid.rows, grid.columns, grid.tokens) == (*sides[:2], plan.num_tokens)
    values = np.asarray(patches.pixel_values(jnp.asarray(patches.patch_rows(config, image.pixels))))
    if name == "real":
        key = "real.patches_every_97th"
        compare.exact(key, values[::97], fixture.take(key))
        return
    compare.exact(f"{name}.patches", values, fixture.take(f"{name}.patches"))
    compare.exact(f"{name}.types", token_kinds(plan), fixture.take(f"{name}.types"))


def check_encoder(fixture: Fixture, name: str, numerics: str) -> None:
    """Encoder and projector from the file's patches, padded as programs take them."""
    mode, key = NUMERICS[numerics], f"{name}.{numerics}"
    values = fixture.value(f"{name}.patches")
    grid = jnp.asarray(fixture.input(f"{name}.grid")[:2].astype(np.int32))
    given = jnp.asarray(np.pad(values, ((0, PATCHES - len(values)), (0, 0))))
    features, rows = _program(mode)(_params(fixture, mode), given, grid)
    check = compare.relative if numerics == "f32" else compare.rounded
    check(f"{key}.tower", features[: len(values)], fixture.take(f"{key}.tower"))
    kinds = fixture.input(f"{name}.types")
    rows = np.asarray(rows)[: len(kinds)]
    check(f"{key}.projected", rows[kinds == 1], fixture.take(f"{key}.projected"))
    for kind, value in ((0, START), (2, NEWLINE), (3, END)):
        assert (rows[kinds == kind] == value).all()


def check_rope(fixture: Fixture) -> None:
    """Angles of the released width on a grid of 3 x 5 patches; cos and sin 1e-6."""
    place = jnp.arange(15)
    vision = preset("deepseek-v4.1-flash").vision
    for name, got in zip(
        ("cos", "sin"), encoder.rope_2d(vision, place // 5, place % 5), strict=True
    ):
        key = f"rope2d.3x5.{name}"
        compare.absolute(key, got, fixture.take(key), 1e-6)


def _patches(name: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_patches(fixture, name)


def _encoder(name: str, numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_encoder(fixture, name, numerics)


CASES = (
    {f"patches {i}": _patches(f"img_{i}") for i in IMAGES}
    | {"patches real": _patches("real"), "rope": check_rope}
    | {f"encoder {i} {n}": _encoder(f"img_{i}", n) for i in IMAGES for n in NUMERICS}
)
SUITE = Suite("modules/vision", CASES)
pytestmark = pytest.mark.accept(12)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
