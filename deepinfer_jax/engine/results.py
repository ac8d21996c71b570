"""Log-probabilities of a step as the host reads them, put where their requests want them."""

from deepinfer_jax.engine.output import TopLogprobs
from deepinfer_jax.engine.plan import Chunk
from deepinfer_jax.engine.request import Request
from deepinfer_jax.sampling.logprobs import TokenLogprobs


def token_record(chosen: TokenLogprobs, place: int, count: int) -> tuple[float, TopLogprobs]:
    """Returns (log-probability, the `count` best ids with theirs) of one emitting row."""
    pairs = zip(
        chosen.top_ids[place, :count].tolist(),
        chosen.top_logprobs[place, :count].tolist(),
        strict=True,
    )
    return float(chosen.logprob[place]), tuple(pairs)


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
