"""The requests of an engine that are unfinished, and how they end."""

from collections import Counter
from collections.abc import Callable
from itertools import count

from deepinfer_jax.engine.output import FinishReason
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.results import RoundResult, push_told
from deepinfer_jax.engine.scheduler import Scheduler
from deepinfer_jax.engine.sequence import Phase, Sequence
from deepinfer_jax.engine.slots import AT_LENGTH, AT_STOP, FAILED, RUNNING
from deepinfer_jax.errors import InputError
from deepinfer_jax.sampling.edits import GRAMMAR


class RequestBook:
    """Knows every unfinished request by name, and whose each sequence is."""

    def __init__(
        self, scheduler: Scheduler, counters: Counter[str], clock: Callable[[], float]
    ) -> None:
        """Starts empty; counters: of the engine."""
        self.requests: dict[str, Request] = {}
        self.owner: dict[Sequence, Request] = {}
        self._timed: list[Request] = []  # those with a deadline
        self._scheduler, self._counters, self._clock = scheduler, counters, clock
        self._has_ended = False  # a sequence, since requests that are done were last returned

    def name(self, wanted: str | None, number: int) -> str:
        """Returns the name of a new request, the next free number unless one is wanted.

        Raises:
            InputError: the name is in use.
        """
        names = map(str, count(number))  # a restored request may have the first ones
        unused = (name for name in names if name not in self.requests)
        name = next(unused) if wanted is None else wanted
        if name in self.requests:
            raise InputError(f"request_id must not be in use, {name!r} is")
        return name

    def add(self, request: Request) -> None:
        """Enters a new request."""
        self.requests[request.request_id] = request
        if request.params.deadline_s is not None:
            self._timed.append(request)
        for sequence in request.sequences:
            self.owner[sequence] = request
        self._counters["requests"] += 1

    def abort(self, request_id: str) -> bool:
        """Ends a request with reason "abort"; returns whether it was there."""
        request = self.requests.get(request_id)
        for sequence in request.sequences if request else ():
            self.end(sequence, "abort")
        return request is not None

    def take(self, sequence: Sequence, found: RoundResult, step: StepResult, now: float) -> int:
        """Gives a completion its new tokens, up to a stop string; returns how many.

        What its request's own work raises ends that request alone.
        """
        try:
            return self._take(sequence, found, step, now)
        except Exception as error:
            self.owner[sequence].error = error
            self._counters["errors"] += 1
            self.end(sequence, "error")
            return 0

    def _take(self, sequence: Sequence, found: RoundResult, step: StepResult, now: float) -> int:
        request, output = self.owner[sequence], sequence.output
        if not request.first_token:
            request.first_token = now
        count = sequence.params.logprobs
        if sequence.is_quiet:
            tokens = len(found.kept)  # it ends here, and `end` gives its output all tokens
        elif count is None and step.hashes is None:
            tokens = output.extend(found.kept)
            has_reader = sequence.matcher is not None or output.detokenizer is not None
            sequence.is_quiet = request.sink is None and not has_reader
        else:
            tokens = push_told(output, found, step, count)
        if output.finish_reason is not None:
            self.end(sequence, output.finish_reason, output.stop_reason)
        elif found.code == RUNNING:
            if request.sink is not None:
                request.sink(output.delta())
        elif found.code == FAILED:
            self.end(sequence, "grammar" if found.status == GRAMMAR else "numerical")
        elif found.code == AT_STOP:
            self.end(sequence, "stop", found.tokens[-1])
        elif found.code == AT_LENGTH:
            is_asked = sequence.room == sequence.params.max_tokens
            self.end(sequence, "length" if is_asked else "capacity")
        return tokens

    def end(self, sequence: Sequence, reason: FinishReason, stop: int | str | None = None) -> None:
        """Ends a sequence, unless it has ended, and tells its request's sink."""
        if sequence.phase is Phase.DONE:
            return
        self._has_ended = True
        if sequence.is_quiet:
            sequence.output.tokens = sequence.output_ids
        self._scheduler.end(sequence)
        if sequence.output.finish_reason is None:
            sequence.output.end(reason, stop)
        request = self.owner[sequence]
        if request.sink is not None:
            try:
                request.sink(sequence.output.delta())
            except Exception as error:
                request.error = request.error or error
        self._counters[f"finished_{reason}"] += 1

    def refuse(self, request: Request, error: Exception) -> None:
        """Ends a request whose grammar cannot be used; `stop_reason` says why."""
        request.error = error
        for sequence in request.sequences:
            self.end(sequence, "grammar", str(error))

    def expire(self) -> None:
        """Ends requests that are past their deadline."""
        for request in self._timed:
            limit = request.params.deadline_s
            if limit is not None and self._clock() - request.submitted >= limit:
                for sequence in request.sequences:
                    self.end(sequence, "deadline")

    def finished(self) -> list[Request]:
        """Takes out the requests that are done, and returns them."""
        if not self._has_ended:
            return []
        self._has_ended, now = False, self._clock()
        done = [request for request in self.requests.values() if request.is_done]
        for request in done:
            request.ended = now
            del self.requests[request.request_id]
            for sequence in request.sequences:
                del self.owner[sequence]
        self._timed = [request for request in self._timed if not request.is_done]
        return done
