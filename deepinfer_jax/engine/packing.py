"""Writes a planned step into the packed vector that the device reads."""

from collections.abc import Sequence as Items

import numpy as np

from deepinfer_jax.engine.admission import write_admission
from deepinfer_jax.engine.draft_policy import DraftPolicy
from deepinfer_jax.engine.layout import PlanParts, PlanVectors
from deepinfer_jax.engine.plan import Chunk, Limits, StepPlan


def pack_plan(
    plan: StepPlan,
    vectors: PlanVectors,
    limits: Limits,
    policy: DraftPolicy,
    deltas: Items[tuple[int, int, int]],
) -> None:
    """Gives a plan the smallest layout that holds its rows, and its vector.

    Rows that would be computed as padding verify drafts instead.

    Args:
        plan: complete but for layout and vector.
        vectors: to write into.
        limits: of the scheduler.
        policy: of drafts.
        deltas: (slot, place, block) of block tables.
    """
    layout = next(one for one in limits.layouts if one.rows >= plan.rows)
    padding = -plan.rows % (layout.rows if len(limits.layouts) > 1 else limits.row_step)
    plan.verify_rows = min(plan.verify_rows + padding, sum(plan.spans))
    plan.layout = layout if plan.makes_drafts else layout.without_drafting
    plan.vector, parts = vectors.blank(layout)
    rounds = len(plan.spans)
    parts.header[:] = (
        plan.prompt_rows,
        rounds,
        len(plan.ends),
        plan.wants_logprobs,
        plan.scores_prompt,
        policy.most,
        policy.threshold,
        plan.verify_rows,
        plan.makes_drafts,
    )
    parts.rounds[:rounds] = plan.slots
    parts.ends[: len(plan.ends)] = plan.ends
    if deltas:
        parts.deltas[: len(deltas)] = deltas
    for chunk in plan.chunks:
        _write_chunk(parts, chunk)
    for row, rows in plan.images:
        parts.image[row : row + len(rows)] = rows
    for entry, sequence in zip(parts.admits, plan.admitted, strict=False):
        if sequence.slot:
            write_admission(entry, sequence, limits.rule, limits.eos, layout.drafts)


def _write_chunk(parts: PlanParts, chunk: Chunk) -> None:
    sequence, start, stop = chunk.sequence, chunk.start, chunk.stop
    rows = slice(chunk.row, chunk.row + stop - start)
    parts.ids[rows] = sequence.ids[start:stop]
    parts.position[rows] = np.arange(start, stop)
    parts.slot[rows] = sequence.slot
    if sequence.scores_prompt:
        following = sequence.ids[start + 1 : min(stop + 1, sequence.prompt_len)]
        parts.target[rows] = -1
        parts.target[chunk.row : chunk.row + len(following)] = following
