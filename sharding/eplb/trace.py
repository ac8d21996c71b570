"""The reference load on which placements are compared (parallelism.md 4.4), exact for a seed."""

import numpy as np


def reference_trace(
    experts: int, exponent: float, seed: int, *, tokens: int | None = None, steps: int = 300
) -> np.ndarray:
    """Returns rows by step and expert of a Zipf load with bursts, int64 [steps, experts].

    exponent: of the popularity. tokens: of a step, top-6 each; None takes 2048, or 4096 from 384
    experts on. Built without `multinomial`, whose draws changed between versions of NumPy.
    """
    tokens = tokens or (2048 if experts < 384 else 4096)
    rng = np.random.default_rng(seed)
    base = (np.arange(1, experts + 1) ** -exponent)[rng.permutation(experts)]
    base /= base.sum()
    trace = np.zeros((steps, experts), np.int64)
    for step in range(steps):
        chance = base * np.exp(0.3 * rng.normal(size=experts))
        chance = np.minimum(chance / chance.sum(), 1 / 6)
        chance /= chance.sum()
        drawn = np.searchsorted(np.cumsum(chance), rng.random(6 * tokens))
        trace[step] = np.bincount(np.minimum(drawn, experts - 1), minlength=experts)
    return trace
