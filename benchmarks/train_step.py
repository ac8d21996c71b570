"""How long does a training step of nano take? One JSON line:

    python -m benchmarks.train_step --batch 16 --length 2048 [--no-remat] [--repeats 5]

Random token ids: routing is that of untrained routers. Compilation is timed apart. The loss and the
gradient norm are checked to be finite before anything is printed.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.engram.vocabulary import TokenMap
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.init import init_params
from deepinfer_jax.training.losses import LossSettings
from deepinfer_jax.training.state import OptimiserSettings, compiled_step, initial_state


def main() -> None:
    """Times compilation and steps, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-remat", action="store_true")
    parser.add_argument("--index-loss", type=float, default=0.1)
    parser.add_argument("--trace", help="folder for a profile of one more step")
    chosen = parser.parse_args()
    config = nano_config()
    token_map = TokenMap((np.arange(config.vocab_size) % 3500).astype(np.int32))
    loss = LossSettings(index_coefficient=chosen.index_loss, remat=not chosen.no_remat)
    settings = OptimiserSettings(steps=1000, loss=loss)
    state = initial_state(init_params(config, 0, token_map), settings)
    shape = (chosen.batch, chosen.length)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, shape), jnp.int32)
    batch = (ids, jnp.ones(shape, jnp.float32))
    started = time.perf_counter()
    step = compiled_step(config, settings).lower(state, batch).compile()  # pyright: ignore
    compile_s = time.perf_counter() - started
    memory = step.memory_analysis()
    times = []
    for _ in range(chosen.repeats + 1):
        started = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        times.append(time.perf_counter() - started)
    if not all(np.isfinite(float(metrics[name])) for name in ("loss", "gradient_norm")):
        raise SystemExit(f"not finite: {metrics}")
    if chosen.trace:
        with jax.profiler.trace(chosen.trace):
            jax.block_until_ready(step(state, batch))
    median = statistics.median(times[1:])  # the first step also warms up
    print(
        json.dumps(
            {
                "benchmark": "train_step",
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
                "batch": chosen.batch,
                "length": chosen.length,
                "remat": not chosen.no_remat,
                "index_coefficient": chosen.index_loss,
                "compile_s": round(compile_s, 2),
                "step_ms": round(median * 1e3, 2),
                "step_ms_min": round(min(times[1:]) * 1e3, 2),
                "step_ms_max": round(max(times[1:]) * 1e3, 2),
                "repeats": chosen.repeats,
                "tokens_per_s": round(chosen.batch * chosen.length / median),
                "temporary_bytes": memory.temp_size_in_bytes if memory else None,
                "loss": float(metrics["loss"]),
            }
        )
    )


if __name__ == "__main__":
    main()
