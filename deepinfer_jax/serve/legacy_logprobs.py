"""Log-probabilities in the form of `/v1/completions`: four lists, one entry a token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_jax.engine.output import RequestOutput, TopLogprobs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Lists = dict[str, list[Any]]
_LEAST = -9999.0  # JSON has no -inf


def legacy_logprobs(
    tokenizer: "Tokenizer",
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[TopLogprobs],
    offset: int = 0,
) -> Lists:
    """Returns the lists of some tokens; offset: of the first one in the text."""
    spelled = [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
    offsets = []
    for text in spelled:
        offsets.append(offset)
        offset += len(text)
    best: list[dict[str, float] | None] = []
    for place in range(len(spelled)):
        pairs = top[place] if place < len(top) else ()
        # Worst first, so that of two ids with one spelling the better one is kept.
        found = {
            tokenizer.decode([token], skip_special_tokens=False): max(value, _LEAST)
            for token, value in reversed(pairs)
        }
        best.append(dict(reversed(found.items())) or None)
    return {
        "tokens": spelled,
        "token_logprobs": [None if one is None else max(one, _LEAST) for one in logprobs],
        "top_logprobs": best,
        "text_offset": offsets,
    }


def prompt_logprobs(tokenizer: "Tokenizer", output: RequestOutput) -> Lists:
    """Returns the lists of a prompt that was scored; its first token has no probability."""
    scored = output.score()
    values = [None, *scored.logprobs.tolist()]
    return legacy_logprobs(tokenizer, scored.prompt_token_ids, values, ((), *scored.top_logprobs))
