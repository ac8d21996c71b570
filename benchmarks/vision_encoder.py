"""Images per second of the image encoder at the released size, and its share of the roofline.

Random weights in checkpoint arithmetic; one image after the other, as the engine encodes them, from
patches on the host to rows on the device. The roofline counts the products of real patches at the
published BF16 rate (`model.roofline.image_cost`). One JSON line per canvas:

    python -m benchmarks.vision_encoder --json out.jsonl
    python -m benchmarks.vision_encoder --preset tiny_v41 --repeats 2      (any machine)
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.off_vs_plain import TINY, revision
from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.presets import preset
from deepinfer_jax.model.params import VisionParams
from deepinfer_jax.model.roofline import HARDWARE, image_cost
from deepinfer_jax.model.vision import encoder
from deepinfer_jax.model.vision.encode import encode_program
from deepinfer_jax.model.vision.patches import grid_of, padded_patches, size_for
from deepinfer_jax.vision.plan import plan_image

#: Sides of the images: the least canvas, a frame of 1080p, the most tokens.
SIDES = ((544, 544), (1920, 1080), (4096, 4096))


def encoder_config(name: str) -> ModelConfig:
    """Returns a config as `load` runs it here in checkpoint arithmetic at level "batch"."""
    config = read_config(TINY) if name == "tiny_v41" else preset(name)
    on_gpu = jax.default_backend() == "gpu"
    execution = replace(
        config.execution, numerics="checkpoint", branches="static" if on_gpu else "data"
    )
    return replace(config, execution=execution)


def random_vision(config: ModelConfig) -> VisionParams:
    """Returns normal weights that keep rows near one, norms of ones and small biases."""

    def draw(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return jnp.ones(spec.shape, spec.dtype)
        key = jax.random.fold_in(jax.random.key(0), sum(name.encode()))
        scale = 0.02 if "bias" in name or len(spec.shape) == 1 else spec.shape[-1] ** -0.5
        return (scale * jax.random.normal(key, spec.shape)).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config).vision)


def measure(
    config: ModelConfig, params: VisionParams, side: tuple[int, int], repeats: int, device: str
) -> dict[str, Any]:
    """Returns what one canvas costs."""
    assert config.vision is not None
    plan = plan_image(*side, config.vision)
    draw = np.random.default_rng(0).integers
    pixels = draw(0, 256, (plan.height, plan.width, 3), dtype=np.uint8)
    grid = grid_of(config, pixels)
    size = size_for(config, grid)
    sides = jnp.asarray([grid.rows, grid.columns], jnp.int32)

    def run() -> jax.Array:
        patches = jnp.asarray(padded_patches(config, pixels, size))
        return encode_program(params, patches, sides, config=config, tokens=size.tokens)

    begin = time.perf_counter()
    first = np.asarray(jax.block_until_ready(run()))
    compile_s = time.perf_counter() - begin
    patches = jnp.asarray(padded_patches(config, pixels, size))
    on_device = []
    end_to_end = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        end_to_end.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        found = [
            encode_program(params, patches, sides, config=config, tokens=size.tokens)
            for _ in range(4)
        ]
        jax.block_until_ready(found)
        on_device.append((time.perf_counter() - begin) / 4)
    assert (np.asarray(run()) == first).all(), "the same image must have the same bits"
    point = {
        "canvas": [plan.width, plan.height],
        "tokens": grid.tokens,
        "patches": grid.patches,
        "padded_patches": size.patches,
        "compile_s": compile_s,
        "end_to_end_ms": 1e3 * statistics.median(end_to_end),
        "median_ms": 1e3 * statistics.median(on_device),
        "p10_ms": 1e3 * float(np.quantile(on_device, 0.1)),
        "p90_ms": 1e3 * float(np.quantile(on_device, 0.9)),
        "images_per_second": 1 / statistics.median(on_device),
        "repeats": repeats,
        "relative_difference_from_float32_attention": _difference(config, params, run, grid.tokens),
    }
    if device in HARDWARE:
        cost = image_cost(config, HARDWARE[device], grid)
        point |= {
            "operations": cost.operations,
            "roofline_ms": 1e3 * cost.seconds,
            "share_of_roofline": cost.seconds / statistics.median(on_device),
        }
    return point


def _difference(config: ModelConfig, params: VisionParams, run: Any, tokens: int) -> float:
    """Returns how far the rows lie from those with unfused attention, in relative norm."""
    if not (config.execution.branches == "static" and encoder.has_fused_attention()):
        return 0.0
    fused = np.asarray(run())[:tokens]
    known = encoder.has_fused_attention
    try:
        encoder.has_fused_attention = lambda: False
        jax.clear_caches()
        plain = np.asarray(run())[:tokens]
    finally:
        encoder.has_fused_attention = known
        jax.clear_caches()
    return float(np.linalg.norm(fused - plain) / np.linalg.norm(plain))


def main() -> None:
    """Prints one JSON line per canvas."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="deepseek-v4.1-flash")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    options = parser.parse_args()
    kind = jax.devices()[0].device_kind
    device = next((name for name in HARDWARE if name in kind), "")
    config = encoder_config(options.preset)
    params = random_vision(config)
    environment = {
        "question": "vision_encoder",
        "preset": options.preset,
        "jax": version("jax"),
        "device": kind,
        "fused_attention": encoder.has_fused_attention(),
        "revision": revision(),
    }
    for side in SIDES:
        point = measure(config, params, side, options.repeats, device)
        line = json.dumps({**environment, **point})
        print(line, flush=True)
        if options.json:
            with options.json.open("a") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    main()
