"""Where in the output a grammar begins to bind: an automaton over token ids (io.md 2.6, 2.7)."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Gate:
    """The output is free until the ids `trigger` have appeared one after the other.

    bound_token: once it appears, the rest of the trigger is forced; None for none. may_end: whether
    the output may end while it is free. No trigger is a gate that is open from the start.
    """

    trigger: tuple[int, ...] = ()
    bound_token: int | None = None
    may_end: bool = True

    @cached_property
    def _fallback(self) -> list[int]:
        """For every length of a matched beginning, the next shorter one that also ends there."""
        shorter = [0] * (len(self.trigger) + 1)
        length = 0
        for place in range(1, len(self.trigger)):
            while length and self.trigger[place] != self.trigger[length]:
                length = shorter[length]
            length += self.trigger[place] == self.trigger[length]
            shorter[place + 1] = length
        return shorter

    def step(self, state: "GateState", token: int) -> "GateState":
        """Returns the state after a token of the output; the gate must not be open yet."""
        matched = state.matched
        while matched and self.trigger[matched] != token:
            matched = self._fallback[matched]
        matched += self.trigger[matched] == token
        is_forced = state.is_forced or token == self.bound_token
        return GateState(matched, is_forced)

    def is_open(self, state: "GateState") -> bool:
        """Returns whether the grammar binds from the next token on."""
        return state.matched == len(self.trigger)


@dataclass(frozen=True, slots=True)
class GateState:
    """matched: ids of the trigger that the output ends with. is_forced: so is the next one."""

    matched: int = 0
    is_forced: bool = False
