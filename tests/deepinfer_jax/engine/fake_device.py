"""A device without a network: it checks what a network would read, and makes results up.

Every cache row holds the ids before and at its position, so that a row which reads a wrong, stale
or reused block is caught at once. The next token is a function of those ids, its log-probability of
the token. Some drafts are right and some wrong; how many a round verifies is random, within what
the header allows. The rows of rejected drafts stay in the blocks until others overwrite them.
"""

import random
from dataclasses import dataclass, field

import jax
import numpy as np

from deepinfer_jax.engine.device import Flight, flown
from deepinfer_jax.engine.layout import (
    ADMIT_FLOATS,
    ADMIT_INTS,
    HEADER,
    MAKE_DRAFTS,
    RESULT,
    unpack,
)
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.engine.slots import AT_LENGTH, AT_STOP, RUNNING
from deepinfer_jax.sampling.logprobs import TokenLogprobs

VOCABULARY = 50
END = 1
NOTHING = TokenLogprobs(logprob=None, rank=None, top_ids=None, top_logprobs=None)


def next_token(ids: tuple[int, ...]) -> int:
    """Returns the token that follows; 1 (the end) now and then."""
    return (7 * sum(ids) + 3 * len(ids)) % (VOCABULARY - 1) + 1


def logprob_of(token: int) -> float:
    """Returns the log-probability of a token."""
    return -token / 8


def expected(prompt: tuple[int, ...], most: int, stops: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the whole output of a prompt."""
    ids, output = prompt, ()
    while len(output) < most and (token := next_token(ids)) not in stops:
        ids, output = (*ids, token), (*output, token)
    return output


def drafts_after(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Returns the drafts after these ids; three of four are right if those before them are."""
    drafts = ids
    for place in range(count):
        token = next_token(drafts)
        is_wrong = (sum(ids) + place) % 4 == 0
        drafts = (*drafts, token % (VOCABULARY - 1) + 1 if is_wrong else token)
    return drafts[len(ids) :]


@dataclass
class Slot:
    """What the device keeps of one sequence; `window` stands for its rings: all ids so far."""

    window: tuple[int, ...] = ()
    alive: bool = False
    generation: int = 0
    produced: int = 0
    most: int = 0
    most_drafts: int = 0
    last: int = 0
    shared: int = 0
    drafts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    table: dict[int, int] = field(default_factory=dict)


class FakeDevice:
    """Takes the place of `engine.device.Device`.

    rng: decides how many drafts are verified. counts: rounds, drafts verified and accepted, rounds
    that stopped before the last draft they accept.
    """

    def __init__(
        self, config, params, cache, *, stop_ids, drafting, alternatives, hashes, image_rows
    ) -> None:
        """Starts with empty slots and blocks, and rows of images that hold nothing."""
        self.images = [None] * image_rows
        self.params = params
        self.size = cache.block_tokens
        self.slots = [Slot() for _ in range(cache.num_slots)]
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}
        self.row_count = 0
        self.drafts = drafting.size if drafting else 0
        self.rng = random.Random(0)
        self.counts = {"rounds": 0, "verified": 0, "accepted": 0, "stopped": 0}

    def encode(self, pixels, rows) -> None:
        """Puts (pixels, number of the token) into every row of an image."""
        for number, row in enumerate(rows.tolist()):
            self.images[row] = (pixels, number)

    def dispatch(self, plan, now=0.0) -> Flight:
        """Runs a plan at once."""
        for action, arguments in plan.before:
            getattr(self, action)(*arguments)
        parts = unpack(plan.layout, plan.vector)
        header = dict(zip(HEADER, parts.header.tolist(), strict=True))
        assert header["prompt_rows"] + header["verify_rows"] <= plan.layout.rows
        for entry in parts.admits:
            self._admit(entry)
        for slot, place, block in parts.deltas.tolist():
            if slot:
                self.slots[slot].table[place] = block
        for row in range(header["prompt_rows"]):
            slot = self.slots[int(parts.slot[row])]
            if slot.alive:
                assert int(parts.position[row]) == len(slot.window), "rows come in order"
                self._row(slot, int(parts.ids[row]))
        result = self._results(plan.layout, parts, header)
        saved = [np.asarray(self._saved(chunk), np.int32) for chunk in plan.checkpoints]
        windows = [{"ids": jax.device_put(ids)} for ids in saved]
        return flown(plan, now, result, windows)

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
        slot.most_drafts, slot.drafts = values["most_drafts"], ()
        slot.shared, slot.table = values["length"], {}
        stops = entry[len(ADMIT_INTS) + len(ADMIT_FLOATS) :].tolist()
        slot.stops = tuple(token for token in stops if token >= 0)

    def _row(self, slot, token) -> None:
        """Runs the next row of a slot."""
        position = len(slot.window)
        slot.window += (token,)
        for before in range(position):
            found = self.rows[slot.table[before // self.size], before % self.size]
            assert found == slot.window[: before + 1], "a row of another sequence is read"
        if position >= slot.shared:
            place = slot.table[position // self.size], position % self.size
            self.rows[place] = slot.window
        self.row_count += 1

    def _results(self, layout, parts, header) -> StepResult:
        """Runs the rounds, and returns what they and the prompts that end here emit."""
        rounds = np.zeros((layout.slots, layout.result_width), np.int32)
        logprob = np.full(layout.slots * (layout.drafts + 1), np.nan, np.float32)
        emitters = [(slot, True) for slot in parts.rounds[: header["rounds"]].tolist()]
        ends = parts.ends[: header["ends"]]
        emitters += [(slot, False) for slot in parts.slot[ends].tolist()]
        living = sum(self.slots[slot].alive for slot, is_round in emitters if is_round)
        spare, first = header["verify_rows"] - living, 0
        assert spare >= 0, "every round has a row"
        for place, (number, is_round) in enumerate(emitters):
            slot = self.slots[number]
            words, tokens = dict.fromkeys(RESULT, 0), []
            words |= {"slot": number, "generation": slot.generation, "first": first, "code": -1}
            if slot.alive:
                verified = self._verified(slot, header, spare) if is_round else ()
                spare -= len(verified)
                tokens, words["accepted"], words["code"] = self._emit(slot, verified, is_round)
                words["verified"], words["count"] = len(verified), len(tokens)
                logprob[first : first + len(tokens)] = [logprob_of(token) for token in tokens]
                first += 1 + len(verified)
                wants = slot.alive and header["drafting"] == MAKE_DRAFTS
                ids = (*slot.window, slot.last)
                slot.drafts = drafts_after(ids, layout.drafts) if wants else ()
            row = rounds[place]
            row[: len(RESULT)] = [words[name] for name in RESULT]
            row[len(RESULT) : len(RESULT) + layout.drafts + 1] = -1
            row[len(RESULT) : len(RESULT) + len(tokens)] = tokens
        chosen = TokenLogprobs(
            logprob=jax.device_put(logprob),
            rank=None,
            top_ids=jax.device_put(np.zeros((len(logprob), 0), np.int32)),
            top_logprobs=jax.device_put(np.zeros((len(logprob), 0), np.float32)),
        )
        return StepResult(rounds=rounds, chosen=chosen, prompt=NOTHING)

    def _verified(self, slot, header, spare) -> tuple[int, ...]:
        """Returns the drafts of a round that are verified."""
        most = min(slot.most_drafts, header["most_drafts"], slot.most - slot.produced - 1, spare)
        return slot.drafts[: self.rng.randint(0, max(0, most))]

    def _emit(self, slot, drafts, is_round) -> tuple[list[int], int, int]:
        """Runs a round; returns (tokens, accepted drafts, stop code) of a slot."""
        base = len(slot.window)
        if is_round:
            for token in (slot.last, *drafts):
                self._row(slot, token)
        # What the last row of a prompt chooses is what a round of the anchor alone would.
        context = slot.window[: base + is_round]
        chosen = [next_token(context)]
        while len(chosen) <= len(drafts) and chosen[-1] == drafts[len(chosen) - 1]:
            context = (*context, chosen[-1])
            chosen.append(next_token(context))
        accepted, tokens, code = len(chosen) - 1, [], RUNNING
        while code == RUNNING and chosen:
            token = chosen.pop(0)
            tokens.append(token)
            slot.produced += token not in slot.stops
            code = AT_LENGTH if slot.produced >= slot.most else RUNNING
            code = AT_STOP if token in slot.stops else code
        slot.alive, slot.last = code == RUNNING, tokens[-1]
        if is_round:
            slot.window = slot.window[: base + len(tokens)]
            self.counts["rounds"] += 1
            self.counts["verified"] += len(drafts)
            self.counts["accepted"] += accepted
            self.counts["stopped"] += len(tokens) <= accepted
        return tokens, accepted, code

    def _saved(self, chunk) -> tuple[int, ...]:
        window = self.slots[chunk.sequence.slot].window
        assert len(window) == chunk.stop
        return window
