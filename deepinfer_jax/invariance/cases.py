"""The adversarial matrix on the network: schedules whose logits must be those of the lone run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from deepinfer_jax.invariance.network import Lab
from deepinfer_jax.invariance.schedule import (
    Action,
    Call,
    Ids,
    Open,
    Part,
    Restore,
    Save,
    Schedule,
    Shape,
    Share,
    chunks,
    merged,
    with_drafts,
)

#: From a lab, a random generator and the number of a run to what is run.
Make = Callable[[Lab, np.random.Generator, int], Schedule]
VICTIM, DONOR = 3, 5  # slots


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a case cannot run here."""

    reason: str


@dataclass(frozen=True, slots=True)
class NetworkCase:
    """A case on the pure functions. count: its runs, given the lab, or why there are none."""

    name: str
    make: Make
    count: Callable[[Lab], int | Skip]
    runs: int | None = None

    def schedules(self, lab: Lab, rng: np.random.Generator) -> Iterator[Schedule]:
        """Yields the schedules of the runs; `runs` repeats or cuts the list."""
        found = self.count(lab)
        if isinstance(found, int):
            for number in range(found if self.runs is None else self.runs):
                yield self.make(lab, rng, number)


def _sequence(lab: Lab, number: int) -> Ids:
    return lab.sequences[number % len(lab.sequences)]


def _cut_sizes(lab: Lab) -> list[int]:
    tile, window = lab.tile, lab.window
    sizes = {1, 2, 3, 5, tile - 1, tile, tile + 1, window - 1, window, window + 1}
    sizes |= {lab.block - 1, lab.block, lab.block + 1}
    return sorted(size for size in sizes if 0 < size < lab.length)


def _chunks(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    sizes = _cut_sizes(lab)
    size, ids = sizes[number % len(sizes)], _sequence(lab, number // len(sizes))
    edge = 8 * lab.few
    if size < lab.few and 2 * edge < lab.length:  # single rows at both ends are enough
        calls = chunks(VICTIM, ids[:edge], [size])
        calls += chunks(VICTIM, ids[:-edge], [lab.length], start=edge)
        calls += chunks(VICTIM, ids, [size], start=lab.length - edge)
        detail = f"chunks of {size} at both ends"
        return lab.schedule(ids, [Open(VICTIM, ids), *calls], detail)
    return lab.schedule(ids, [Open(VICTIM, ids), *chunks(VICTIM, ids, [size])], f"chunks of {size}")


def _random_sizes(lab: Lab, rng: np.random.Generator) -> list[int]:
    most = int(rng.choice([4, lab.tile + 2, lab.window + 2, lab.length]))
    sizes = rng.integers(1, most + 1, lab.length)
    return [int(size) for size in sizes]


def _random_chunks(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    ids = _sequence(lab, number)
    calls = chunks(VICTIM, ids, _random_sizes(lab, rng))
    return lab.schedule(ids, [Open(VICTIM, ids), *calls], f"{len(calls)} random chunks")


def _slots(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    slot, ids = 1 + number % lab.shape.slots, _sequence(lab, 1)
    return lab.schedule(ids, [Open(slot, ids), *chunks(slot, ids, [lab.length])], f"slot {slot}")


def _poisoned(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    """On garbage, or in a slot that another has used; the first rows before others are written."""
    ids, other = _sequence(lab, number), _sequence(lab, number + 1)
    actions: list[Action] = [Open(VICTIM, ids), *chunks(VICTIM, ids, [1, 2, lab.length])]
    if number % 2:
        used = [Open(VICTIM, other), *map(_uncompared, chunks(VICTIM, other, [lab.length]))]
        return lab.schedule(ids, [*used, *actions], "a slot used before")
    return lab.schedule(ids, actions, "NaN in all free slots and blocks")


def _uncompared(call: Call) -> Call:
    return replace(call, parts=tuple(replace(part, kept=0) for part in call.parts))


def _neighbour_lengths(lab: Lab) -> list[int]:
    return [1, lab.block - 1, lab.block, lab.block + 1, lab.length]


def _neighbours(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    """Other sequences beside this one; every other time one of them is its twin."""
    ids, count = _sequence(lab, number), 1 + number % (lab.shape.slots - 1)
    places = [int(slot) for slot in rng.permutation(lab.shape.slots) + 1]
    slot = places.pop()
    streams: list[list[Action]] = [[Open(slot, ids), *chunks(slot, ids, _random_sizes(lab, rng))]]
    for place in range(count):
        other = ids if number % 2 and not place else _sequence(lab, number + place + 1)
        other = other[: _neighbour_lengths(lab)[(number + place) % 5]]
        calls = [_uncompared(c) for c in chunks(places[place], other, _random_sizes(lab, rng))]
        streams.append([Open(places[place], other), *calls])
    actions = merged(rng, streams, lab.shape.rows)
    return lab.schedule(ids, actions, f"slot {slot}, {count} neighbours")


def _arrival(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    """A whole prompt arrives in the middle of single-token decoding."""
    ids, other = _sequence(lab, number), _sequence(lab, number + 1)
    start = lab.length - 3 * lab.few
    calls = chunks(VICTIM, ids, [start, *[1] * (lab.length - start)])
    at = 2 + int(rng.integers(1, lab.few))
    rest = lab.shape.rows - len(calls[at].parts[0].ids)
    arriving = Part(1, 0, other[:rest])
    parts = (arriving, *calls[at].parts) if number % 2 else (*calls[at].parts, arriving)
    calls[at] = Call(parts)
    return lab.schedule(
        ids, [Open(VICTIM, ids), Open(1, other), *calls], f"{len(arriving.ids)} rows arrive"
    )


def _borders(lab: Lab, length: int) -> list[int]:
    return list(range(lab.block, length - 1, lab.block))


def hit(
    lab: Lab, ids: Ids, length: int, restore: str, *, slot: int = VICTIM
) -> tuple[list[Action], list[Action], int]:
    """Returns (what another sequence does first, how the hit is opened, first row to run)."""
    before: list[Action] = [Open(DONOR, ids)]
    before += [_uncompared(call) for call in chunks(DONOR, ids[:length], [lab.length])]
    opening: list[Action] = [Share(DONOR, slot, length // lab.block)]
    first = length - lab.rule("off", restore).recomputed_rows
    if restore == "checkpoint":
        before.append(Save(DONOR, length))
        opening.append(Restore(slot, length))
    other = lab.wrong(ids)[length:]
    part = Part(DONOR, length, other)
    return [*before, Call((part,))], [*opening, Open(slot, ids, length=length, first=first)], first


def _checkpoint_hit(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    borders, ids = _borders(lab, lab.length), _sequence(lab, number)
    length = borders[-1 - number % len(borders)]
    before, opening, first = hit(lab, ids, length, "checkpoint")
    sizes = [[lab.length], [1], [lab.tile - 1]][number % 3]
    calls = chunks(VICTIM, ids, sizes, start=first)
    return lab.schedule(ids, [*before, *opening, *calls], f"hit of {length}, chunks of {sizes[0]}")


def _halo_hit(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    base = lab.sequences[number % len(lab.sequences)]
    ids = (base * (lab.halo_length // len(base) + 1))[: lab.halo_length]
    length = _borders(lab, lab.halo_length)[-1]
    before, opening, first = hit(lab, ids, length, "halo")
    rows = Part(VICTIM, first, ids[first:], len(ids) - length, length - first)
    return lab.schedule(
        ids, [*before, *opening, Call((rows,))], f"hit of {length}, {length - first} rows rebuilt"
    )


def _recompute(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    """Preempted in the middle of decoding; its slot and blocks go to another; begun again."""
    ids, other = _sequence(lab, number), _sequence(lab, number + 1)
    stop = int(rng.integers(lab.length // 2, lab.length - 2))
    start = stop - lab.few
    first = [Open(VICTIM, ids), *chunks(VICTIM, ids[:stop], [start, 1])]
    taken = [Open(VICTIM, other), *map(_uncompared, chunks(VICTIM, other, [lab.tile + 1]))]
    slot = VICTIM if number % 2 else 1
    again = [Open(slot, ids), *chunks(slot, ids, [stop, 1])]
    return lab.schedule(ids, [*first, *taken, *again], f"given up after {stop} tokens")


def _drafts(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    """Rounds of 0..5 drafts: all right, all wrong, or mixed."""
    drafts, kind = number % 6, ("right", "wrong", "mixed")[number // 6 % 3]
    ids = _sequence(lab, number)
    start = lab.length - 6 * lab.few
    right = {
        "right": np.full(lab.length, drafts),
        "wrong": np.zeros(lab.length, int),
        "mixed": rng.integers(0, drafts + 1, lab.length),
    }[kind]
    counts = [(drafts, int(count)) for count in right]
    calls = chunks(VICTIM, ids[:start], [start])
    calls += with_drafts(VICTIM, ids, lab.wrong(ids), counts, start=start)
    return lab.schedule(ids, [Open(VICTIM, ids), *calls], f"{drafts} drafts, {kind}")


def _bucket(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    """Another compiled program: plan length, slots, cache capacity and block size."""
    ids = _sequence(lab, number)
    shape = Shape(
        rows=lab.shape.rows + 5 * lab.tile,
        slots=2,
        tokens=lab.shape.tokens + lab.block,
        block_tokens=2 * lab.block,
    )
    sizes = [[lab.length], [lab.tile + 1], [lab.window - 1, 1]][number % 3]
    return lab.schedule(
        ids,
        [Open(1, ids), *chunks(1, ids, sizes)],
        f"plan of {shape.rows} rows, {shape.slots} slots, blocks of {shape.block_tokens}",
        shape=shape,
    )


def _replay(mode: str) -> Make:
    def make(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
        ids = _sequence(lab, number)
        floor = lab.floor(ids, mode)  # pyright: ignore[reportArgumentType]
        cut = lab.length - lab.few - 1  # the last rows one by one, or as they come
        sizes = [[lab.tile + 1], [cut, 1], _random_sizes(lab, rng)][number % 3]
        actions = [Open(VICTIM, ids, floor=floor), *chunks(VICTIM, ids, sizes)]
        detail = f"decoder rows from {floor}, chunks of {sizes[0]}, {sizes[-1]}"
        return lab.schedule(ids, actions, detail, replay=mode, floor=floor)

    return make


def _random(lab: Lab, rng: np.random.Generator, number: int) -> Schedule:
    """Any composition, any chunking, any cache state, any drafts."""
    ids = _sequence(lab, int(rng.integers(len(lab.sequences))))
    order = [int(s) for s in rng.permutation(lab.shape.slots) + 1 if s != DONOR]
    slot = order.pop()
    before, mine, start, is_hit = [], [Open(slot, ids)], 0, rng.random() < 0.5
    if is_hit:
        length = int(rng.choice(_borders(lab, lab.length)))
        before, mine, start = hit(lab, ids, length, "checkpoint", slot=slot)
    if rng.random() < 0.6:  # decoded from `cut` on, with drafts
        cut = int(rng.integers(start, lab.length - 1))
        drafts = rng.integers(0, 6, lab.length)
        counts = [(int(n), int(rng.integers(0, n + 1))) for n in drafts]
        mine += chunks(slot, ids[:cut], _random_sizes(lab, rng), start=start)
        mine += with_drafts(slot, ids, lab.wrong(ids), counts, start=cut)
    else:
        mine += chunks(slot, ids, _random_sizes(lab, rng), start=start)
    streams, count = [mine], int(rng.integers(0, len(order) + 1))
    for place in range(count):
        other = ids if rng.random() < 0.2 else lab.sequences[int(rng.integers(len(lab.sequences)))]
        other = other[: int(rng.integers(1, lab.length + 1))]
        calls = map(_uncompared, chunks(order[place], other, _random_sizes(lab, rng)))
        streams.append([Open(order[place], other), *calls])
    actions = before + merged(rng, streams, lab.shape.rows)
    text = f"slot {slot}, {count} neighbours, {len(mine)} calls, hit {start}"
    return lab.schedule(ids, actions, text, poisoned=bool(rng.random() < 0.8))


def _always(count: int) -> Callable[[Lab], int | Skip]:
    return lambda lab: count


def _halo_count(lab: Lab) -> int | Skip:
    rows = lab.rule("off", "halo").recomputed_rows
    return 1 if lab.has_halo else Skip(f"{rows} rows to rebuild are too many here")


def _replay_count(lab: Lab) -> int | Skip:
    return 3 if lab.config.model_type == "deepseek_v41" else Skip("V4 has no decoder half")


def _bucket_count(lab: Lab) -> int | Skip:
    return 3 if lab.config.execution.determinism == "batch" else Skip("plans have all lengths here")


NETWORK_CASES = (
    NetworkCase("chunks", _chunks, lambda lab: len(_cut_sizes(lab))),
    NetworkCase("random chunks", _random_chunks, _always(4)),
    NetworkCase("slots", _slots, lambda lab: lab.shape.slots),
    NetworkCase("poisoned cache", _poisoned, _always(4)),
    NetworkCase("neighbours", _neighbours, _always(6)),
    NetworkCase("arrival", _arrival, _always(4)),
    NetworkCase("prefix hit, checkpoint", _checkpoint_hit, _always(4)),
    NetworkCase("prefix hit, halo", _halo_hit, _halo_count),
    NetworkCase("preemption", _recompute, _always(3)),
    NetworkCase("drafts", _drafts, _always(18)),
    NetworkCase("random", _random, _always(12)),
    NetworkCase("other bucket", _bucket, _bucket_count),
    NetworkCase("replay mask", _replay("mask"), _replay_count),
    NetworkCase("replay compact", _replay("compact"), _replay_count),
)
