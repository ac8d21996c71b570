"""Whether a model has the same bits in any company: what `deepinfer-jax verify` runs.

Not called `verify`: a module of that name would hide `deepinfer_jax.verify`, the cached step.
"""
