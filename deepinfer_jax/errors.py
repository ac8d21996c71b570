"""Exceptions a caller may catch. All derive from `DeepInferError`.

A message states the rule, what was received, where, and what to do (style.md 3.9).
"""

from pallas_kernels.errors import KernelUnsupported


class DeepInferError(Exception):
    """Base class of every error this package raises on purpose.

    Examples:
        >>> try:
        ...     di.preset("gpt")
        ... except di.DeepInferError as error:
        ...     print(type(error).__name__)
        ConfigError
    """


class ConfigError(DeepInferError, ValueError):
    """A config.json, preset or option that cannot be honoured.

    Examples:
        >>> di.RuntimeConfig(max_seqs=0)
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.ConfigError: RuntimeConfig.max_seqs must be an integer >= 1, got 0
    """


class CheckpointError(DeepInferError, ValueError):
    """A checkpoint whose files, names, shapes or dtypes do not match its config.

    Examples:
        >>> di.load("no/such/folder/here")
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.CheckpointError: ...
    """


class TokenizerError(DeepInferError, ValueError):
    """A tokenizer that does not belong to the checkpoint's config, or that is needed and not there.

    Examples:
        >>> import dataclasses
        >>> di.LLM(dataclasses.replace(model, tokenizer=None)).encode("a text")
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.TokenizerError: a text prompt needs tokenizer.json: ...
    """


class InputError(DeepInferError, ValueError):
    """A prompt, token id or request parameter outside its documented range.

    Examples:
        >>> di.score(model.params, model.config, [5, -1])
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.InputError: token ids must lie in 0..2047; got -1 at position 1
    """


class GrammarError(InputError):
    """A grammar that is malformed, too large, or asks for what cannot be enforced.

    Examples:
        >>> di.Grammar.choice([])
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.GrammarError: ...
    """


class KernelSelectionError(DeepInferError, KernelUnsupported):
    """A kernel implementation that was named but does not exist or cannot run here.

    Examples:
        >>> di.load("nano", kernels={"rms_norm_quant": "handwritten"})
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.KernelSelectionError: ...
    """


class CapacityError(DeepInferError, RuntimeError):
    """Memory that cannot hold what was asked for; names required and available bytes.

    Examples:
        >>> di.Engine(model, di.RuntimeConfig(max_seqs=2, max_len=64, cache_bytes=1))
        Traceback (most recent call last):
            ...
        deepinfer_jax.errors.CapacityError: ...
    """


class CacheError(DeepInferError, RuntimeError):
    """A misused cache, or cache bookkeeping that broke one of its own laws.

    Callers see it only if an invariant of this package is broken; `RuntimeConfig(check=True)` looks
    for such breaks after every step.

    Examples:
        >>> issubclass(di.CacheError, di.DeepInferError)
        True
    """
