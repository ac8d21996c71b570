"""Results of a step as the host reads them."""

from dataclasses import dataclass

import numpy as np

from deepinfer_jax.engine.layout import RESULT
from deepinfer_jax.engine.output import TopLogprobs
from deepinfer_jax.engine.plan import Chunk
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.slots import AT_STOP, FAILED
from deepinfer_jax.record.logit_hash import hash_text
from deepinfer_jax.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What one sequence got: words of `layout.RESULT`, its tokens, survivals of its new drafts."""

    generation: int
    first: int
    code: int
    status: int
    verified: int
    accepted: int
    rows: int
    tokens: list[int]
    survival: np.ndarray

    @property
    def kept(self) -> list[int]:
        """Tokens that are output: without a stop id, and without the mark of a failed row."""
        return self.tokens[:-1] if self.code in (AT_STOP, FAILED) else self.tokens


def round_results(rounds: np.ndarray, count: int) -> list[RoundResult]:
    """Returns the results of the first `count` emitters of `program.StepResult.rounds`."""
    words = len(RESULT)
    width = 1 + (rounds.shape[1] - words) // 2
    survivals = rounds[:count, words + width :].view(np.float32)
    found = []
    for row, survival in zip(rounds[:count, : words + width].tolist(), survivals, strict=True):
        _, generation, first, emitted, code, status, verified, accepted = row[:words]
        found.append(
            RoundResult(
                generation=generation,
                first=first,
                code=code,
                status=status,
                verified=verified,
                accepted=accepted,
                rows=verified + (code >= 0),
                tokens=row[words : words + emitted],
                survival=survival,
            )
        )
    return found


def token_record(
    result: StepResult, place: int, count: int | None
) -> tuple[float | None, TopLogprobs, str | None]:
    """Returns what is told of the token of one emitting row.

    Its log-probability and the `count` best ids with theirs, unless count is None; the hash of the
    logits, if they are recorded.
    """
    logit_hash = None if result.hashes is None else hash_text(result.hashes[place])
    if count is None:
        return None, (), logit_hash
    chosen = result.chosen
    pairs = zip(
        chosen.top_ids[place, :count].tolist(),
        chosen.top_logprobs[place, :count].tolist(),
        strict=True,
    )
    return float(chosen.logprob[place]), tuple(pairs), logit_hash


def take_scores(request: Request, chunk: Chunk, prompt: TokenLogprobs) -> None:
    """Keeps the scores of a chunk's prompt rows, if its request wants them.

    Row i scores id i + 1, so the last row of the prompt has none.
    """
    sequence, scores = chunk.sequence, request.prompt_scores
    stop = min(chunk.stop, sequence.prompt_len - 1)
    late = sequence.generation != chunk.generation
    if late or scores is None or sequence.child or stop <= chunk.start:
        return
    where, rows = slice(chunk.start, stop), slice(chunk.row, chunk.row + stop - chunk.start)
    scores[0][where] = prompt.logprob[rows]
    scores[1][where] = prompt.top_ids[rows, : scores[1].shape[1]]
    scores[2][where] = prompt.top_logprobs[rows, : scores[2].shape[1]]
    sequence.output.needs_prompt_scores = stop < sequence.prompt_len - 1
