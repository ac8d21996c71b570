"""How much of a matched prefix is used, and where checkpoints are taken (engine.md 4.4, 4.5).

Pure functions of lengths: the hit may not depend on anything else, or outputs would depend on luck.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from deepinfer_jax.config.model import ModelConfig, Replay
from deepinfer_jax.config.roles import encoder_layers
from deepinfer_jax.errors import CacheError, ConfigError

Restore = Literal["checkpoint", "halo", "bounded"]

#: Tokens between the checkpoints inside a long prompt.
CHECKPOINT_SPACING = 2048


class Miss(StrEnum):
    """Why nothing is reused."""

    NO_MATCH = "no match"
    NO_CHECKPOINT = "no checkpoint"
    PROMPT_TOO_SHORT = "prompt too short"
    MATCH_TOO_SHORT = "match shorter than the rows to recompute"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BYPASS = "bypass"
    PREFIX_CACHE_OFF = "prefix cache off"


@dataclass(frozen=True, slots=True)
class Hit:
    """Reused tokens (a multiple of block_tokens); `reason` says why there are none.

    Raises:
        CacheError: not exactly one of length and reason.
    """

    length: int
    reason: Miss | None = None

    def __post_init__(self) -> None:
        if (self.length > 0) != (self.reason is None):
            raise CacheError(f"a hit of 0 tokens, and no other, has a reason; got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRule:
    """What fixes the hit length beside the prompt; from `hit_rule`.

    keep_tokens: K, decoder rows that always run with replay on. window: W. window_layers: N_h,
    layers whose window rows are missing after a hit. decoder_rows: decoder rows that make the last
    window + rollback rows of every decoder ring exact, whatever ran before them.
    """

    block_tokens: int
    replay: Replay
    keep_tokens: int
    restore: Restore
    window: int
    window_layers: int
    decoder_rows: int

    @property
    def recomputed_rows(self) -> int:
        """Rows before the hit position that run again to rebuild the windows."""
        if self.restore == "checkpoint":
            return 0
        if self.restore == "bounded":
            return self.window
        return halo_rows(self.window, self.window_layers)


def hit_rule(
    config: ModelConfig,
    *,
    block_tokens: int,
    replay: Replay,
    keep_tokens: int,
    restore: Restore,
    rollback: int,
) -> HitRule:
    """Returns the rule of a model and its options.

    Raises:
        ConfigError: `restore="bounded"` at batch level, replay of a model
            without an encoder half, or `keep_tokens` less than window + rollback with replay on.
    """
    window = config.attention.sliding_window
    restored = window_layers(config, replay)
    rebuilt = config.num_hidden_layers - restored  # none with replay off
    if restore == "bounded" and config.execution.determinism == "batch":
        raise ConfigError(
            'prefix_restore="bounded" makes outputs depend on what is cached, which '
            'determinism="batch" excludes: use "checkpoint" or "halo", or determinism="run"'
        )
    if replay != "off" and keep_tokens < window + rollback:
        raise ConfigError(
            f"replay_keep_tokens must be >= {window + rollback} (window {window} + rollback "
            f"{rollback}), so that rings stay complete after a rollback; got {keep_tokens}"
        )
    return HitRule(
        block_tokens=block_tokens,
        replay=replay,
        keep_tokens=keep_tokens,
        restore=restore,
        window=window,
        window_layers=restored,
        decoder_rows=halo_rows(window, rebuilt, rollback),
    )


def window_layers(config: ModelConfig, replay: Replay) -> int:
    """Returns N_h, the layers whose windows a hit must restore: replay rebuilds the decoder's."""
    return config.num_hidden_layers if replay == "off" else encoder_layers(config)


def halo_rows(window: int, layers: int, rollback: int = 0) -> int:
    """Returns the rows to run so that the last `window + rollback` rows of `layers` layers are
    exact: each layer below needs `window - 1` rows more.
    """
    if not layers:
        return 0
    return window + rollback + (layers - 1) * (window - 1)


def usable_hit(
    rule: HitRule,
    length: int,
    matched: int,
    checkpoints: Iterable[int],
    *,
    prompt: int | None = None,
    bypass: Miss | None = None,
) -> Hit:
    """Returns how many tokens of a prompt are reused.

    Args:
        rule: from `hit_rule`.
        length: tokens of the prompt (on recovery: of prompt and output).
        matched: tokens in its published blocks.
        checkpoints: positions at which a window checkpoint is held on that path.
        prompt: on recovery, tokens of the prompt alone; None at first prefill.
        bypass: why this request must not reuse anything, if so.
    """
    if bypass is not None:
        return Hit(0, bypass)
    border = _last_border(rule, length, length if prompt is None else prompt)
    usable = min(matched, border)
    if not border:
        return Hit(0, Miss.PROMPT_TOO_SHORT)
    if not usable:
        return Hit(0, Miss.NO_MATCH)
    if rule.restore == "checkpoint":
        newest = max((c for c in checkpoints if c <= usable), default=0)
        return Hit(newest) if newest else Hit(0, Miss.NO_CHECKPOINT)
    if usable > rule.recomputed_rows:
        return Hit(usable)
    too_short = border <= rule.recomputed_rows
    return Hit(0, Miss.PROMPT_TOO_SHORT if too_short else Miss.MATCH_TOO_SHORT)


def first_decoder_row(rule: HitRule, prompt: int, length: int) -> int:
    """Returns the `floor` of a sequence's slot: where its decoder layers begin (engine.md 4.4).

    K tokens before the end of the prompt, for the life of the request: rows then see what they saw
    at first, so recovery after preemption gives the same bits. A recovery at `length` may begin
    later, where enough rows follow to make the rings that later rows read exact. 0 without replay.

    Args:
        rule: from `hit_rule`.
        prompt: tokens of the prompt at first prefill.
        length: tokens to prefill now: of the prompt, on recovery of prompt and output.
    """
    if rule.replay == "off":
        return 0
    enough = max(rule.keep_tokens, rule.decoder_rows)
    return max(prompt - rule.keep_tokens, length - enough, 0)


def _last_border(rule: HitRule, length: int, prompt: int) -> int:
    """Returns the last block border to resume at: one row must run, or all decoder rows."""
    cap = length - 1 if rule.replay == "off" else first_decoder_row(rule, prompt, length)
    return rule.block_tokens * (max(cap, 0) // rule.block_tokens)


def checkpoint_positions(rule: HitRule, length: int) -> tuple[int, ...]:
    """Returns where the prefill of a prompt is cut to save a window checkpoint, ascending.

    The last border that a repeat of the prompt may use, and every 2048 tokens, rounded down to a
    border. Empty unless `rule.restore` is "checkpoint".
    """
    if rule.restore != "checkpoint":
        return ()
    spaced = range(CHECKPOINT_SPACING, length + 1, CHECKPOINT_SPACING)
    positions = {rule.block_tokens * (place // rule.block_tokens) for place in spaced}
    return tuple(sorted((positions | {_last_border(rule, length, length)}) - {0}))
