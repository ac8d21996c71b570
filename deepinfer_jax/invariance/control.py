"""The positive control: a checker that notices nothing is void (determinism.md 6)."""

from dataclasses import replace

import jax
import numpy as np
from jax import lax

from deepinfer_jax.model.registry import AnyParams

CONTROL = "control: weight bits flipped"


def flipped(params: AnyParams) -> AnyParams:
    """Returns the parameters with one bit of every weight of the final norm flipped.

    The lowest one that BF16 holds: a lower bit may be rounded away.
    """
    norm = params.norm
    whole, bit = {2: (np.uint16, 1), 4: (np.uint32, 1 << 16)}[norm.dtype.itemsize]
    pattern = lax.bitcast_convert_type(norm, whole) ^ whole(bit)
    changed = lax.bitcast_convert_type(pattern, norm.dtype)
    return replace(params, norm=jax.device_put(changed, norm.sharding))
