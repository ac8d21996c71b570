"""How well a placement shares out a recorded load (parallelism.md 4.4)."""

import numpy as np

from sharding.eplb.maps import replica_counts


def rank_loads(trace: np.ndarray, layout: np.ndarray, ranks: int) -> np.ndarray:
    """Returns the rows of every rank at every step, float64 [S, R].

    trace: rows by step and expert, [S, E]. Replicas of an expert share its rows equally.
    """
    share = trace / replica_counts(layout, trace.shape[1])
    return share[:, layout].reshape(len(trace), ranks, -1).sum(axis=2)


def busiest(trace: np.ndarray, layout: np.ndarray, ranks: int) -> float:
    """Returns J, the sum over steps of the busiest rank's rows: what a placement minimises."""
    return float(rank_loads(trace, layout, ranks).max(axis=1).sum())


def imbalance(trace: np.ndarray, layout: np.ndarray, ranks: int) -> float:
    """Returns the busiest rank's rows over the mean rank's, both summed over steps; 1 is perfect.

    1 without any load.
    """
    mean = trace.sum() / ranks
    return busiest(trace, layout, ranks) / float(mean) if mean else 1.0
