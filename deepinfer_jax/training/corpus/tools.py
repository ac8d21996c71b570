"""Tool calls: declared tools, a request, the DSML call, its result, the answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.training.corpus import arithmetic, lexicon, smalltalk
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.records import Call, Item, Message, Tool


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of a tool: what is asked, the arguments, the result and the answer."""

    ask: str
    arguments: dict[str, Any]
    result: str
    answer: str
    entities: tuple[str, ...]


def _tool(name: str, description: str, /, **properties: str) -> Tool:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return Tool(name=name, description=description, parameters=json.dumps(schema))


def _weather(draw: Draw, split: str) -> _Use:
    city = draw.pick(lexicon.places(split))
    weather, degrees = draw.pick(lexicon.WEATHER), draw.between(1, 35)
    return _Use(
        draw.pick((f"What is the weather in {city}?", f"How is the weather in {city}?")),
        {"city": city},
        json.dumps({"weather": weather, "degrees": degrees}),
        f"It is {weather} in {city}, {degrees} degrees.",
        (city,),
    )


def _time(draw: Draw, split: str) -> _Use:
    city, hour = draw.pick(lexicon.places(split)), draw.between(1, 12)
    return _Use(
        draw.pick((f"What time is it in {city}?", f"Tell me the time in {city}.")),
        {"city": city},
        json.dumps({"hour": hour}),
        f"It is {hour} o'clock in {city}.",
        (city,),
    )


def _price(draw: Draw, split: str) -> _Use:
    item, price = draw.pick(tuple(lexicon.NOUNS)), draw.between(1, 90)
    return _Use(
        draw.pick((f"How much is one {item}?", f"What is the price of one {item}?")),
        {"item": item},
        json.dumps({"price": price}),
        f"One {item} costs {price} dollars.",
        (),
    )


def _phone(draw: Draw, split: str) -> _Use:
    name, code = draw.pick(lexicon.names(split)), lexicon.draw_code(draw, split)
    return _Use(
        draw.pick((f"What is the phone number of {name}?", f"Find the phone number of {name}.")),
        {"name": name},
        json.dumps({"phone": code}),
        f"The phone number of {name} is {code}.",
        (name, code),
    )


def _timer(draw: Draw, split: str) -> _Use:
    minutes = draw.between(2, 90)
    return _Use(
        draw.pick((f"Set a timer to {minutes} minutes.", f"Wake me in {minutes} minutes.")),
        {"minutes": minutes},
        "done",
        f"The timer is set to {minutes} minutes.",
        (),
    )


def _message(draw: Draw, split: str) -> _Use:
    name = draw.pick(lexicon.names(split))
    text = draw.pick(
        (
            "I am late",
            "I am at the " + draw.pick(lexicon.SPOTS),
            "The " + draw.pick(lexicon.THINGS) + " is in the " + draw.pick(lexicon.CONTAINERS),
            "Thank you",
        )
    )
    return _Use(
        draw.pick((f'Send "{text}" to {name}.', f'Write to {name}: "{text}".')),
        {"to": name, "text": text},
        "sent",
        f"The message is sent to {name}.",
        (name,),
    )


def _calculate(draw: Draw, split: str) -> _Use:
    sign = draw.pick("+-")
    a, b = arithmetic.draw_pair(draw, split, sign)
    result = arithmetic.result_of(a, b, sign)
    pair = arithmetic.pair_key(a, b, sign)
    return _Use(
        draw.pick((f"What is {pair}?", f"Compute {pair}.")),
        {"a": a, "sign": sign, "b": b},
        str(result),
        f"{pair} = {result}",
        arithmetic.pair_entities(a, b, sign),
    )


def _table(draw: Draw, split: str) -> _Use:
    day, people = draw.pick(lexicon.DAYS), draw.between(2, 9)
    town = draw.pick(lexicon.places(split))
    return _Use(
        f"Book a table in {town} for {people} people on {day}.",
        {"city": town, "people": people, "day": day},
        "booked",
        f"A table in {town} for {people} people on {day} is booked.",
        (town,),
    )


_TOOLS: dict[str, tuple[Tool, Callable[[Draw, str], _Use]]] = {
    tool.name: (tool, use)
    for tool, use in (
        (_tool("get_weather", "Weather of a city.", city="string"), _weather),
        (_tool("get_time", "Time of a city.", city="string"), _time),
        (_tool("get_price", "Price of an item.", item="string"), _price),
        (_tool("find_phone", "Phone number of a person.", name="string"), _phone),
        (_tool("set_timer", "Set a timer.", minutes="integer"), _timer),
        (_tool("send_message", "Send a message.", to="string", text="string"), _message),
        (
            _tool("calculate", "Add or subtract.", a="integer", sign="string", b="integer"),
            _calculate,
        ),
        (
            _tool("book_table", "Book a table.", city="string", people="integer", day="string"),
            _table,
        ),
    )
}
_SYSTEM = ("", "", "Use tools.", "You are nano.")


def _conversation(
    draw: Draw, split: str, thinking: bool
) -> tuple[list[Message], list[Message], tuple[Tool, ...], tuple[str, ...]]:
    """Returns the turns up to the call, the turns after it, the tools and the entities."""
    name = draw.pick(tuple(_TOOLS))
    tool, use = _TOOLS[name]
    uses = [use(draw, split)]
    if name in ("get_weather", "get_time", "get_price", "find_phone") and draw.chance(0.15):
        second = use(draw, split)
        if second.arguments != uses[0].arguments:
            uses.append(second)
    others = [t for t, _ in _TOOLS.values() if t is not tool]
    declared = draw.shuffled([tool, *draw.sample(others, draw.between(0, 2))])
    calls = tuple(Call(name=name, arguments=json.dumps(u.arguments)) for u in uses)
    head: list[Message] = []
    if system := draw.pick(_SYSTEM):
        head.append(Message(role="system", content=system))
    head.append(Message(role="user", content=" ".join(u.ask for u in uses)))
    times = "once" if len(uses) == 1 else "twice"
    why = f"I call {name} {times}." if thinking else ""
    head.append(Message(role="assistant", content="", reasoning=why, calls=calls))
    tail = [Message(role="tool", content=u.result) for u in uses]
    answer = " ".join(u.answer for u in uses)
    why = "I have the result." if thinking else ""
    tail.append(Message(role="assistant", content=answer, reasoning=why))
    return head, tail, tuple(declared), tuple(e for u in uses for e in u.entities)


def make_call(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns a conversation that ends with the tool call; now and then no call is needed."""
    if draw.chance(0.08):
        question, answer = smalltalk.exchange(draw)
        declared = draw.sample([tool for tool, _ in _TOOLS.values()], draw.between(1, 3))
        reasoning = "This is small talk." if thinking else ""
        return Item(
            task="tool_call",
            key=key,
            answer=answer,
            messages=(
                Message(role="user", content=question),
                Message(role="assistant", content=answer, reasoning=reasoning),
            ),
            thinking=thinking,
            tools=tuple(declared),
        )
    head, _, declared, entities = _conversation(draw, split, thinking)
    shown = tuple(entity for entity in entities if entity in head[-2].content)
    return Item(
        task="tool_call",
        key=key,
        answer="",
        messages=tuple(head),
        thinking=thinking,
        tools=declared,
        entities=shown,
    )


def make_answer(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns a whole round trip; the expected answer is the last turn."""
    head, tail, declared, entities = _conversation(draw, split, thinking)
    return Item(
        task="tool_answer",
        key=key,
        answer=tail[-1].content,
        messages=(*head, *tail),
        thinking=thinking,
        tools=declared,
        entities=entities,
    )
