"""Field extraction: a short record text to JSON with the asked keys in the asked order."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from deepinfer_jax.training.corpus import lexicon
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.records import Item, Message

Record = dict[str, str | int]

# Texts of a record: free sentences, one sentence, or lines.
_TEXTS: dict[str, tuple[str, ...]] = {
    "person": (
        "{name} is {age} years old. {name} lives in {city}. {name} is a {job}.",
        "{name} lives in {city} and works as a {job}. {name} is {age} years old.",
        "The {job} {name} from {city} is {age} years old.",
        "Name: {name}\nAge: {age}\nCity: {city}\nJob: {job}",
    ),
    "order": (
        "{customer} orders {quantity} {items} for {price} dollars in {city}.",
        "In {city}, {customer} buys {quantity} {items}. The price is {price} dollars.",
        "An order of {customer}: {quantity} {items}, {price} dollars, {city}.",
        "Customer: {customer}\nItem: {item}\nQuantity: {quantity}\nPrice: {price}\nCity: {city}",
    ),
    "visit": (
        "{guest} visits {city} on {day} at {hour} o'clock.",
        "On {day}, {guest} comes to {city}. The visit starts at {hour} o'clock.",
        "The visit of {guest} in {city} is on {day} at {hour} o'clock.",
        "Guest: {guest}\nCity: {city}\nDay: {day}\nHour: {hour}",
    ),
    "pet": (
        "{owner} has a {color} {animal} named {pet}. {pet} is {age} years old.",
        "{pet} is the {color} {animal} of {owner}. It is {age} years old.",
        "The {animal} {pet} of {owner} is {color} and {age} years old.",
        "Owner: {owner}\nAnimal: {animal}\nPet: {pet}\nColor: {color}\nAge: {age}",
    ),
}
_ASKS = (
    "Extract {fields} as JSON.\n\n{text}",
    "{text}\n\nExtract {fields} as JSON.",
    "Write {fields} of this text as JSON.\n\n{text}",
)
_INTEGERS = frozenset(("age", "quantity", "price", "hour"))


def _person(draw: Draw, name: str, other: str, city: str) -> Record:
    return {
        "name": name,
        "age": draw.between(5, 90),
        "city": city,
        "job": draw.pick(lexicon.JOBS),
    }


def _order(draw: Draw, name: str, other: str, city: str) -> Record:
    return {
        "customer": name,
        "item": draw.pick(tuple(lexicon.NOUNS)),
        "quantity": draw.between(2, 40),
        "price": draw.between(3, 300),
        "city": city,
    }


def _visit(draw: Draw, name: str, other: str, city: str) -> Record:
    return {
        "guest": name,
        "city": city,
        "day": draw.pick(lexicon.DAYS),
        "hour": draw.between(1, 12),
    }


def _pet(draw: Draw, name: str, other: str, city: str) -> Record:
    return {
        "owner": name,
        "animal": draw.pick(lexicon.ANIMALS),
        "pet": other,
        "color": draw.pick(lexicon.COLORS),
        "age": draw.between(2, 20),
    }


_KINDS: dict[str, Callable[[Draw, str, str, str], Record]] = {
    "person": _person,
    "order": _order,
    "visit": _visit,
    "pet": _pet,
}


def schema_of(fields: list[str]) -> dict[str, Any]:
    """Returns the JSON schema of an object with these keys, all required."""
    kinds = {f: {"type": "integer" if f in _INTEGERS else "string"} for f in fields}
    return {"type": "object", "properties": kinds, "required": list(fields)}


def _reasoning(values: Record) -> str:
    return " ".join(f"{key.capitalize()}: {value}." for key, value in values.items())


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns an extraction item: by instruction, by response schema, or as raw text."""
    kind = draw.pick(tuple(_KINDS))
    name, other = draw.sample(lexicon.names(split), 2)
    city = draw.pick(lexicon.places(split))
    record = _KINDS[kind](draw, name, other, city)
    words = record | {"items": lexicon.NOUNS.get(str(record.get("item")), "")}
    text = draw.pick(_TEXTS[kind]).format_map(words)
    fields = list(record)
    if draw.chance(0.5):
        fields = draw.sample(fields, draw.between(2, len(fields)))
    values = {field: record[field] for field in fields}
    answer = json.dumps(values)
    entities = tuple(e for e in (name, other, city) if e in text)
    item = partial(Item, task="extraction", key=key, entities=entities, meta={"value": answer})
    form = draw.below(10)
    if form == 0 and not thinking:
        return item(prompt=f"Text: {text}\nFields: {', '.join(fields)}\nJSON:", answer=f" {answer}")
    schema = ""
    named = lexicon.listed([f"the {fields[0]}", *fields[1:]])
    ask = draw.pick(_ASKS).format(fields=named, text=text)
    if form < 4:
        schema = json.dumps(schema_of(fields))
        ask = draw.pick((text, f"Extract the data.\n\n{text}", ask))
    reasoning = _reasoning(values) if thinking else ""
    return item(
        answer=answer,
        messages=(
            Message(role="user", content=ask),
            Message(role="assistant", content=answer, reasoning=reasoning),
        ),
        thinking=thinking,
        schema=schema,
    )
