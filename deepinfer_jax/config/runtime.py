"""How a model is run: capacities and policies of the engine (architecture.md 4)."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from deepinfer_jax.config.model import ModelConfig, Replay
from deepinfer_jax.errors import ConfigError

DEFAULT_MAX_LEN = 4096
#: Positions that may be taken back: draft length + 1.
ROLLBACK = 6
DraftPolicyName = Literal["scheduled", "fixed", "threshold"]
Restore = Literal["checkpoint", "halo", "bounded"]
RecordMode = Literal["ids", "logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How sequences are run. At level "batch" nothing but `replay` changes a bit of any output.

    max_seqs: sequences that run together; more wait. max_tokens_per_step: rows of one
    step; decode rows come first, and a prompt advances by one row at least.
    max_len: longest sequence, None for the model's limit or 4096, whichever is less.
    block_tokens: tokens per cache block, a multiple of the compression ratios and of the index
    blocks. cache_bytes: of the cache on the device; None is 1 GiB on CPU and 80 % of the free
    memory of a GPU, but no more than all sequences at full length can use. prefix_cache: reuse the
    rows of equal prompt beginnings. prefix_restore: how windows are rebuilt after a hit (engine.md
    4.5): saved in host memory, recomputed exactly, or recomputed from one window ("bounded", not
    exact, refused at "batch"). checkpoint_bytes: host memory of saved windows. replay: "mask" and
    "compact" limit what late layers see of a prompt to its last replay_keep_tokens (the released
    behaviour; compact also skips the rows). async_depth: steps in flight before a result is read.
    drafting: speculative decoding; None is on if the checkpoint has draft stages, True raises if it
    has none. draft_policy: how many drafts are verified: "scheduled" (what pays, from confidences
    and the measured cost of rows), "fixed" (draft_length of each round) or "threshold" (while the
    chance that all up to here are accepted is at least draft_threshold). max_logprobs: most
    alternatives a request may ask for. max_stop_ids: of one request, the end token included.
    record: what `RequestOutput.record` holds of an output (determinism.md 7): "ids", "logits" for a
    hash of the logits of every token too, None for no record. check: verify the engine's
    bookkeeping after every step (slow). grammar_seconds: what compiling a grammar may take before
    its request ends. warm_grammars: compile the programs of requests with grammars beforehand.
    rebalance_steps: on a mesh whose devices share the experts, place those of every layer again
    after so many steps, by the rows they got in them; None never. rebalance_gain: least share of
    the busiest device's rows that this must save. redundant_experts: places a layer has for second
    copies of busy experts, rounded up to a multiple of the devices.

    Raises:
        ConfigError: a value outside its range.
        TypeError: a keyword that does not exist; the message names the nearest one.

    Examples:
        >>> di.RuntimeConfig(max_seq=8)
        Traceback (most recent call last):
            ...
        TypeError: RuntimeConfig has no field 'max_seq'; did you mean 'max_seqs'?
    """

    __no_type_check__: ClassVar[bool] = True  # `__post_init__` checks, and says what is legal

    max_seqs: int = 64
    max_tokens_per_step: int = 2048
    max_len: int | None = None
    block_tokens: int = 128
    cache_bytes: int | None = None
    prefix_cache: bool = True
    prefix_restore: Restore = "checkpoint"
    checkpoint_bytes: int = 2**30
    replay: Replay = "off"
    replay_keep_tokens: int = 140
    async_depth: int = 1
    drafting: bool | None = None
    draft_policy: DraftPolicyName = "scheduled"
    draft_length: int | None = None
    draft_threshold: float | None = None
    max_logprobs: int = 20
    max_stop_ids: int = 16
    record: RecordMode | None = "ids"
    check: bool = False
    grammar_seconds: float = 10.0
    warm_grammars: bool = False
    rebalance_steps: int | None = None
    rebalance_gain: float = 0.05
    redundant_experts: int = 0

    def __new__(cls, *args: Any, **fields: Any) -> "RuntimeConfig":
        """Rejects unknown keywords by name; the generated `__init__` does the rest."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, 1)
                raise TypeError(
                    f"RuntimeConfig has no field {name!r}"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (is_legal, rule) in _RULES.items():
            value = getattr(self, name)
            if not is_legal(value):
                raise ConfigError(f"RuntimeConfig.{name} must be {rule}, got {value!r}")
        needed = {"fixed": "draft_length", "threshold": "draft_threshold"}
        for policy, name in needed.items():
            if (getattr(self, name) is not None) != (self.draft_policy == policy):
                raise ConfigError(
                    f'RuntimeConfig.{name} belongs to draft_policy="{policy}", and that needs it; '
                    f"got {name}={getattr(self, name)!r} with draft_policy={self.draft_policy!r}"
                )
        if self.redundant_experts and self.rebalance_steps is None:
            raise ConfigError(
                "RuntimeConfig.redundant_experts are copies that rebalance_steps places, got "
                f"{self.redundant_experts} with rebalance_steps=None: give it a number of steps"
            )

    def longest(self, config: ModelConfig) -> int:
        """Returns the longest sequence, prompt and completion together, of this model."""
        return min(config.max_position_embeddings, self.max_len or DEFAULT_MAX_LEN)


def _integer(low: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low


def _optional(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or rule(v)


_POSITIVE = (_integer(1), "an integer >= 1")
_FLAG = (lambda v: isinstance(v, bool), "True or False")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_seqs": _POSITIVE,
    "max_tokens_per_step": _POSITIVE,
    "max_len": (_optional(_integer(1)), "None or an integer >= 1"),
    "block_tokens": (
        lambda v: _integer(1)(v) and v % 16 == 0,
        "a multiple of 16 (compressed groups and index blocks may not straddle a block)",
    ),
    "cache_bytes": (_optional(_integer(1)), "None or an integer >= 1"),
    "prefix_cache": _FLAG,
    "prefix_restore": (
        lambda v: v in ("checkpoint", "halo", "bounded"),
        '"checkpoint", "halo" or "bounded"',
    ),
    "checkpoint_bytes": (_integer(0), "an integer >= 0"),
    "replay": (lambda v: v in ("off", "mask", "compact"), '"off", "mask" or "compact"'),
    "replay_keep_tokens": _POSITIVE,
    "async_depth": (lambda v: _integer(0)(v) and v <= 2, "0, 1 or 2"),
    "drafting": (_optional(lambda v: isinstance(v, bool)), "None, True or False"),
    "draft_policy": (
        lambda v: v in ("scheduled", "fixed", "threshold"),
        '"scheduled", "fixed" or "threshold"',
    ),
    "draft_length": (_optional(_integer(0)), "None or an integer >= 0"),
    "draft_threshold": (
        _optional(lambda v: isinstance(v, float) and 0 <= v <= 1),
        "None or a float in [0, 1]",
    ),
    "max_logprobs": (_integer(0), "an integer >= 0"),
    "max_stop_ids": _POSITIVE,
    "record": (lambda v: v in ("ids", "logits", None), '"ids", "logits" or None'),
    "check": _FLAG,
    "grammar_seconds": (
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < 1e6,
        "a number of seconds > 0",
    ),
    "warm_grammars": _FLAG,
    "rebalance_steps": (_optional(_integer(2)), "None or an integer >= 2"),
    "rebalance_gain": (
        lambda v: isinstance(v, float) and 0 <= v < 1,
        "a float in [0, 1)",
    ),
    "redundant_experts": (_integer(0), "an integer >= 0"),
}
