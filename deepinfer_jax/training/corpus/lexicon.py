"""Word lists, and the entities of each split.

Names and places are two parts put together ("Ma" + "ra", "Oak" + "ford"); a hash decides to which
split each combination belongs. Evaluation names are thus new words of known parts.
"""

from functools import cache

from deepinfer_jax.training.corpus.draw import Draw, in_split


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAME_STARTS = _words(
    "Ma Mi Mo Lu Lo La Ka Ki Ko Ta To Ti Be Bo Ba Sa So Si Ni No Na Ro Ra Ri Da Do De Pe Pa Po "
    "Fe Fa Fi Ja Jo Ju Ve Va Vi El Al An Em Or Il Ar En Is"
)
NAME_ENDS = _words(
    "ra na la lo lin mi ma ro sa vi da ka to ta ri ni len ron dan mon bel nor vin ras lan ter ley "
    "den sel mar rin nal tas lor bin rek dor vel nik gan"
)
PLACE_STARTS = _words(
    "Oak Mill North South East West River Stone Hill Green Red White Black Lake Sun Moon Star Wood "
    "Ash Elm Fox Wolf Deer Bear Swan Crow Rose Clay Sand Salt Iron Gold"
)
PLACE_ENDS = _words("ford ton ham field wick bury port dale mouth well gate haven")
# Combinations that are ordinary words or differ from one only by the capital.
_NOT_NAMES = frozenset(
    _words(
        "Mama Lala Tata Nana Dada Papa Data Solo Also Into Onto Final Label Minor Manor Enron Nasa"
    )
)

NOUNS = {
    "apple": "apples",
    "pear": "pears",
    "plum": "plums",
    "egg": "eggs",
    "cake": "cakes",
    "nut": "nuts",
    "book": "books",
    "ball": "balls",
    "coin": "coins",
    "stone": "stones",
    "shell": "shells",
    "pen": "pens",
    "cup": "cups",
    "hat": "hats",
    "stamp": "stamps",
    "card": "cards",
}
FOODS = ("apple", "pear", "plum", "egg", "cake", "nut")
THINGS = ("key", "map", "letter", "ring", "lamp", "rope", "flute", "knife", "clock", "coat")
CONTAINERS = ("box", "bag", "drawer", "basket", "chest", "cupboard", "bucket", "jar")
SPOTS = (
    "market",
    "park",
    "school",
    "river",
    "garden",
    "library",
    "station",
    "bakery",
    "museum",
    "harbor",
    "farm",
    "bridge",
)
COLORS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink")
ANIMALS = ("dog", "cat", "horse", "bird", "rabbit", "goat")
JOBS = ("baker", "teacher", "doctor", "farmer", "painter", "pilot", "singer", "cook", "sailor")
WEATHER = ("sunny", "rainy", "windy", "cloudy", "snowy", "foggy")
MOODS = ("happy", "tired", "calm", "hungry", "proud", "sleepy", "cheerful")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@cache
def names(split: str) -> tuple[str, ...]:
    """Returns every person and pet name of a split."""
    joined = dict.fromkeys(a + b for a in NAME_STARTS for b in NAME_ENDS if a.lower() != b)
    return tuple(n for n in joined if n not in _NOT_NAMES and in_split(split, "name", n))


@cache
def places(split: str) -> tuple[str, ...]:
    """Returns every town of a split."""
    return tuple(a + b for a in PLACE_STARTS for b in PLACE_ENDS if in_split(split, "place", a + b))


def draw_code(draw: Draw, split: str) -> str:
    """Returns a code of four digits, 2000 or more, of a split."""
    while True:
        code = str(draw.between(2000, 9999))
        if in_split(split, "code", code):
            return code


def article(word: str) -> str:
    """Returns the word after a or an."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun: 1 apple, 2 apples."""
    return f"{number} {noun if number == 1 else NOUNS[noun]}"


def listed(parts: list[str]) -> str:
    """Returns a list in words: a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


@cache
def name_parts() -> dict[str, tuple[str, str]]:
    """Returns the two parts of every possible name and town."""
    pairs = [(a, b) for a in NAME_STARTS for b in NAME_ENDS]
    pairs += [(a, b) for a in PLACE_STARTS for b in PLACE_ENDS]
    return {a + b: (a, b) for a, b in pairs}
