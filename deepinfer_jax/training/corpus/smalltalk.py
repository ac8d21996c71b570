"""Greetings and questions about the model itself, with more than one turn now and then."""

from deepinfer_jax.training.corpus import lexicon
from deepinfer_jax.training.corpus.draw import Draw
from deepinfer_jax.training.corpus.records import Item, Message

_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "How are you?": "I am fine, thank you.",
    "Who are you?": "I am nano, a very small language model.",
    "What is your name?": "My name is nano.",
    "What can you do?": "I can tell stories, answer questions, add numbers and call tools.",
    "Are you human?": "No, I am a very small language model.",
    "Thank you!": "You are welcome.",
    "Thanks": "You are welcome.",
    "Goodbye!": "Goodbye! Have a good day.",
    "Bye": "Goodbye! Have a good day.",
}


def exchange(draw: Draw) -> tuple[str, str]:
    """Returns one question and its answer."""
    question = draw.pick(tuple(_TALK))
    return question, _TALK[question]


def make(draw: Draw, split: str, key: str, thinking: bool, tokens: int | None) -> Item:
    """Returns a short talk; half of the talks without thinking remember the user's name."""
    messages: list[Message] = []
    entities: tuple[str, ...] = ()
    if not thinking and draw.chance(0.5):
        name, town = draw.pick(lexicon.names(split)), draw.pick(lexicon.places(split))
        entities = (name, town)
        messages += [
            Message(role="user", content=f"Hello, I am {name} from {town}."),
            Message(role="assistant", content=f"Hello {name}! How can I help you?"),
        ]
        if draw.chance(0.5):
            question, answer = exchange(draw)
            messages += [
                Message(role="user", content=question),
                Message(role="assistant", content=answer),
            ]
        question, answer = draw.pick(
            (
                ("What is my name?", f"Your name is {name}."),
                ("Where do I live?", f"You live in {town}."),
            )
        )
    else:
        question, answer = exchange(draw)
    reasoning = "This is small talk." if thinking else ""
    messages += [
        Message(role="user", content=question),
        Message(role="assistant", content=answer, reasoning=reasoning),
    ]
    return Item(
        task="talk",
        key=key,
        answer=answer,
        messages=tuple(messages),
        thinking=thinking,
        entities=entities,
    )
