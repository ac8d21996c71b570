"""A device without a network: it checks what a network would read, and makes results up.

Every cache row holds the ids before and at its position, so that a row which reads a wrong, stale
or reused block is caught at once. The next token is a function of those ids.
"""

from dataclasses import dataclass, field

import jax
import numpy as np

from deepinfer_jax.engine.device import Flight
from deepinfer_jax.engine.layout import ADMIT_FLOATS, ADMIT_INTS, ANCHOR, unpack
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.engine.slots import AT_LENGTH, AT_STOP, RUNNING
from deepinfer_jax.sampling.logprobs import TokenLogprobs

VOCABULARY = 50
NOTHING = TokenLogprobs(logprob=None, rank=None, top_ids=None, top_logprobs=None)


def next_token(ids: tuple[int, ...]) -> int:
    """Returns the token that follows; 1 (the end) now and then."""
    return (7 * sum(ids) + 3 * len(ids)) % (VOCABULARY - 1) + 1


def expected(prompt: tuple[int, ...], most: int, stops: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the whole output of a prompt."""
    ids, output = prompt, ()
    while len(output) < most and (token := next_token(ids)) not in stops:
        ids, output = (*ids, token), (*output, token)
    return output


@dataclass
class Slot:
    """What the device keeps of one sequence; `window` stands for its rings: all ids so far."""

    window: tuple[int, ...] = ()
    alive: bool = False
    generation: int = 0
    produced: int = 0
    most: int = 0
    last: int = 0
    shared: int = 0
    stops: tuple[int, ...] = ()
    table: dict[int, int] = field(default_factory=dict)


class FakeDevice:
    """Takes the place of `engine.device.Device`."""

    def __init__(self, config, params, cache, *, stop_ids, alternatives) -> None:
        """Starts with empty slots and blocks."""
        self.params = params
        self.size = cache.block_tokens
        self.slots = [Slot() for _ in range(cache.num_slots)]
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}
        self.row_count = 0

    def dispatch(self, plan) -> Flight:
        """Runs a plan at once."""
        for action, arguments in plan.before:
            getattr(self, action)(*arguments)
        parts = unpack(plan.layout, plan.vector)
        for entry in parts.admits:
            self._admit(entry)
        for slot, place, block in parts.deltas.tolist():
            if slot:
                self.slots[slot].table[place] = block
        count, emitting = parts.header[:2].tolist()
        seen = [self._row(parts, row) for row in range(count)]
        tokens = np.zeros((plan.layout.slots, 5), np.int32)
        for place, row in enumerate(parts.emit[:emitting].tolist()):
            tokens[place] = self._emit(int(parts.slot[row]), seen[row])
        saved = [np.asarray(self._saved(chunk), np.int32) for chunk in plan.checkpoints]
        windows = [{"ids": jax.device_put(ids)} for ids in saved]
        return Flight(plan, StepResult(tokens=tokens, chosen=NOTHING, prompt=NOTHING), windows)

    def restore(self, slot, length, leaves) -> None:
        """Puts saved ids in the place of a window."""
        self.slots[slot].window = tuple(leaves["ids"].tolist())
        assert len(self.slots[slot].window) == length

    def copy(self, source, target, pairs) -> None:
        """Copies a slot and blocks."""
        self.slots[target].window = self.slots[source].window
        for old, new in pairs:
            for place in range(self.size):
                if (old, place) in self.rows:
                    self.rows[new, place] = self.rows[old, place]

    def _admit(self, entry) -> None:
        values = dict(zip(ADMIT_INTS, entry.tolist(), strict=False))
        if not values["slot"]:
            return
        slot = self.slots[values["slot"]]
        assert len(slot.window) >= values["first"] or not values["first"], "window not restored"
        slot.window = slot.window[: values["first"]]
        slot.alive, slot.generation = True, values["generation"]
        slot.produced, slot.most = values["produced"], values["most"]
        slot.shared, slot.table = values["length"], {}
        stops = entry[len(ADMIT_INTS) + len(ADMIT_FLOATS) :].tolist()
        slot.stops = tuple(token for token in stops if token >= 0)

    def _row(self, parts, row) -> tuple[int, ...]:
        slot = self.slots[int(parts.slot[row])]
        if not slot.alive:
            return ()
        anchor = int(parts.ids[row]) == ANCHOR
        position = len(slot.window) if anchor else int(parts.position[row])
        assert position == len(slot.window), "rows of a sequence come in order"
        slot.window += (slot.last if anchor else int(parts.ids[row]),)
        for before in range(position):
            found = self.rows[slot.table[before // self.size], before % self.size]
            assert found == slot.window[: before + 1], "a row of another sequence is read"
        if position >= slot.shared:
            place = slot.table[position // self.size], position % self.size
            self.rows[place] = slot.window
        self.row_count += 1
        return slot.window

    def _emit(self, number, ids) -> tuple[int, int, int, int, int]:
        slot = self.slots[number]
        if not slot.alive:
            return (number, slot.generation, -1, -1, 0)
        token = next_token(ids)
        slot.produced += token not in slot.stops
        code = AT_LENGTH if slot.produced >= slot.most else RUNNING
        code = AT_STOP if token in slot.stops else code
        slot.alive, slot.last = code == RUNNING, token
        return (number, slot.generation, token, code, 0)

    def _saved(self, chunk) -> tuple[int, ...]:
        window = self.slots[chunk.sequence.slot].window
        assert len(window) == chunk.stop
        return window
