"""Small Python programs; the answer is what they print."""

from dataclasses import dataclass, field

from deepinfer_jax.training.corpus import lexicon
from deepinfer_jax.training.corpus.draw import Draw, in_split
from deepinfer_jax.training.corpus.records import Item, Message

_NAMES = ("a", "b", "c", "n", "x", "y")
_ASKS = ("What does this code print?\n\n{code}", "{code}\n\nWhat is printed?")


@dataclass(slots=True)
class _Program:
    """Lines of a program, the values of its variables, and the trace of assignments."""

    lines: list[str] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)

    def assign(self, name: str, line: str, value: int) -> None:
        self.lines.append(line)
        self.note(name, value)

    def note(self, name: str, value: int) -> None:
        self.values[name] = value
        self.trace.append(f"{name} = {value}.")


def _operation(draw: Draw, value: int) -> tuple[str, int, int]:
    """Returns a sign, an operand and the result, which stays within 0..99."""
    while True:
        sign, operand = draw.pick("++-*"), draw.between(1, 9)
        result = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
        if 0 <= result < 100:
            return sign, operand, result


def _straight(draw: Draw, p: _Program, name: str, other: str) -> str:
    value = draw.between(1, 20)
    p.assign(name, f"{name} = {value}", value)
    for _ in range(draw.between(1, 3)):
        target = draw.pick((name, other))
        source = draw.pick(tuple(p.values))
        sign, operand, result = _operation(draw, p.values[source])
        p.assign(target, f"{target} = {source} {sign} {operand}", result)
    shown = draw.pick(tuple(p.values))
    p.lines.append(f"print({shown})")
    return str(p.values[shown])


def _loop(draw: Draw, p: _Program, name: str, other: str) -> str:
    value, rounds = draw.between(0, 10), draw.between(2, 5)
    p.assign(name, f"{name} = {value}", value)
    step = draw.between(1, 6)
    by_index = draw.chance(0.4)
    p.lines.append(f"for i in range({rounds}):")
    p.lines.append(f"    {name} = {name} + {'i' if by_index else step}")
    for i in range(rounds):
        p.note(name, p.values[name] + (i if by_index else step))
    p.lines.append(f"print({name})")
    return str(p.values[name])


def _branch(draw: Draw, p: _Program, name: str, other: str) -> str:
    value, bound = draw.between(0, 30), draw.between(0, 30)
    p.assign(name, f"{name} = {value}", value)
    yes, no = draw.sample(lexicon.COLORS, 2)
    p.lines += [f"if {name} > {bound}:", f'    print("{yes}")', "else:", f'    print("{no}")']
    p.trace.append(f"{value} > {bound} {'yes' if value > bound else 'no'}.")
    return yes if value > bound else no


def _listing(draw: Draw, p: _Program, name: str, other: str) -> str:
    values = [draw.between(0, 30) for _ in range(draw.between(2, 5))]
    added = draw.between(0, 30)
    p.lines.append(f"{name} = [{', '.join(map(str, values))}]")
    if draw.chance(0.5):
        p.lines.append(f"{name}.append({added})")
        values = [*values, added]
    p.trace.append(f"{name} = [{', '.join(map(str, values))}].")
    index = draw.below(len(values))
    shown, answer = draw.pick(
        (
            (f"len({name})", len(values)),
            (f"max({name})", max(values)),
            (f"{name}[{index}]", values[index]),
            (f"{name}[-1]", values[-1]),
        )
    )
    p.lines.append(f"print({shown})")
    return str(answer)


def _text(draw: Draw, p: _Program, name: str, other: str) -> str:
    word, count = draw.pick((*lexicon.COLORS, *lexicon.NOUNS)), draw.between(2, 4)
    second = draw.pick((*lexicon.COLORS, *lexicon.NOUNS))
    p.lines.append(f'{name} = "{word}"')
    p.lines.append(f'{other} = "{second}"')
    p.trace.append(f"{name} = {word}. {other} = {second}.")
    kind = draw.below(2)
    p.lines.append(f"print({name} * {count})" if kind else f"print({name}, {other})")
    return word * count if kind else f"{word} {second}"


_KINDS = {
    "straight": _straight,
    "loop": _loop,
    "branch": _branch,
    "list": _listing,
    "text": _text,
}


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns one program of the split and its printed line; thinking writes the assignments."""
    while True:
        program = _Program()
        kind = draw.pick(("straight", "straight", *_KINDS))
        name, other = draw.sample(_NAMES, 2)
        printed = _KINDS[kind](draw, program, name, other)
        code = "\n".join(program.lines)
        if in_split(split, "code text", code):
            break
    return Item(
        task="trace",
        key=key,
        answer=printed,
        messages=(
            Message(role="user", content=draw.pick(_ASKS).format(code=code)),
            Message(
                role="assistant",
                content=printed,
                reasoning=" ".join(program.trace) if thinking else "",
            ),
        ),
        thinking=thinking,
        meta={"kind": kind, "problem": code},
    )
