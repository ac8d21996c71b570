"""The weights of an engine: those of the model, in the form in which its programs take them."""

import jax

from deepinfer_jax.checkpoint.expand import expand_float32
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.expert_load import check_rebalancing
from deepinfer_jax.errors import InputError
from deepinfer_jax.loading import fits_expanded
from deepinfer_jax.model.params import same_form
from deepinfer_jax.model.rebalance import with_extras
from deepinfer_jax.model.registry import AnyParams


def engine_weights(config: ModelConfig, params: AnyParams, runtime: RuntimeConfig) -> AnyParams:
    """Returns the weights as the programs take them: of a small model as float32.

    Exactly, so no bit of any output changes. A tile of few rows would spend more time on expanding
    weights than on products, and again for the next tile. With `rebalance_steps` the experts are
    the engine's own, which it can move; those of the model stay where they are.

    Raises:
        ConfigError: `rebalance_steps` cannot be honoured.
    """
    check_rebalancing(config, runtime)
    if not config.execution.kernels and fits_expanded(config):
        params = expand_float32(params)
    if runtime.rebalance_steps is None:
        return params
    return with_extras(params, config, runtime.redundant_experts)


def require_same_form(present: AnyParams, wanted: AnyParams) -> None:
    """Checks that weights can take the place of others.

    Raises:
        InputError: they differ in form, or other processes would go on with the present ones.
    """
    if jax.process_count() > 1:
        raise InputError(
            f"replace_params needs a job of one process, this one has {jax.process_count()}: load "
            "the other weights in a new job"
        )
    if not same_form(present, wanted):
        raise InputError("replace_params needs a tree of the same structure, shapes and dtypes")
