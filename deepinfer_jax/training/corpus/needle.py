"""Needle recall: codes of people hidden in filler, contexts of 64 to 8,192 tokens.

Training items ask for every code in turn: a long context teaches more than one answer.
"""

import math
import re

from deepinfer_jax.training.corpus import lexicon
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.records import Item, Message

MIN_TOKENS, MAX_TOKENS = 64, 8192
# Tokens at most: of the template and a system turn; of a needle (the name may take four, the code
# takes four); of a question with its answer.
_OVERHEAD, _NEEDLE, _TURN = 20, 14, 30
_PIECE = re.compile(r"\w+|[^\w\s]")


# The last colour, pink, is two tokens of nano's tokenizer: fillers count a word as one.
_COLORS = lexicon.COLORS[:-1]


def _fillers() -> tuple[tuple[str, int], ...]:
    """Returns filler sentences without names and numbers, and their lengths in tokens."""
    found = [f"The {c} {t} is in the {x}." for c in _COLORS for t in lexicon.THINGS
             for x in lexicon.CONTAINERS[:4]]  # fmt: skip
    found += [f"It is {w} at the {s}." for w in lexicon.WEATHER for s in lexicon.SPOTS]
    found += [f"The {j} walks to the {s}." for j in lexicon.JOBS for s in lexicon.SPOTS]
    found += [f"The {m} near the {s} is {c}." for m in lexicon.ANIMALS for s in lexicon.SPOTS
              for c in _COLORS[:3]]  # fmt: skip
    found += [f"The {m} looks at the {j}." for m in lexicon.ANIMALS for j in lexicon.JOBS]
    return tuple((text, len(_PIECE.findall(text))) for text in found)


_FILLERS = _fillers()


def _needle(name: str, code: str) -> str:
    return f"The code of {name} is {code}."


def draw_length(draw: Draw, longest: int) -> int:
    """Returns a length between 64 and `longest` tokens, log-uniformly."""
    return int(MIN_TOKENS * math.exp(math.log(longest / MIN_TOKENS) * draw.uniform()))


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns an item of at most `tokens` tokens with 1 to 4 codes; the last question counts.

    Outside the training split there is one question.
    """
    tokens = tokens or draw_length(draw, MAX_TOKENS)
    asks_all = split == "train"
    room = (tokens - _OVERHEAD) // (_NEEDLE + _TURN) if asks_all else 4
    people = draw.sample(lexicon.names(split), draw.between(1, max(1, min(4, room))))
    codes: list[str] = []
    while len(codes) < len(people):
        code = lexicon.draw_code(draw, split)
        if code not in codes:
            codes.append(code)
    turns = len(people) if asks_all else 1
    budget = tokens - _OVERHEAD - _NEEDLE * len(people) - _TURN * turns
    sentences: list[str] = []
    while budget > 0:
        text, size = draw.pick(_FILLERS)
        sentences.append(text)
        budget -= size
    for name, code in zip(people, codes, strict=True):
        sentences.insert(draw.below(len(sentences) + 1), _needle(name, code))
    asked = list(zip(people, codes, strict=True))[:turns]
    messages: list[Message] = []
    for name, code in asked:
        question = f"What is the code of {name}?"
        text = question if messages else f"{' '.join(sentences)}\n\n{question}"
        messages += [
            Message(role="user", content=text),
            Message(role="assistant", content=_needle(name, code)),
        ]
    answer, code = messages[-1].content, asked[-1][1]
    return Item(
        task="needle",
        key=key,
        answer=answer,
        messages=tuple(messages),
        entities=(*people, *codes),
        meta={
            "code": code,
            "tokens": tokens,
            "depth": sentences.index(answer) / len(sentences),
            "codes": tuple(codes),
        },
    )
