"""Short stories with tracked facts, and the check that a text does not contradict itself."""

import re
from collections import Counter
from dataclasses import dataclass

from deepinfer_jax.training.corpus import lexicon, world
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.records import Item
from deepinfer_jax.training.corpus.world import World

# No story counts higher: sums of stories stay below the operands that evaluation asks for.
MAX_COUNT = 20
# Most things that an event moves: who has a few keeps some for the events to come.
MAX_CHANGE = 3

_SENTENCE = re.compile(r'[^.!?]*[.!?](?:"[^.!?]*\.)?\s*')


@dataclass(frozen=True, slots=True)
class Story:
    """Sentences of a story, its people and the facts that hold at its end."""

    sentences: tuple[str, ...]
    people: tuple[str, ...]
    entities: tuple[str, ...]
    world: World

    @property
    def text(self) -> str:
        """The sentences in one line."""
        return " ".join(self.sentences)


@dataclass(frozen=True, slots=True)
class StoryReport:
    """Verdict of `check_story`: counts of sentences, contradictions, unknown sentences."""

    sentences: int
    known: int
    contradictions: tuple[str, ...]
    unknown: tuple[str, ...]
    repeated: int

    @property
    def consistent(self) -> bool:
        """No contradiction, every complete sentence understood, none written three times."""
        return not (self.contradictions or self.unknown) and self.known > 0 and self.repeated < 3


def split_sentences(text: str) -> tuple[list[str], str]:
    """Returns the complete sentences of a text and the unfinished rest."""
    sentences = []
    end = 0
    for found in _SENTENCE.finditer(text):
        sentences.append(found[0].strip())
        end = found.end()
    rest = text[end:].strip()
    # Cut off in or right behind a quotation ('Mara says "Thank you!'), the last one is unfinished.
    if sentences and sentences[-1].count('"') == 1 and (not rest or rest.startswith('"')):
        rest = f"{sentences.pop()}{rest}"
    return sentences, rest


def check_story(text: str) -> StoryReport:
    """Returns whether the facts of a text hold together; an unfinished last sentence is left out.

    A sentence outside the grammar is unknown, never a contradiction.
    """
    sentences, _ = split_sentences(text)
    facts = World()
    wrong, unknown = [], []
    for sentence in sentences:
        found = world.match(sentence)
        if found is None:
            unknown.append(sentence)
        elif problem := world.apply(facts, found[0], sentence, found[1]):
            wrong.append(f"{sentence} ({problem})")
    return StoryReport(
        sentences=len(sentences),
        known=len(sentences) - len(unknown),
        contradictions=tuple(wrong),
        unknown=tuple(unknown),
        repeated=max(Counter(sentences).values(), default=0),
    )


class _Writer:
    """Adds sentences that agree with the facts so far, none of them twice."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.facts = World()
        self.sentences: dict[str, None] = {}

    def add(self, form: str, /, *, template: str = "", **slots: str) -> None:
        template = template or self.draw.pick(world.FORMS[form][0])
        sentence = template.format_map(slots)
        if sentence not in self.sentences:
            problem = world.apply(self.facts, form, sentence, slots)
            assert not problem, problem
            self.sentences[sentence] = None

    def counted(self, number: int, noun: str) -> dict[str, str]:
        return {"n": str(number), "o": noun if number == 1 else lexicon.NOUNS[noun]}


def _introduce(w: _Writer, people: list[str], pets: list[str], towns: list[str]) -> None:
    draw = w.draw
    for person, town, pet in zip(people, towns, pets, strict=True):
        w.add("home", a=person, p=town)
        if draw.chance(0.35):
            w.add("job", a=person, j=draw.pick(lexicon.JOBS))
        if draw.chance(0.3):
            w.add("pet", a=person, k=draw.pick(lexicon.COLORS), m=draw.pick(lexicon.ANIMALS), q=pet)
    if draw.chance(0.6):
        w.add("friend", a=people[0], b=people[1])
    if draw.chance(0.4):
        w.add("weather", w=draw.pick(lexicon.WEATHER))
    # One kind of thing each, in the order of the people: nobody's count can be stated twice here.
    kinds = draw.sample(tuple(lexicon.NOUNS), 2)
    for person in people[: draw.between(1, len(people))]:
        parts = w.counted(draw.between(4, 12), draw.pick(kinds))
        w.add("has", template=world.FORMS["has"][0][0], a=person, **parts)


def _changed_once(history: list[tuple[str, int | None]]) -> bool:
    """Says whether a count is one change away from its last statement."""
    changes = [change for _, change in history[-2:]]
    return len(changes) == 2 and changes[0] is None and changes[1] is not None


def _event(w: _Writer, people: list[str]) -> None:
    draw, values = w.draw, w.facts.values
    person = draw.pick(people)
    other = draw.pick([p for p in people if p != person])
    kind = draw.below(10)
    if kind < 5:
        held = [(f, int(v)) for f, v in values.items() if f[0] == "count" and int(v) > 0]
        (_, owner, noun), number = draw.pick(held) if held else (("", person, "coin"), 0)
        amount = draw.between(1, min(number, MAX_CHANGE)) if number else 0
        if kind < 2 and amount:
            receiver = draw.pick([p for p in people if p != owner])
            if int(values.get(("count", receiver, noun), 0)) + amount > MAX_COUNT:
                return
            w.add("give", a=owner, b=receiver, **w.counted(amount, noun))
            if draw.chance(0.3):
                w.add("thank", a=receiver, b=owner)
        elif kind == 2 and amount:
            parts = w.counted(amount, noun)
            if noun in lexicon.FOODS:
                w.add("eat", a=owner, f=parts["o"], **parts)
            else:
                w.add("lose", a=owner, **parts)
        elif 0 < number <= MAX_COUNT - MAX_CHANGE:
            parts = w.counted(draw.between(1, MAX_CHANGE), noun)
            w.add(draw.pick(("buy", "find")), a=owner, **parts)
        fact = ("count", owner, noun)
        if draw.chance(0.4) and _changed_once(w.facts.history.get(fact, [])):
            w.add("has", a=owner, **w.counted(int(values[fact]), noun))
    elif kind < 7:
        here = values.get(("at", person))
        spot = draw.pick([s for s in lexicon.SPOTS if s != here])
        w.add("go", a=person, s=spot)
        if draw.chance(0.25) and values.get(("at", person)) == spot:
            w.add("at", a=person, s=spot)
    elif kind == 7:
        thing = draw.pick(lexicon.THINGS)
        where = values.get(("in", thing))
        if where is None or where == world.HANDS:
            w.add("put", a=person, t=thing, c=draw.pick(lexicon.CONTAINERS))
        elif draw.chance(0.5):
            w.add("in", t=thing, c=str(where))
        else:
            w.add("take", a=person, t=thing, c=str(where))
    elif kind == 8:
        w.add("meet", a=person, b=other)
    else:
        w.add("mood", a=person, e=draw.pick(lexicon.MOODS))


def write_story(draw: Draw, split: str, events: int) -> Story:
    """Returns a story of about `events` events, with entities of the split."""
    w = _Writer(draw)
    size = draw.between(2, 3)
    chosen = draw.sample(lexicon.names(split), 2 * size)
    people, pets = chosen[:size], chosen[size:]
    towns = draw.sample(lexicon.places(split), size)
    _introduce(w, people, pets, towns)
    for _ in range(events):
        _event(w, people)
    if draw.chance(0.5):
        person = draw.pick(people)
        if w.facts.values.get(("at", person)) != "home":
            w.add("go_home", a=person)
        w.add("end", a=person)
    text = " ".join(w.sentences)
    entities = tuple(entity for entity in (*chosen, *towns) if entity in text)
    return Story(tuple(w.sentences), tuple(people), entities, w.facts)


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns a raw story; the prompt is its opening, the answer the rest."""
    events = draw.between(4, 10) if draw.chance(0.75) else draw.between(10, 26)
    story = write_story(draw, split, events)
    opening = draw.between(2, min(5, len(story.sentences) - 2))
    head = " ".join(story.sentences[:opening])
    return Item(
        task="story",
        key=key,
        prompt=head,
        answer=" " + " ".join(story.sentences[opening:]),
        entities=story.entities,
    )
