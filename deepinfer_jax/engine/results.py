"""Results of a step as the host reads them."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepinfer_jax.engine.completion import CompletionBuilder
from deepinfer_jax.engine.layout import RESULT
from deepinfer_jax.engine.output import TopLogprobs
from deepinfer_jax.engine.plan import Chunk
from deepinfer_jax.engine.program import StepResult
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.slots import AT_STOP, ENDED, FAILED
from deepinfer_jax.record.logit_hash import hash_text
from deepinfer_jax.sampling.logprobs import TokenLogprobs


class RoundResult(NamedTuple):
    """What one sequence got: words of `layout.RESULT` and its tokens.

    kept: tokens that are output, without a stop id and without the mark of a failed row.
    """

    first: int
    code: int
    status: int
    tokens: list[int]
    kept: list[int]


@dataclass(frozen=True, slots=True)
class RoundResults:
    """What all emitters of a step got, by column [n]: lists, which a loop reads fastest.

    generation, first, count, code, status, verified, accepted: words of `layout.RESULT`. tokens
    [n][width]: `count` of them valid. survivals [n, drafts]: of the new drafts; None without
    drafting.
    """

    generation: list[int]
    first: list[int]
    count: list[int]
    code: list[int]
    status: list[int]
    verified: list[int]
    accepted: list[int]
    tokens: list[tuple[int, ...]]
    survivals: np.ndarray | None

    def rows(self, rounds: int) -> int:
        """Returns the rows of the first rounds: drafts, and one each unless it had ended before."""
        return sum(self.verified[:rounds]) + rounds - self.code[:rounds].count(ENDED)

    def kept(self, place: int) -> list[int]:
        """Returns the output tokens of the emitter at `place`."""
        is_cut = self.code[place] in (AT_STOP, FAILED)
        return list(self.tokens[place][: self.count[place] - is_cut])

    def one(self, place: int) -> RoundResult:
        """Returns what the emitter at `place` got."""
        return RoundResult(
            first=self.first[place],
            code=self.code[place],
            status=self.status[place],
            tokens=list(self.tokens[place][: self.count[place]]),
            kept=self.kept(place),
        )


def round_results(rounds: np.ndarray, count: int) -> RoundResults:
    """Returns the results of the first `count` emitters of `program.StepResult.rounds`."""
    words = len(RESULT)
    width = 1 + (rounds.shape[1] - words) // 2
    # By column: rows of words are slow to unpack.
    columns = rounds[:count, : words + width].T.tolist()
    _, generation, first, counts, code, status, verified, accepted, *tokens = columns
    return RoundResults(
        generation=generation,
        first=first,
        count=counts,
        code=code,
        status=status,
        verified=verified,
        accepted=accepted,
        tokens=list(zip(*tokens, strict=True)),
        survivals=rounds[:count, words + width :].view(np.float32) if width > 1 else None,
    )


def push_told(
    output: CompletionBuilder, found: RoundResult, step: StepResult, count: int | None
) -> int:
    """Gives a completion its new tokens with what is told of each; returns how many.

    Until a stop string is complete. count: alternatives that its request wants, None without
    log-probabilities.
    """
    for place, token in enumerate(found.kept, start=found.first):
        output.push(token, *token_record(step, place, count))
        if output.finish_reason is not None:
            return place - found.first + 1
    return len(found.kept)


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
    assert chosen is not None
    pairs = zip(
        chosen.top_ids[place, :count].tolist(),
        chosen.top_logprobs[place, :count].tolist(),
        strict=True,
    )
    return float(chosen.logprob[place]), tuple(pairs), logit_hash


def take_scores(
    owner: Mapping[Sequence, Request], chunks: Items[Chunk], prompt: TokenLogprobs
) -> None:
    """Keeps the scores of the chunks' prompt rows for the requests that want them.

    Row i scores id i + 1, so the last row of the prompt has none.
    """
    for chunk in chunks:
        if chunk.sequence in owner:
            _take_chunk(owner[chunk.sequence], chunk, prompt)


def _take_chunk(request: Request, chunk: Chunk, prompt: TokenLogprobs) -> None:
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
