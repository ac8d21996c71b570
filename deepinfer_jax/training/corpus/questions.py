"""Questions about a given story; every answer follows from its tracked facts."""

from deepinfer_jax.training.corpus import lexicon
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.records import Item, Message
from deepinfer_jax.training.corpus.story import Story, write_story
from deepinfer_jax.training.corpus.world import HANDS, Fact

_FRAMES = (
    "{story}\n\n{question}",
    "Read the story.\n\n{story}\n\nQuestion: {question}",
    "Story: {story}\n\n{question}",
)


def _asked(fact: Fact, value: str | int) -> tuple[str, str] | None:
    """Returns the question about a fact and its answer, or None if nobody asks that."""
    kind, who, noun = (*fact, "", "")[:3]
    if kind == "count":
        answer = f"{who} has {lexicon.counted(int(value), noun)}."
        return f"How many {lexicon.NOUNS[noun]} does {who} have at the end?", answer
    if kind == "pet":
        _, animal, name = str(value).split()
        question = f"What is the name of the {animal} of {who}?"
        return question, f"The {animal} of {who} is named {name}."
    if kind == "at" and value != "home":
        return f"Where is {who} at the end?", f"{who} is at the {value}."
    if kind == "at":
        return f"Where is {who} at the end?", f"{who} is at home."
    if kind == "in" and value != HANDS:
        return f"Where is the {who} at the end?", f"The {who} is in the {value}."
    return {
        "home": (f"Where does {who} live?", f"{who} lives in {value}."),
        "job": (f"What is the job of {who}?", f"{who} is a {value}."),
        "friend": (f"Who is a friend of {who}?", f"{value} is a friend of {who}."),
        "weather": ("How is the weather?", f"It is a {value} day."),
    }.get(kind)


def _reasoning(story: Story, fact: Fact) -> str:
    """Returns the sentences that decide a fact; for counts, with the sums."""
    steps = []
    total: int | None = None
    for sentence, amount in story.world.history[fact]:
        if fact[0] != "count":
            steps = [sentence]
        elif amount is None:
            if total is None:
                total = int(next(w for w in sentence.split() if w.isdigit()))
                steps.append(sentence)
        elif total is not None:
            after = total + amount
            steps.append(
                f"{sentence} {total} {'+' if amount > 0 else '-'} {abs(amount)} = {after}."
            )
            total = after
    return " ".join(steps)


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns a question about a story; with thinking, the deciding sentences come first."""
    story = write_story(draw, split, draw.between(2, 9))
    asked: dict[str, list[tuple[Fact, str, str]]] = {}
    for fact, value in story.world.values.items():
        if pair := _asked(fact, value):
            asked.setdefault(fact[0], []).append((fact, *pair))
    kinds = [kind for kind in asked for _ in range(4 if kind == "count" else 1)]
    fact, question, answer = draw.pick(asked[draw.pick(kinds)])
    frame = draw.pick(_FRAMES)
    reasoning = _reasoning(story, fact) if thinking else ""
    return Item(
        task="question",
        key=key,
        answer=answer,
        messages=(
            Message(role="user", content=frame.format(story=story.text, question=question)),
            Message(role="assistant", content=answer, reasoning=reasoning),
        ),
        thinking=thinking,
        entities=story.entities,
        meta={"kind": fact[0]},
    )
