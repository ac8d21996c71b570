"""The engine's device where the network runs on an Ascend NPU (`load(kernels="ascend")`).

The packed plan is read on the host. The network of every chunk and every round is one custom call
of `backends.AscendModel`; tokens are chosen on the host, by the same functions of logits as
everywhere. Each slot has a cache of its own there, so blocks are only counted and none is shared.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from deepinfer_jax.backends import AscendModel, require_length
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.ascend_inputs import engram_ids_of, rotation_of
from deepinfer_jax.engine.choose import token_record
from deepinfer_jax.engine.device import Flight, flown
from deepinfer_jax.engine.drafting import Drafting
from deepinfer_jax.engine.layout import (
    ADMIT_INTS,
    RESULT,
    PlanLayout,
    PlanParts,
    header_word,
    unpack,
)
from deepinfer_jax.engine.marks import edit_rows
from deepinfer_jax.engine.plan import StepPlan
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.engine.rows import TILE
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.slots import (
    ENDED,
    SlotState,
    admit,
    advance,
    init_slots,
    null_marks,
    row_edits,
    set_marks_program,
)
from deepinfer_jax.errors import ConfigError, DeepInferError
from deepinfer_jax.grammar.masks import MaskRows
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import CacheLayout
from deepinfer_jax.record.logit_hash import logit_hash_tile
from deepinfer_jax.sampling.edits import unpack_bitmask
from deepinfer_jax.sampling.logprobs import TokenLogprobs, raw_logprobs
from deepinfer_jax.sampling.sample import sample_tile

#: Rows of a prefill step of the bridge.
CHUNK = 8


def ascend_runtime(config: ModelConfig, runtime: RuntimeConfig) -> RuntimeConfig:
    """Returns a runtime as the bridge can run it: prefixes are not shared, nothing is drafted.

    Args:
        config: of a model; one that was not loaded with `kernels="ascend"` keeps its runtime.
        runtime: as asked for.

    Raises:
        ConfigError: an option that it cannot honour.
        DeepInferError: also an `AscendUnsupported`: sequences longer than its operators reach.
    """
    if not config.execution.on_ascend:
        return runtime
    require_length(config, runtime.max_len or 1)
    for name, is_kept, rule in (
        ("drafting", not runtime.drafting, "None or False: draft stages have no operators there"),
        ("replay", runtime.replay == "off", '"off": every row of a prompt sees all before it'),
        ("cache_bytes", runtime.cache_bytes is None, "None: caches are max_seqs times max_len"),
    ):
        if not is_kept:
            raise ConfigError(
                f'RuntimeConfig.{name} with kernels="ascend" must be {rule}; received '
                f"{getattr(runtime, name)!r}"
            )
    return replace(runtime, drafting=False, prefix_cache=False)


class AscendDevice:
    """Takes the place of `engine.device.Device`; a step is done when `dispatch` returns.

    alternatives: k of log-probabilities. hashes: whether steps return hashes of logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        cache: CacheLayout,
        *,
        stop_ids: int,
        drafting: Drafting | None,
        alternatives: int,
        hashes: bool,
        image_rows: int = 0,
    ) -> None:
        """Uploads the weights and allocates a cache of the longest sequence for every slot.

        Raises:
            DeepInferError: also an `AscendError`; memory ran out, or an operator may not run here.
        """
        assert drafting is None, "ascend_runtime keeps drafts out"
        assert not image_rows, "load keeps images out"
        self.config, self.sequences = config, cache.num_slots - 1
        self.max_len = min(cache.max_blocks * cache.block_tokens, config.max_position_embeddings)
        self._tokens = partial(
            choose_tokens, image=config.image_token_id, alternatives=alternatives, hashes=hashes
        )
        self._scores = jax.jit(partial(raw_logprobs, top=alternatives))
        self._slots = init_slots(cache.num_slots, config.vocab_size, stop_ids)
        self._model = self._upload(params)
        self._params = params

    @property
    def params(self) -> Params:
        """Parameters of the model, as they are on the host."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        self._model.close()
        self._model, self._params = self._upload(params), params

    def _upload(self, params: Params) -> AscendModel:
        return AscendModel(
            self.config,
            params,
            rotation=rotation_of(self.config),
            engram_ids=engram_ids_of(self.config, params),
            max_len=self.max_len,
            sequences=self.sequences,
            chunk=min(CHUNK, self.max_len),
        )

    def dispatch(
        self, plan: StepPlan, now: float = 0.0, fill: Callable[[], MaskRows] | None = None
    ) -> Flight:
        """Runs a step; arguments as `Device.dispatch`."""
        with jax.transfer_guard("allow"):  # everything comes from the host and goes back to it
            for action, arguments in plan.before:
                getattr(self, action)(*arguments)
            parts = unpack(plan.layout, plan.vector)
            self._admit(parts.admits)
            alive = np.array(self._slots.alive)  # a copy: the slots are donated
            ended, prompt = self._run_prompts(plan.layout, parts, alive)
            emitters = self._run_rounds(parts, alive)
            for row in parts.ends[: header_word(parts, "ends")].tolist():
                slot = int(parts.slot[row])
                emitters.append((slot, ended[slot] if alive[slot] else None))
            masks = None if fill is None else fill()
            return flown(plan, now, self._choose(plan.layout, emitters, prompt, masks), [])

    def _admit(self, admits: np.ndarray) -> None:
        """Opens the slots of admitted sequences; a forked one keeps what was copied."""
        slot, first = ADMIT_INTS.index("slot"), ADMIT_INTS.index("first")
        for entry in admits[admits[:, slot] > 0]:
            self._model.begin(int(entry[slot]) - 1, int(entry[first]))
        self._slots = _admitted(self._slots, admits)

    def _run_prompts(
        self, layout: PlanLayout, parts: PlanParts, alive: np.ndarray
    ) -> tuple[dict[int, np.ndarray], TokenLogprobs | None]:
        """Returns (logits behind the last prompt row of every slot, scores of the prompt rows)."""
        count = int(header_word(parts, "prompt_rows"))
        slots, ids = parts.slot[:count], parts.ids[:count]
        cuts = np.flatnonzero(np.diff(slots)) + 1
        ended: dict[int, np.ndarray] = {}
        found: dict[int, np.ndarray] = {}  # logits of scored rows
        for rows in np.split(np.arange(count), cuts) if count else ():
            slot = int(slots[rows[0]])
            if not alive[slot]:
                continue
            is_scored = parts.target[rows] >= 0
            # The bridge returns logits of a call's last row only.
            pieces = np.split(rows, len(rows)) if is_scored.any() else [rows]
            for piece in pieces:
                ended[slot] = self._model.extend(slot - 1, ids[piece].tolist())
                if parts.target[piece[-1]] >= 0:
                    found[int(piece[-1])] = ended[slot]
        if not header_word(parts, "scores_prompt"):
            return ended, None
        return ended, self._score(layout.rows, parts.target, found)

    def _score(
        self, size: int, target: np.ndarray, found: dict[int, np.ndarray]
    ) -> TokenLogprobs | None:
        """Returns raw log-probabilities of the next ids of scored rows, by row of the plan.

        None if no row is scored: the last one of a prompt has no next id.
        """
        scores, rows = [], list(found)
        for tile in _tiles(rows):
            logits = _stacked([found[row] for row in tile], self.config.vocab_size)
            wanted = np.full(TILE, -1, np.int32)
            wanted[: len(tile)] = target[tile]
            scores.append(jax.device_get(self._scores(logits, wanted)))
        spread = partial(_spread, size, rows)
        return jax.tree.map(spread, *scores) if scores else None

    def _run_rounds(
        self, parts: PlanParts, alive: np.ndarray
    ) -> list[tuple[int, np.ndarray | None]]:
        """Returns (slot, logits behind its newest token, None if it has stopped) of every round."""
        last = np.asarray(self._slots.last).tolist()
        slots = parts.rounds[: header_word(parts, "rounds")].tolist()
        return [
            (slot, self._model.extend(slot - 1, [last[slot]]) if alive[slot] else None)
            for slot in slots
        ]

    def _choose(
        self,
        layout: PlanLayout,
        emitters: list[tuple[int, np.ndarray | None]],
        prompt: TokenLogprobs | None,
        masks: MaskRows | None,
    ) -> StepResult:
        """Returns what the host reads: the token of every emitter that has not stopped."""
        words = np.full((layout.slots, -(-self.config.vocab_size // 32)), -1, np.int32)
        if masks is not None:
            words[masks.place] = masks.words
        rounds = np.zeros((layout.slots, layout.result_width), np.int32)
        told: list[Any] = []
        for numbers in _tiles(list(range(len(emitters)))):
            slot, index = np.zeros(TILE, np.int32), np.zeros(TILE, np.int32)
            is_live = np.zeros(TILE, bool)
            for place, number in enumerate(numbers):
                slot[place], logits = emitters[number]
                is_live[place] = logits is not None
                index[place] = self._model.length(int(slot[place]) - 1)
            rows = _stacked([emitters[number][1] for number in numbers], self.config.vocab_size)
            allowed = np.full((TILE, words.shape[1]), -1, np.int32)
            allowed[: len(numbers)] = words[numbers]
            self._slots, chosen, *reported = self._tokens(
                self._slots, rows, slot, index, is_live, allowed
            )
            told.append(jax.device_get(reported))
            token, status, code, generation = jax.device_get(chosen)
            for place, number in enumerate(numbers):
                live = bool(is_live[place])
                values = dict.fromkeys(RESULT, 0)
                values |= {"slot": slot[place], "generation": generation[place], "first": number}
                values |= {"count": live, "code": code[place] if live else ENDED}
                values |= {"status": status[place] if live else 0}
                rounds[number] = [*values.values(), token[place] if live else -1]
        if not told:
            return StepResult(rounds=rounds, chosen=None, prompt=prompt)
        spread = partial(_spread, layout.slots, list(range(len(emitters))))
        logprobs, hashes = jax.tree.map(spread, *told)
        return StepResult(rounds=rounds, chosen=logprobs, prompt=prompt, hashes=hashes)

    def edit(self, sequence: Sequence) -> None:
        """Writes the logit edits of a sequence that is about to start."""
        rows = edit_rows(sequence, self.config.vocab_size)
        self._slots = set_marks_program(self._slots, np.int32(sequence.slot), *rows)

    def copy(self, source: int, target: int, blocks: Items[tuple[int, int]]) -> None:
        """Copies the sequence of a slot, all of it: `blocks` are no part of the device here."""
        del blocks
        self._model.copy(source - 1, target - 1)

    def masked_work(self, layouts: Items[PlanLayout]) -> Callable[[], None]:
        """Returns what compiles the programs of steps with grammars: there are no others."""
        del layouts
        return lambda: None

    def wait(self) -> None:
        """Returns when everything dispatched is done: at once."""

    def warm_up(self, layouts: Items[PlanLayout]) -> dict[str, float]:
        """Compiles every program and runs it; returns seconds by name.

        Raises:
            DeepInferError: also an `AscendError`: an operator failed; the device is closed then.
        """
        del layouts  # the programs are of one row, of a chunk, and of a tile of rows that choose
        begin = time.perf_counter()
        try:
            for count in {1, self._model.chunk}:
                self._model.extend(0, [0] * count)
                self._model.begin(0)
        except DeepInferError:
            self.close()
            raise
        seconds = {"steps on the Ascend device": time.perf_counter() - begin}
        begin = time.perf_counter()
        blank = np.zeros((TILE, self.config.vocab_size), np.float32)
        nobody, index = np.zeros(TILE, np.int32), np.zeros(TILE, np.int32)
        words = np.full((TILE, -(-self.config.vocab_size // 32)), -1, np.int32)
        self._slots, *_ = self._tokens(
            self._slots, blank, nobody, index, np.zeros(TILE, bool), words
        )
        jax.block_until_ready(self._scores(blank, nobody))
        marks = null_marks(self.config.vocab_size)
        self._slots = set_marks_program(self._slots, np.int32(0), *marks)
        return seconds | {"choice of tokens": time.perf_counter() - begin}

    def close(self) -> None:
        """Frees what is on the device."""
        self._model.close()


_admitted = jax.jit(lambda slots, admits: admit(slots, admits)[0], donate_argnums=0)


@partial(jax.jit, static_argnames=("image", "alternatives", "hashes"), donate_argnames="slots")
def choose_tokens(
    slots: SlotState,
    logits: Float[Array, "t v"],
    slot: Int[Array, " t"],
    index: Int[Array, " t"],
    is_live: Bool[Array, " t"],
    words: Int[Array, "t w"],
    *,
    image: int | None,
    alternatives: int,
    hashes: bool,
) -> tuple[SlotState, tuple[Array, ...], TokenLogprobs, Array | None]:
    """Returns (slots after the tokens, (tokens, statuses, codes, generations), records, hashes).

    Args:
        slots: of the engine; consumed.
        logits: float32, of a tile of `TILE` rows.
        slot: of each row; 0 where unused.
        index: position of the token that is chosen.
        is_live: rows that choose one.
        words: bits of the ids that a grammar allows, all of them without one.
        image: id that stands for pixels, which no text has.
        alternatives: k of the records.
        hashes: return hashes of the logits, [t, 2].
    """
    size = logits.shape[1]
    never = None if image is None else jnp.arange(size) == image
    edits = row_edits(slots, slot, jnp.zeros((slot.shape[0], 0), jnp.int32), full=True)
    edits = replace(edits, grammar=unpack_bitmask(words, size))
    rules = slots.rules.take(slot)
    token, status, log_p = sample_tile(logits, rules, index, edits, never_emit=never)
    told = token_record(logits, log_p, slots.processed[slot], token, alternatives)
    slots, code = advance(slots, slot, token, is_live)
    found = (token, status, code, slots.generation[slot])
    return slots, found, told, logit_hash_tile(logits) if hashes else None


def _tiles(numbers: list[int]) -> list[list[int]]:
    """Returns the numbers in runs of at most TILE."""
    return [numbers[start : start + TILE] for start in range(0, len(numbers), TILE)]


def _stacked(rows: Items[np.ndarray | None], width: int) -> np.ndarray:
    """Returns float32 [TILE, width], zeros where there is no row."""
    found = np.zeros((TILE, width), np.float32)
    for place, row in enumerate(rows):
        if row is not None:
            found[place] = row
    return found


def _spread(size: int, places: list[int], *tiles: np.ndarray) -> np.ndarray:
    """Returns the rows of tiles at their places among `size` rows, zeros elsewhere."""
    rows = np.concatenate(tiles)[: len(places)]
    found = np.zeros((size, *rows.shape[1:]), rows.dtype)
    found[places] = rows
    return found
