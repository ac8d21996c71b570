"""How a model is run: capacities of the engine (architecture.md 4)."""

from dataclasses import dataclass
from typing import ClassVar

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import ConfigError

DEFAULT_MAX_LEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Capacities; none of them changes a bit of any output.

    max_seqs: sequences that run together; more prompts wait. max_tokens_per_step: rows of one
    prefill step. max_len: longest sequence, None for the model's limit or 4096, whichever is less.
    block_tokens: tokens per cache page.

    Raises:
        ConfigError: a value outside its range.
    """

    __no_type_check__: ClassVar[bool] = True  # `__post_init__` checks, and says what is legal

    max_seqs: int = 64
    max_tokens_per_step: int = 2048
    max_len: int | None = None
    block_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_tokens_per_step", "max_len", "block_tokens"):
            value = getattr(self, name)
            if value is None and name == "max_len":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"RuntimeConfig.{name} must be an integer >= 1, got {value!r}")
        if self.block_tokens % 128:
            raise ConfigError(
                "RuntimeConfig.block_tokens must be a multiple of 128 (compressed groups and index "
                f"blocks may not straddle a page), got {self.block_tokens}"
            )

    def longest(self, config: ModelConfig) -> int:
        """Returns the longest sequence, prompt and completion together, of this model."""
        return min(config.max_position_embeddings, self.max_len or DEFAULT_MAX_LEN)
