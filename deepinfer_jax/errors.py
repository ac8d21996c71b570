"""Exceptions a caller may catch. All derive from `DeepInferError`.

A message states the rule, what was received, where, and what to do (style.md 3.9).
"""

from pallas_kernels.errors import KernelUnsupported


class DeepInferError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(DeepInferError, ValueError):
    """A config.json, preset or option that cannot be honoured."""


class CheckpointError(DeepInferError, ValueError):
    """A checkpoint whose files, names, shapes or dtypes do not match its config."""


class TokenizerError(DeepInferError, ValueError):
    """A tokenizer that does not belong to the checkpoint's config."""


class InputError(DeepInferError, ValueError):
    """A prompt, token id or request parameter outside its documented range."""


class GrammarError(InputError):
    """A grammar that is malformed, too large, or asks for what cannot be enforced."""


class KernelSelectionError(DeepInferError, KernelUnsupported):
    """A kernel implementation that was named but does not exist or cannot run here."""


class CapacityError(DeepInferError, RuntimeError):
    """Memory that cannot hold what was asked for; names required and available bytes."""


class CacheError(DeepInferError, RuntimeError):
    """A misused cache, or cache bookkeeping that broke one of its own laws."""
