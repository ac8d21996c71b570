"""Program lint: operations that level "batch" forbids (determinism.md 4.5).

`lint_jaxpr` reads what was traced, `lint_hlo` what the compiler made of it. Neither proves that
bits are equal; both find the usual ways to lose them, without running anything.
"""

from collections.abc import Callable
from typing import Any

import jax

from deepinfer_jax.numerics.lint_hlo import lint_hlo
from deepinfer_jax.numerics.lint_jaxpr import REASONS, Finding, Rule, lint_jaxpr


def lint_program(
    function: Callable[..., Any], *args: Any, rows: int | None = None, **jit_options: Any
) -> list[Finding]:
    """Returns the findings of both lints for a function at the shapes of `args`.

    Args:
        function: A function, or a jitted one (then without `jit_options`).
        *args: Arrays or `jax.ShapeDtypeStruct`; static arguments as they are.
        rows: Row count of the step, see `lint_jaxpr`.
        **jit_options: Keywords of `jax.jit`.
    """
    is_jitted = hasattr(function, "trace") and not jit_options
    jitted: Any = function if is_jitted else jax.jit(function, **jit_options)
    traced = jitted.trace(*args)
    text = traced.lower().compile().as_text()
    return lint_jaxpr(traced.jaxpr, rows=rows) + lint_hlo(text, rows=rows)


__all__ = ["REASONS", "Finding", "Rule", "lint_hlo", "lint_jaxpr", "lint_program"]
