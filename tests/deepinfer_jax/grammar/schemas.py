"""Random JSON schemas of the kinds that people write, from a seed; every text of them is finite."""

import random
from typing import Any

Schema = dict[str, Any]
_NAMES = ("name", "age", "city", "tags", "price", "is_new", "items", "notes", "kind", "id", "größe")
_WORDS = ("red", "green", "blue", "small", "large", "é", 'a "b"', "new\nline")


def random_schema(seed: int) -> Schema:
    """Returns an object schema, two levels deep at most below the root."""
    return _object(random.Random(seed), depth=2)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    properties = {name: _value(rng, depth - 1) for name in names}
    required = names if rng.random() < 0.6 else rng.sample(names, rng.randint(1, len(names)))
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        items = [_value(rng, depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    least = rng.randint(0, 2)
    items = _value(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _string(rng: random.Random) -> Schema:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 8},
            {"type": "string", "pattern": r"^[A-Z][a-z]{1,6}(-\d{2})?$"},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])},
            {"enum": rng.sample(_WORDS, 3)},
            {"const": rng.choice(_WORDS)},
        ]
    )


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9},
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
            {"enum": [1, 2.5, -3]},
        ]
    )


def _value(rng: random.Random, depth: int) -> Schema:
    kinds = [_string, _string, _number, lambda _: {"type": "boolean"}, lambda _: {"type": "null"}]
    deep = [lambda rng: _object(rng, depth), lambda rng: _array(rng, depth)]
    if depth > 0:
        kinds += [*deep, lambda rng: {"anyOf": [_value(rng, depth - 1), _number(rng)]}]
    return rng.choice(kinds)(rng)
