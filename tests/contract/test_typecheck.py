"""In tests, shapes and types of deepinfer_jax are checked at run time, in every worker."""

import warnings

import jaxtyping
import pytest

from deepinfer_jax import environment


def test_wrong_argument_type_raises():
    assert environment.parse_xla_flags("--a=1") == {"a": "1"}
    with pytest.raises(jaxtyping.TypeCheckError):
        environment.parse_xla_flags(3)


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="text"):
        warnings.warn("text", UserWarning, stacklevel=1)


def test_compilations_are_kept_between_runs():
    import jax

    assert jax.config.values["jax_compilation_cache_dir"]
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0
