"""Needle recall: codes of people hidden in filler of 200 to 8,000 tokens."""

import math
import re

from deepinfer_jax.training.corpus import lexicon
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.records import Item, Message

MIN_TOKENS, MAX_TOKENS = 200, 8192
# Tokens of the question, the template and the answer, at most.
_OVERHEAD = 48
_PIECE = re.compile(r"\w+|[^\w\s]")


def _fillers() -> tuple[tuple[str, int], ...]:
    """Returns filler sentences without names and numbers, and their lengths in tokens."""
    found = [f"The {c} {t} is in the {x}." for c in lexicon.COLORS for t in lexicon.THINGS
             for x in lexicon.CONTAINERS[:4]]  # fmt: skip
    found += [f"It is {w} at the {s}." for w in lexicon.WEATHER for s in lexicon.SPOTS]
    found += [f"The {j} walks to the {s}." for j in lexicon.JOBS for s in lexicon.SPOTS]
    found += [f"The {m} near the {s} is {c}." for m in lexicon.ANIMALS for s in lexicon.SPOTS
              for c in lexicon.COLORS[:3]]  # fmt: skip
    found += [f"The {m} looks at the {j}." for m in lexicon.ANIMALS for j in lexicon.JOBS]
    return tuple((text, len(_PIECE.findall(text))) for text in found)


_FILLERS = _fillers()


def _needle(name: str, code: str) -> str:
    return f"The code of {name} is {code}."


def draw_length(draw: Draw, longest: int) -> int:
    """Returns a length between 200 and `longest` tokens, log-uniformly."""
    return int(MIN_TOKENS * math.exp(math.log(longest / MIN_TOKENS) * draw.uniform()))


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns an item of at most `tokens` tokens with 1 to 4 codes, one of which is asked."""
    tokens = tokens or draw_length(draw, MAX_TOKENS)
    people = draw.sample(lexicon.names(split), draw.between(1, 4))
    codes: list[str] = []
    while len(codes) < len(people):
        code = lexicon.draw_code(draw, split)
        if code not in codes:
            codes.append(code)
    # A needle is at most 14 tokens: the name may take four, the code takes four.
    budget = tokens - _OVERHEAD - 14 * len(people)
    sentences: list[str] = []
    while budget > 0:
        text, size = draw.pick(_FILLERS)
        sentences.append(text)
        budget -= size
    for name, code in zip(people, codes, strict=True):
        sentences.insert(draw.below(len(sentences) + 1), _needle(name, code))
    answer = _needle(people[0], codes[0])
    depth = sentences.index(answer) / len(sentences)
    context, question = " ".join(sentences), f"What is the code of {people[0]}?"
    return Item(
        task="needle",
        key=key,
        answer=answer,
        messages=(
            Message(role="user", content=f"{context}\n\n{question}"),
            Message(role="assistant", content=answer),
        ),
        entities=(*people, *codes),
        meta={"code": codes[0], "tokens": tokens, "depth": depth, "codes": tuple(codes)},
    )
