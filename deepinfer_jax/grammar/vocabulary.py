"""A tokenizer as grammars see it: bytes of ordinary tokens, and ids that no grammar may emit."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_jax.errors import GrammarError, TokenizerError

if TYPE_CHECKING:
    import llguidance
    from tokenizers import Tokenizer

    from deepinfer_jax.config.model import ModelConfig

#: Parts of spellings of added tokens that never belong in a completion (io.md 2.5).
_NEVER = (
    *("begin▁of▁sentence", "▁pad▁", "place▁holder"),
    *(f"\uff5c{role}\uff5c" for role in ("User", "Assistant", "System")),
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """inner: llguidance's tokenizer. end: id that ends a completion. allowed: int32 [w], a bit for
    every id that a grammar may emit; w = ceil(vocabulary / 32). added: ids of added tokens.
    """

    inner: "llguidance.LLTokenizer"
    end: int
    allowed: np.ndarray
    added: dict[str, int]

    @property
    def width(self) -> int:
        """Words of a mask row."""
        return len(self.allowed)

    def token(self, spelling: str) -> int:
        """Returns the id of an added token.

        Raises:
            GrammarError: there is none of that spelling.
        """
        if spelling not in self.added:
            raise GrammarError(f"{spelling!r} must be an added token of tokenizer.json, and is not")
        return self.added[spelling]


def grammar_vocabulary(tokenizer: "Tokenizer", config: "ModelConfig") -> Vocabulary:
    """Returns the vocabulary of a model; takes a second for 129k ids.

    All added tokens become special: llguidance would allow the others inside of strings.

    Raises:
        TokenizerError: llguidance cannot read the tokenizer.
    """
    import llguidance

    data = json.loads(tokenizer.to_str())
    size, end = config.vocab_size, config.eos_token_id
    added = {one["content"]: int(one["id"]) for one in data["added_tokens"]}
    for one in data["added_tokens"]:
        one["special"] = True
    try:
        inner = llguidance.LLTokenizer(json.dumps(data), n_vocab=size, eos_token=end)
    except ValueError as error:
        raise TokenizerError(f"llguidance cannot read this tokenizer.json: {error}") from error
    if inner.vocab_size != size:
        raise TokenizerError(
            f"the tokenizer must have at most the {size} ids of the model, llguidance counts "
            f"{inner.vocab_size}"
        )
    never = {id for text, id in added.items() if any(part in text for part in _NEVER)}
    never |= {config.image_token_id} if config.image_token_id is not None else set()
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[:size] = 1
    bits[[id for id in never if id < size and id != end]] = 0
    allowed = np.packbits(bits, bitorder="little").view(np.int32)
    return Vocabulary(inner=inner, end=end, allowed=allowed, added=added)
