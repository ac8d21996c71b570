"""Runs a job: every line of the input is answered once, in order of completion."""

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.errors import InputError
from deepinfer_jax.jobs.lines import Line, Record, Task, answer, parse_line, read_lines
from deepinfer_jax.jobs.store import open_output, read_facts
from deepinfer_jax.llm import LLM
from deepinfer_jax.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """State of a job. total: lines to answer; before: answered by earlier runs; done: by any run;
    failed: lines of this run that had an error."""

    total: int
    before: int
    done: int
    failed: int
    seed: int


def run_job(
    llm: LLM,
    source: Path,
    target: Path,
    params: SamplingParams,
    *,
    bos: bool = True,
    report: Callable[[JobProgress, Engine], None] | None = None,
) -> JobProgress:
    """Answers every line of `source` that has no answer in `target` yet, and appends it there.

    A run that is killed at any moment is continued by the same call; at level "batch" the answers
    are then those of a run that was not. `llm.runtime` may differ in what changes no bits.

    Args:
        llm: runs the requests.
        source: JSON lines; see `deepinfer_jax.jobs.lines`.
        target: JSON lines, in order of completion. Each has the number and a hash of its line.
        params: of fields that a line leaves out. `seed` is that of the job, from which the seeds
            of lines are derived; None draws one, or takes that of the run that is continued.
        bos: put the begin-of-text token before prompts that are texts.
        report: called at the beginning and after every write.

    Raises:
        InputError: a file cannot be used, or `target` belongs to another job.
    """
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError(f"the output must be another file than the input, got {target} for both")
    facts = read_facts(source)
    options = job_options(llm, params, bos=bos)
    with open_output(target, facts, options, params.seed) as output:
        params = replace(params, seed=output.seed)
        state = JobProgress(
            total=facts.filled, before=output.done, done=output.done, failed=0, seed=output.seed
        )
        engine = llm.engine
        if report is not None:
            report(state, engine)
        lines = (line for line in read_lines(source) if not output.has(line.number))
        with closing(_answers(llm, lines, params, bos)) as answers:
            for records in answers:
                output.append(records)
                failed = state.failed + sum("error" in record for record in records)
                state = replace(state, done=output.done, failed=failed)
                if report is not None:
                    report(state, engine)
        return state


def job_options(llm: LLM, params: SamplingParams, *, bos: bool) -> dict[str, Any]:
    """Returns what the answers depend on besides the input and the seed, as JSON values."""
    execution, runtime = llm.model.config.execution, llm.runtime
    source = Path(llm.model.source)
    found = asdict(replace(params, seed=None)) | {
        "model": str(source.resolve()) if source.exists() else llm.model.source,
        "numerics": execution.numerics,
        "determinism": execution.determinism,
        "kernels": execution.kernels,
        "max_len": llm.max_len,
        "replay": runtime.replay,
        "replay_keep_tokens": runtime.replay_keep_tokens,
        "bos": bos,
    }
    return json.loads(json.dumps(found, default=repr))


def _answers(
    llm: LLM, lines: Iterator[Line], params: SamplingParams, bos: bool
) -> Generator[list[Record]]:
    """Yields answers as they come. Lines are read ahead, so that no slot is idle, but not far."""
    engine = llm.engine
    running: dict[str, Task] = {}
    most = 2 * llm.runtime.max_seqs
    is_read = False
    try:
        while True:
            ready: list[Record] = []
            while not is_read and len(ready) + sum(t.params.n for t in running.values()) < most:
                line = next(lines, None)
                if line is None:
                    is_read = True
                    break
                task = parse_line(llm, line, params, bos=bos)
                if isinstance(task, Task):
                    request = engine.submit(task.token_ids, task.params)
                    running[request.request_id] = task
                else:
                    ready.append(task)
            for request in engine.step():
                task = running.pop(request.request_id, None)
                if task is not None:
                    ready.append(answer(llm, task, request.output(), request.error))
            if ready:
                yield ready
            if is_read and not running:
                return
    finally:
        for name in running:
            engine.abort(name)


__all__ = ["JobProgress", "job_options", "run_job"]
