"""Facts of a story, and the sentences that state or change them.

Every sentence form is one template with one effect. The generator fills templates and the checker
matches them, so both follow the same rules.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from deepinfer_jax.training.corpus.lexicon import (
    ANIMALS,
    COLORS,
    CONTAINERS,
    FOODS,
    JOBS,
    MOODS,
    NOUNS,
    SPOTS,
    THINGS,
    WEATHER,
)

HANDS = "hands"
Fact = tuple[str, ...]


@dataclass(slots=True)
class World:
    """What is known: a value for each fact, and the history of every fact.

    Facts: ("home", name), ("at", name), ("job", name), ("friend", name), ("pet", name),
    ("count", name, noun), ("in", thing), ("weather",).
    """

    values: dict[Fact, str | int] = field(default_factory=dict)
    # Sentences that stated or changed a fact; for counts, also the change (None: a statement).
    history: dict[Fact, list[tuple[str, int | None]]] = field(default_factory=dict)
    sentence: str = ""

    def state(self, fact: Fact, value: str | int) -> str:
        """Records a value; returns what is wrong, or nothing."""
        known = self.values.setdefault(fact, value)
        self.history.setdefault(fact, []).append((self.sentence, None))
        return "" if known == value else f"{' '.join(fact)} is {known}, not {value}"

    def change(self, fact: Fact, value: str | int) -> str:
        """Replaces a value; a change to the value that holds is wrong."""
        if self.values.get(fact) == value:
            return f"{' '.join(fact)} is {value} already"
        self.values[fact] = value
        self.history.setdefault(fact, []).append((self.sentence, None))
        return ""

    def add(self, name: str, noun: str, amount: int) -> str:
        """Adds to a count; taking more than there is is wrong. An unknown count stays unknown."""
        fact = ("count", name, noun)
        self.history.setdefault(fact, []).append((self.sentence, amount))
        known = self.values.get(fact)
        if known is None:
            return ""
        left = int(known) + amount
        self.values[fact] = left
        return "" if left >= 0 else f"{name} has {known} {noun}, cannot lose {-amount}"


Slots = dict[str, str]
Effect = Callable[[World, Slots], str]


def _number(s: Slots) -> int:
    return int(s["n"])


def _noun(s: Slots) -> str:
    return SINGULAR[s["o"]]


def _lose(w: World, s: Slots) -> str:
    return w.add(s["a"], _noun(s), -_number(s))


def _gain(w: World, s: Slots) -> str:
    return w.add(s["a"], _noun(s), _number(s))


def _give(w: World, s: Slots) -> str:
    if s["a"] == s["b"]:
        return f"{s['a']} cannot give to {s['a']}"
    return _lose(w, s) or w.add(s["b"], _noun(s), _number(s))


def _go_home(w: World, s: Slots) -> str:
    return w.change(("at", s["a"]), "home")


def _take(w: World, s: Slots) -> str:
    return w.state(("in", s["t"]), s["c"]) or w.change(("in", s["t"]), HANDS)


def _friend(w: World, s: Slots) -> str:
    if s["a"] == s["b"]:
        return f"{s['a']} cannot be a friend of {s['a']}"
    return w.state(("friend", s["a"]), s["b"])


def _other(w: World, s: Slots) -> str:
    return "" if s["a"] != s["b"] else f"{s['a']} needs somebody else"


def _nothing(w: World, s: Slots) -> str:
    return ""


FORMS: dict[str, tuple[tuple[str, ...], Effect]] = {
    "home": (("{a} lives in {p}.",), lambda w, s: w.state(("home", s["a"]), s["p"])),
    "friend": (("{b} is a friend of {a}.",), _friend),
    "job": (("{a} is a {j}.",), lambda w, s: w.state(("job", s["a"]), s["j"])),
    "pet": (
        ("{a} has a {k} {m} named {q}.",),
        lambda w, s: w.state(("pet", s["a"]), f"{s['k']} {s['m']} {s['q']}"),
    ),
    "has": (
        ("{a} has {n} {o}.", "Now {a} has {n} {o}."),
        lambda w, s: w.state(("count", s["a"], _noun(s)), _number(s)),
    ),
    "go": (
        ("{a} goes to the {s}.", "{a} walks to the {s}.", "Then {a} goes to the {s}."),
        lambda w, s: w.change(("at", s["a"]), s["s"]),
    ),
    "at": (("{a} is at the {s}.",), lambda w, s: w.state(("at", s["a"]), s["s"])),
    "go_home": (("{a} goes home.", "In the evening {a} goes home."), _go_home),
    "buy": (("{a} buys {n} {o}.", "Then {a} buys {n} {o}."), _gain),
    "find": (("{a} finds {n} {o}.", "After that {a} finds {n} {o}."), _gain),
    "lose": (("{a} loses {n} {o}.", "Then {a} loses {n} {o}."), _lose),
    "eat": (("{a} eats {n} {f}.",), lambda w, s: _lose(w, s | {"o": s["f"]})),
    "give": (("{a} gives {n} {o} to {b}.", "Then {a} gives {n} {o} to {b}."), _give),
    "thank": (("{a} thanks {b}.", '{a} says "Thank you!" to {b}.'), _other),
    "meet": (("{a} meets {b}.", "{a} talks to {b}."), _other),
    "put": (("{a} puts the {t} in the {c}.",), lambda w, s: w.change(("in", s["t"]), s["c"])),
    "take": (("{a} takes the {t} from the {c}.",), _take),
    "in": (("The {t} is in the {c}.",), lambda w, s: w.state(("in", s["t"]), s["c"])),
    "weather": (("It is a {w} day.",), lambda w, s: w.state(("weather",), s["w"])),
    "mood": (("{a} is {e}.", "{a} feels {e}."), _nothing),
    "end": (("{a} sleeps well.", "It was a good day for {a}."), _nothing),
}

SINGULAR = {plural: noun for noun, plural in NOUNS.items()} | {noun: noun for noun in NOUNS}
_NAME = r"[A-Z][a-z]+"
_FOOD_WORDS = [word for noun in FOODS for word in (noun, NOUNS[noun])]
_SLOT_PATTERNS = {
    "a": _NAME,
    "b": _NAME,
    "q": _NAME,
    "p": _NAME,
    "n": r"\d+",
    "o": "|".join(SINGULAR),
    "f": "|".join(_FOOD_WORDS),
    "j": "|".join(JOBS),
    "k": "|".join(COLORS),
    "m": "|".join(ANIMALS),
    "s": "|".join(SPOTS),
    "t": "|".join(THINGS),
    "c": "|".join(CONTAINERS),
    "w": "|".join(WEATHER),
    "e": "|".join(MOODS),
}


@cache
def _matchers() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Returns the pattern of every template. Those that start with a word come first."""
    found = []
    for form, (templates, _) in FORMS.items():
        for template in templates:
            pattern = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
            slots = {k: f"(?P<{k}>{v})" for k, v in _SLOT_PATTERNS.items()}
            found.append((template.startswith("{"), re.compile(pattern.format_map(slots)), form))
    return tuple((pattern, form) for _, pattern, form in sorted(found, key=lambda row: row[0]))


def apply(world: World, form: str, sentence: str, slots: Slots) -> str:
    """Applies a sentence to the world; returns what contradicts it, or nothing."""
    world.sentence = sentence
    return FORMS[form][1](world, slots)


def match(sentence: str) -> tuple[str, Slots] | None:
    """Returns the form and the slots of a sentence, or None if no template gives it."""
    for pattern, form in _matchers():
        if found := pattern.fullmatch(sentence):
            return form, found.groupdict()
    return None
