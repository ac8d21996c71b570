"""What has to be copied where when a layer's experts are placed again (parallelism.md 4.6)."""

from dataclasses import dataclass

import numpy as np

from sharding.eplb.maps import check_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Tables of one layer's exchange, in which every pair of ranks exchanges `width` slots.

    send: int32 [R, R, width], which of its own slots rank r sends to rank q; 0 where it sends
    nothing that is read. take: int32 [R, m], from where each slot of rank r gets its weights: one
    of its own m slots, or m + q * width + place for what rank q sent. sent: slots that cross ranks.
    """

    send: np.ndarray
    take: np.ndarray
    sent: int

    @property
    def width(self) -> int:
        """Slots that every pair of ranks exchanges, read or not."""
        return self.send.shape[2]


def plan_moves(present: np.ndarray, wanted: np.ndarray, ranks: int) -> Moves:
    """Returns how the slots of `present` become those of `wanted`.

    What is right stays; what lies on the same rank is copied there; any other expert is received
    once by a rank, and copied from there to further slots. Each sender serves as many receivers as
    the next: receivers ascending take sender j // (N // S), the rest go round.

    Raises:
        ShardingError: one of the two is no placement.
    """
    experts = int(present.max()) + 1
    for layout in (present, wanted):
        check_layout(layout, experts, ranks)
    old, new = present.reshape(ranks, -1), wanted.reshape(ranks, -1)
    slots = old.shape[1]
    queues: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
    arrives: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, expert) -> (sender, place)
    for expert in range(experts):
        has, needs = ((rows == expert).any(axis=1) for rows in (old, new))
        senders, receivers = np.flatnonzero(has), np.flatnonzero(needs & ~has)
        share = len(receivers) // len(senders)
        for place, receiver in enumerate(receivers.tolist()):
            even = place < share * len(senders)
            sender = senders[place // share if even else place - share * len(senders)]
            queue = queues[sender][receiver]
            arrives[receiver, expert] = (int(sender), len(queue))
            queue.append(int(np.flatnonzero(old[sender] == expert)[0]))
    most = max(len(queue) for row in queues for queue in row)
    width = 1 << (most - 1).bit_length() if most > 1 else 1  # few widths, few programs
    send = np.zeros((ranks, ranks, width), np.int32)
    for sender, row in enumerate(queues):
        for receiver, queue in enumerate(row):
            send[sender, receiver, : len(queue)] = queue
    take = np.empty((ranks, slots), np.int32)
    for rank in range(ranks):
        for slot, expert in enumerate(new[rank]):
            own = np.flatnonzero(old[rank] == expert)
            if old[rank, slot] == expert:
                take[rank, slot] = slot
            elif own.size:
                take[rank, slot] = own[0]
            else:
                sender, place = arrives[rank, int(expert)]
                take[rank, slot] = slots + sender * width + place
    return Moves(send=send, take=take, sent=len(arrives))


def moved_layout(present: np.ndarray, moves: Moves) -> np.ndarray:
    """Returns the layout that `moves` makes of `present`: what the exchange does, on one host."""
    ranks = len(moves.take)
    old = present.reshape(ranks, -1)
    found = np.empty_like(old)
    for rank in range(ranks):
        received = np.concatenate([old[q][moves.send[q, rank]] for q in range(ranks)])
        found[rank] = np.concatenate([old[rank], received])[moves.take[rank]]
    return found.reshape(-1)
