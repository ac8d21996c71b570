"""Ids and labels of items: which tokens the template gives, and which the model must write."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deepinfer_jax.errors import TokenizerError
from deepinfer_jax.training.corpus.records import Item
from deepinfer_jax.training.corpus.template import ASSISTANT, BOS, EOS, full_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_COUNT = re.compile(r"\b([A-Z][a-z]+) has (\d+) ([a-z]+)")
# Labels of tokens. TEXT: plain text that the model continues (stories).
PAD, PROMPT, COMPLETION, TEXT = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Rendered:
    """An item as text, ids [n] int32, labels [n] int8 and copies [n] bool (`_copies`)."""

    item: Item
    text: str
    ids: np.ndarray
    labels: np.ndarray
    copies: np.ndarray


def _chat_labels(ids: np.ndarray, assistant: int, eos: int) -> np.ndarray:
    """Labels as completion what follows the two opening tokens of an assistant turn, up to eos."""
    edges = np.zeros(len(ids) + 3, np.int8)
    starts = np.flatnonzero(ids == assistant)
    edges[starts + 2] += 1
    edges[np.flatnonzero(ids == eos) + 1] -= 1
    return np.where(np.cumsum(edges[: len(ids)]) > 0, COMPLETION, PROMPT).astype(np.int8)


def _raw_labels(item: Item, ids: np.ndarray, prompt_len: int) -> np.ndarray:
    labels = np.full(len(ids), TEXT if item.task == "story" else COMPLETION, np.int8)
    labels[: 1 if item.task == "story" else prompt_len] = PROMPT
    return labels


def _copies(item: Item, text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Marks the tokens that can only be right if the model looks back.

    Those are, of a name that the text has mentioned with another name nearer, the tokens behind the
    first, and the first too if a sentence names two; and numbers that say again how many of
    something somebody has. They are few, and the loss hides them unless they weigh more.
    """
    marked = np.zeros(len(offsets), np.bool_)
    names = [entity for entity in item.entities if entity.isalpha()]
    if not names:
        return marked
    starts = np.array([start for start, _ in offsets])
    counted: set[tuple[str, str]] = set()
    for found in _COUNT.finditer(text):
        what = found[1], found[3].removesuffix("s")
        if what in counted:  # the token of a number may begin with the space before it
            marked |= (starts >= found.start(2) - 1) & (starts < found.end(2))
        counted.add(what)
    seen: set[str] = set()
    nearest, end = "", 0
    for found in re.finditer(rf"\b(?:{'|'.join(names)})\b", text):
        if found[0] in seen and found[0] != nearest:
            is_second = "." not in text[end : found.start()]
            first = found.start() - 1 if is_second else found.start() + 1
            marked |= (starts >= first) & (starts < found.end())
        nearest, end = found[0], found.end()
        seen.add(nearest)
    return marked


def _control_id(tokenizer: "Tokenizer", spelling: str) -> int:
    number = tokenizer.token_to_id(spelling)
    if number is None:
        raise TokenizerError(
            f"tokenizer.json must have the control tokens of V4.1, {spelling!r} is missing. "
            "Use the tokenizer of nano or of a published checkpoint."
        )
    return number


def render_batch(items: Sequence[Item], tokenizer: "Tokenizer") -> list[Rendered]:
    """Returns the texts, ids and labels of items.

    The corpus never spells a special token inside a text, so one pass over the whole text gives
    the ids that recipe gives part by part.
    """
    texts = [full_text(item) for item in items]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    prompts = [i for i, item in enumerate(items) if item.is_raw and item.task != "story"]
    openings = tokenizer.encode_batch_fast(
        [BOS + items[i].prompt for i in prompts], add_special_tokens=False
    )
    prompt_len = {i: len(e.ids) for i, e in zip(prompts, openings, strict=True)}
    assistant, eos = _control_id(tokenizer, ASSISTANT), _control_id(tokenizer, EOS)
    out = []
    for i, (item, text, encoding) in enumerate(zip(items, texts, encoded, strict=True)):
        ids = np.array(encoding.ids, np.int32)
        if item.is_raw:
            labels = _raw_labels(item, ids, prompt_len.get(i, 1))
        else:
            labels = _chat_labels(ids, assistant, eos)
        copies = _copies(item, text, encoding.offsets)
        out.append(Rendered(item, text, ids, labels, copies))
    return out


def render(item: Item, tokenizer: "Tokenizer") -> Rendered:
    """Returns the text, ids and labels of one item."""
    return render_batch([item], tokenizer)[0]
