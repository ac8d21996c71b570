"""`verify_invariance`: every case against the lone run, bit by bit (determinism.md 6 and 7)."""

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version

import jax
import numpy as np

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.determinism import determinism_report
from deepinfer_jax.environment import provenance
from deepinfer_jax.errors import InputError
from deepinfer_jax.invariance.cases import NETWORK_CASES, NetworkCase, Skip
from deepinfer_jax.invariance.control import CONTROL, flipped
from deepinfer_jax.invariance.engine_cases import ENGINE_CASES, EngineCase, EngineLab
from deepinfer_jax.invariance.network import Lab, bits, execute
from deepinfer_jax.invariance.observe import locate as find_difference
from deepinfer_jax.invariance.report import MOST_POSITIONS, CaseRow, Difference, Report
from deepinfer_jax.invariance.schedule import Schedule
from deepinfer_jax.loading import Model
from deepinfer_jax.record.recorder import Recorder

Case = NetworkCase | EngineCase
MESH = "mesh"
#: Names of all cases, in the order in which they run.
CASES = (*(case.name for case in (*NETWORK_CASES, *ENGINE_CASES)), MESH, CONTROL)


def verify_invariance(
    model: Model,
    runtime: RuntimeConfig | None = None,
    *,
    cases: Sequence[str] | None = None,
    seed: int = 0,
    budget_s: float | None = None,
    locate: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Returns whether a sequence has the same bits in all company, and where it has not.

    Every case runs sequences in adverse ways and compares the bits of their logits (of an engine:
    tokens and log-probabilities) with the lone run: batch 1, nobody before or beside it, one call,
    no cache, no drafts. Where bits differ, both are run again with every layer observed.

    Args:
        model: what is verified, at its own level.
        runtime: `block_tokens` and `replay_keep_tokens` that are not the default are taken over;
            other sizes are chosen so that the cases meet every mechanism.
        cases: names out of `CASES`, "NAME=RUNS" for another number of runs; None is all.
        seed: of tokens and of everything random in the cases.
        budget_s: seconds after which no further case begins; those are listed as skipped.
        locate: where bits differ, find the layer and the operation, which compiles once more.
        progress: called with the name of each case before it runs.

    Raises:
        InputError: a name that is no case, or no legal number of runs.

    Examples:
        >>> di.verify_invariance(model, cases=["chunks=1"], locate=False).is_equal
        True
    """
    chosen = select_cases(cases)
    begin = time.perf_counter()
    runtime = runtime or RuntimeConfig()
    lab, rows = Lab(model, runtime, seed), []
    engines = EngineLab(lab)
    for name, runs in chosen:
        spent = time.perf_counter() - begin
        if budget_s is not None and spent > budget_s:
            rows.append(CaseRow(name=name, skipped=f"the {budget_s:g} s were over"))
            continue
        if progress is not None:
            progress(name)
        started = time.perf_counter()
        row = _run(lab, engines, name, runs, seed, locate)
        rows.append(replace(row, seconds=time.perf_counter() - started))
    device = jax.devices()[0]
    execution = model.config.execution
    return Report(
        source=model.source,
        level=execution.determinism,
        numerics=execution.numerics,
        device=f"{device.platform} {device.device_kind}".strip(),
        versions=(jax.__version__, version("jaxlib")),
        seed=seed,
        seconds=time.perf_counter() - begin,
        rows=tuple(rows),
        run={
            "weights_sha256": Recorder(model, runtime).weights.root(),
            "numerics": execution.numerics,
            "determinism": execution.determinism,
            "kernels": dict(execution.kernels),
            "row_tile": execution.row_tile,
        },
        environment=provenance(),
        promises={name: list(held) for name, held in determinism_report(model, runtime).items()},
        fingerprints=lab.fingerprints(),
    )


def select_cases(names: Sequence[str] | None) -> list[tuple[str, int | None]]:
    """Returns (name, number of runs or None) of the cases asked for, in their usual order.

    Raises:
        InputError: a name that is no case, or no legal number of runs.
    """
    if names is None:
        return [(name, None) for name in CASES]
    wanted: dict[str, int | None] = {}
    for entry in names:
        name, _, count = entry.partition("=")
        if name not in CASES:
            raise InputError(f"no case {name!r}; there are: {', '.join(CASES)}")
        if count and (not count.isdecimal() or not int(count)):
            raise InputError(f"NAME=RUNS needs a number of runs above 0, got {entry!r}")
        wanted[name] = int(count) if count else None
    return [(name, wanted[name]) for name in CASES if name in wanted]


def _run(
    lab: Lab, engines: EngineLab, name: str, runs: int | None, seed: int, locates: bool
) -> CaseRow:
    if name == MESH:
        return _mesh()
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name == CONTROL:
        return _control(lab, rng)
    for case in ENGINE_CASES:
        if case.name == name:
            return case.run(engines, rng, runs, locates)
    (case,) = (case for case in NETWORK_CASES if case.name == name)
    found = case.count(lab)
    if isinstance(found, Skip):
        return CaseRow(name=name, skipped=found.reason)
    return _compare(lab, name, replace(case, runs=runs).schedules(lab, rng), locates)


def _compare(lab: Lab, name: str, schedules: Iterable[Schedule], locates: bool) -> CaseRow:
    """Runs schedules; the first one that differs is looked into."""
    runs, compared, wrong, first = 0, 0, [], None
    for number, schedule in enumerate(schedules):
        lone = lab.lone(schedule.ids, schedule.replay, schedule.floor)
        found = execute(lab, schedule)
        runs, compared = runs + 1, compared + len(found)
        differing = []
        for position, row in found:
            expected = lone[position - schedule.floor]
            if (bits(row) != bits(expected)).any():
                differing.append((position, row, expected))
        wrong += [position for position, _, _ in differing]
        if differing and first is None:
            position, row, expected = min(differing, key=lambda one: one[0])
            first = find_difference(
                lab,
                schedule,
                run=number,
                position=position,
                found=row,
                lone=expected,
                locates=locates,
            )
    return CaseRow(
        name=name,
        runs=runs,
        positions=compared,
        differing=len(wrong),
        first=first,
        at=tuple(sorted(set(wrong))[:MOST_POSITIONS]),
    )


def _mesh() -> CaseRow:
    count = len(jax.devices())
    if count == 1:
        return CaseRow(name=MESH, skipped="one device: there is no mesh to compare with")
    return CaseRow(name=MESH, skipped=f"{count} devices, and models load on one of them only")


def _control(lab: Lab, rng: np.random.Generator) -> CaseRow:
    """Positive control: with one bit of one weight flipped, the comparison must notice."""
    schedule = lab.lone_schedule(lab.sequences[0])
    lone, right = lab.lone(schedule.ids), lab.params
    lab.params = flipped(right)
    try:
        found = execute(lab, schedule)
    finally:
        lab.params = right
    wrong = [place for place, row in found if (bits(row) != bits(lone[place])).any()]
    first = None
    if wrong:
        first = Difference(
            run=0, detail="one weight bit", position=wrong[0], op="weights", op_position=wrong[0],
            found="flipped", lone="right",
        )  # fmt: skip
    return CaseRow(
        name=CONTROL,
        runs=1,
        positions=len(found),
        differing=len(wrong),
        first=first,
        at=tuple(wrong),
        expects_difference=True,
    )
