"""The image encoder in `deepinfer-jax plan`: its programs, its pool, and what an image costs."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from deepinfer_jax.config.model import ModelConfig

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.model.roofline import Hardware


def image_plan(
    config: ModelConfig, hardware: "Hardware", runtime: "RuntimeConfig"
) -> dict[str, Any]:
    """Returns the encoder's programs, traced, its pool and what images cost; {} without one."""
    from deepinfer_jax.engine.images import pool_bytes, pool_rows
    from deepinfer_jax.model.roofline import image_cost
    from deepinfer_jax.model.vision.patches import Grid
    from deepinfer_jax.vision.plan import plan_image

    vision = config.vision
    if vision is None:
        return {}
    plans = [plan_image(side, side, vision) for side in (1, 2**14)]  # the least and the most
    grids = [Grid(one.patch_rows, one.patch_columns, vision.downsample_ratio) for one in plans]
    costs = [image_cost(config, hardware, grid) for grid in grids]
    return {
        "pool_bytes": pool_bytes(config, pool_rows(config, runtime)),
        "programs": trace_programs(config),
        "costs": [
            {"canvas": [plan.width, plan.height], "seconds": cost.seconds} | asdict(cost)
            for plan, cost in zip(plans, costs, strict=True)
        ],
    }


def trace_programs(config: ModelConfig) -> list[dict[str, Any]]:
    """Returns size and result of every encoding program of a model, traced without any data."""
    import jax
    import jax.numpy as jnp

    from deepinfer_jax.checkpoint.abstract import abstract_params
    from deepinfer_jax.model.vision.encode import encode_program, vision_params
    from deepinfer_jax.model.vision.patches import encoder_sizes, vision_of

    params, found = vision_params(abstract_params(config)), []
    for size in encoder_sizes(config):
        width = 3 * vision_of(config).patch_size ** 2
        rows = jax.eval_shape(
            partial(encode_program, config=config, tokens=size.tokens),
            params,
            jax.ShapeDtypeStruct((size.patches, width), jnp.uint8),
            jax.ShapeDtypeStruct((2,), jnp.int32),
        )
        found.append({"tokens": size.tokens, "patches": size.patches, "rows": list(rows.shape)})
    return found


def print_images(console: "Console", images: dict[str, Any]) -> None:
    """Prints what `image_plan` returned."""
    if not images:
        return
    sizes = ", ".join(str(one["patches"]) for one in images["programs"])
    console.print(
        f"images: encoder programs of {sizes} patches; least time at published BF16 rates:"
    )
    for one in images["costs"]:
        width, height = one["canvas"]
        name = f"{width} x {height}, {one['tokens']} tokens"
        console.print(
            f"  {name:<28}{1e3 * one['seconds']:9.2f} ms, {one['operations'] / 1e12:.2f} TFLOP"
            f"  {1 / one['seconds']:>9,.0f} images/s a device"
        )
