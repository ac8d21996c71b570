"""Placement from totals alone: the public EPLB, global and hierarchical (parallelism.md 4.4)."""

import numpy as np

from sharding.errors import ShardingError


def global_layout(totals: np.ndarray, slots: int, ranks: int) -> np.ndarray:
    """Returns the placement of E experts in `slots` slots of `ranks` ranks, int32 [slots].

    totals: rows of every expert, [E].
    """
    return hierarchical_layout(totals, slots, ranks, groups=1, nodes=1)


def hierarchical_layout(
    totals: np.ndarray, slots: int, ranks: int, *, groups: int, nodes: int
) -> np.ndarray:
    """Returns the placement that keeps every group of experts inside one node, int32 [slots].

    Groups go to nodes, then each node replicates and shares out its own experts. For routers that
    choose groups first; V4.1's does not, and then this only costs balance.

    Raises:
        ShardingError: groups, slots or ranks do not divide as they must.
    """
    experts = len(totals)
    if experts % groups or groups % nodes or ranks % nodes or slots % ranks or slots < experts:
        raise ShardingError(
            "experts divide by groups, groups and ranks by nodes, slots by ranks, and there are "
            "at least as many slots as experts",
            f"{experts} experts, {groups} groups, {nodes} nodes, {ranks} ranks, {slots} slots",
            "use global_layout, or other sizes",
        )
    members = np.arange(experts).reshape(groups, -1)
    weight = np.asarray(totals, np.float64)
    layout = []
    for held in pack(weight[members].sum(axis=1), nodes):
        own = members[held].reshape(-1)
        copies = own[replicate(weight[own], slots // nodes)]
        share = weight[copies] / np.bincount(copies, minlength=experts)[copies]
        layout += [copies[bin_] for bin_ in pack(share, ranks // nodes)]
    return np.concatenate(layout).astype(np.int32)


def replicate(weight: np.ndarray, slots: int) -> np.ndarray:
    """Returns which expert each of `slots` slots holds: all in order, then extras one by one.

    An extra goes to the expert with the most rows per replica, the lowest of equals.
    """
    held, count = list(range(len(weight))), np.ones(len(weight))
    for _ in range(slots - len(weight)):
        busiest = int(np.argmax(weight / count))
        held.append(busiest)
        count[busiest] += 1
    return np.asarray(held)


def pack(weight: np.ndarray, bins: int) -> list[list[int]]:
    """Returns the items of every bin, equally many in each, in the order in which they came.

    The heaviest item first, into the lightest bin that has room. One item a bin: the identity.
    """
    room = len(weight) // bins
    if room == 1:
        return [[item] for item in range(bins)]
    held: list[list[int]] = [[] for _ in range(bins)]
    load = np.zeros(bins)
    for item in np.argsort(-weight, kind="stable"):
        free = np.array([len(one) < room for one in held])
        chosen = int(np.argmin(np.where(free, load, np.inf)))
        held[chosen].append(int(item))
        load[chosen] += weight[item]
    return held
