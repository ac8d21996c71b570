"""An identity that no compiler sees through: it keeps a product or an exponential rounded."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.custom_jvp
def pin(x: jax.Array) -> jax.Array:
    """Returns float32 ``x`` unchanged (a NaN may change its payload), as a value of its own.

    LLVM contracts a product followed by an addition to a fused multiply-add when both end up in
    one loop, so ``a * a + b * b`` or the last multiply inside ``exp`` has other bits in another
    fusion. An integer minimum on the bit pattern, true of every number, sits between them and
    costs one vector instruction. ``lax.optimization_barrier`` does not help on CPU
    (determinism.md 5.1). Transparent to differentiation.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(jnp.minimum(bits, np.uint32(0xFFC00000)), jnp.float32)


@pin.defjvp
def _pin_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return pin(primals[0]), tangents[0]
