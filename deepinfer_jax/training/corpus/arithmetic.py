"""Addition and subtraction of numbers up to three digits; differences are never negative."""

from deepinfer_jax.training.corpus.draw import Draw, in_split
from deepinfer_jax.training.corpus.records import Item, Message

_ASKS = {
    "+": ("What is {a} + {b}?", "{a} + {b} = ?", "Add {a} and {b}.", "Compute {a} + {b}."),
    "-": ("What is {a} - {b}?", "{a} - {b} = ?", "Subtract {b} from {a}.", "Compute {a} - {b}."),
}


# Pairs below this bound also occur in scratchpads and stories: they are for training only.
SHARED_BELOW = 30


def pair_key(a: int, b: int, sign: str) -> str:
    """Returns the text of an operand pair."""
    return f"{a} {sign} {b}"


def draw_number(draw: Draw) -> int:
    """Returns a number of one, two or three digits."""
    return draw.below((10, 100, 100, 1000, 1000, 1000)[draw.below(6)])


def draw_pair(draw: Draw, split: str, sign: str) -> tuple[int, int]:
    """Returns operands of the split; pairs below `SHARED_BELOW` occur in training only."""
    while True:
        a, b = draw_number(draw), draw_number(draw)
        if sign == "-" and a < b:
            a, b = b, a
        if max(a, b) < SHARED_BELOW:
            if split == "train":
                return a, b
        # Both orders share a split, so no evaluation sum was seen the other way round.
        elif in_split(split, sign, pair_key(max(a, b), min(a, b), sign)):
            return a, b


def pair_entities(a: int, b: int, sign: str) -> tuple[str, ...]:
    """Returns the pair as an entity of its split, or nothing for a shared pair."""
    return (pair_key(a, b, sign),) if max(a, b) >= SHARED_BELOW else ()


def result_of(a: int, b: int, sign: str) -> int:
    """Returns a + b or a - b."""
    return a + b if sign == "+" else a - b


def column_steps(a: int, b: int, sign: str) -> str:
    """Returns the column method from the last digit: one short step per digit."""
    width = max(len(str(a)), len(str(b)))
    carry, steps = 0, []
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        extra = f" {sign} {carry}" if carry else ""
        if sign == "-":
            carry = int(x - y - carry < 0)
            x += 10 * carry
            total = x - y - (1 if extra else 0)
            note = " borrow 1," if carry else ""
        else:
            total = x + y + carry
            carry = total // 10
            note = " carry 1," if carry else ""
        steps.append(f"{x} {sign} {y}{extra} = {total},{note} write {total % 10}.")
    if carry:
        steps.append("Write 1.")
    return " ".join(steps)


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns one sum or difference, in chat or as a raw line."""
    sign = "+" if draw.chance(0.6) else "-"
    a, b = draw_pair(draw, split, sign)
    result = result_of(a, b, sign)
    entities = pair_entities(a, b, sign)
    meta = {"sign": sign, "a": a, "b": b, "result": result}
    if not thinking and draw.chance(0.2):
        prompt = f"{a} {sign} {b} ="
        answer = f" {result}"
        return Item(
            task="arithmetic", key=key, prompt=prompt, answer=answer, entities=entities, meta=meta
        )
    answer = f"{a} {sign} {b} = {result}"
    return Item(
        task="arithmetic",
        key=key,
        answer=answer,
        messages=(
            Message(role="user", content=draw.pick(_ASKS[sign]).format(a=a, b=b)),
            Message(
                role="assistant",
                content=answer,
                reasoning=column_steps(a, b, sign) if thinking else "",
            ),
        ),
        thinking=thinking,
        entities=entities,
        meta=meta,
    )
