"""Token reduction: which ids count as the same token for the n-gram hash (model.md 3.10.1)."""

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_jax.config.model import EngramConfig
from deepinfer_jax.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SENTINEL = "\ue000"
_SPACES = re.compile(r"[ \t\r\n]+")


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Compressed id of every vocabulary id: int32 [vocab], hashable by content.

    Static rather than an array leaf, so that a float32 parameter tree holds floats only and can be
    differentiated as a whole. Ids beyond the tokenizer have compressed id -1, the image sentinel.
    """

    ids: np.ndarray

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the ids."""
        return hashlib.sha256(np.ascontiguousarray(self.ids, dtype=np.int32).tobytes()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenMap) and self.digest == other.digest


def reduction_key(text: str, spelling: str) -> str:
    """Returns the string under which a token is merged with others.

    text: the id decoded alone, special tokens kept. spelling: its raw vocabulary entry, used when
    the bytes are not valid text.
    """
    if "\ufffd" in text:
        return spelling
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if not unicodedata.combining(c)).lower()
    folded = _SPACES.sub(" ", folded)
    if folded == " ":
        folded = _SENTINEL
    folded = folded.strip().replace(_SENTINEL, " ")
    return folded or text


def build_token_map(tokenizer: "Tokenizer", engram: EngramConfig, vocab_size: int) -> TokenMap:
    """Returns the compressed ids of `tokenizer`, numbered in order of first appearance.

    Raises:
        TokenizerError: the reduction does not give `engram_compressed_vocab_size` ids, or the
            tokenizer has more ids than the model.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        raise TokenizerError(
            f"tokenizer.json must not have more ids than the model: it has {size}, config.json "
            f"says vocab_size={vocab_size}. Use the tokenizer published with the checkpoint."
        )
    numbers: dict[str, int] = {}
    ids = np.full((vocab_size,), -1, np.int32)
    for token in range(size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = reduction_key(text, tokenizer.id_to_token(token) or "")
        ids[token] = numbers.setdefault(key, len(numbers))
    if len(numbers) != engram.engram_compressed_vocab_size:
        raise TokenizerError(
            "the token reduction of tokenizer.json must give engram_compressed_vocab_size="
            f"{engram.engram_compressed_vocab_size} distinct ids, it gives {len(numbers)}. Every "
            "hash multiplier depends on it: use the tokenizer published with the checkpoint."
        )
    ids.setflags(write=False)
    return TokenMap(ids)
