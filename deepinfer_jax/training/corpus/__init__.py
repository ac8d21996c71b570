"""Checkable training text by seed: items, their V4.1 text and ids, packing and scorers."""

from deepinfer_jax.training.corpus.encode import Rendered, render, render_batch
from deepinfer_jax.training.corpus.mixture import (
    COPY_WEIGHT,
    MIXTURE,
    TASKS,
    THINKING_TASKS,
    TOKEN_WEIGHTS,
    items,
    make_item,
)
from deepinfer_jax.training.corpus.packing import Packed, pack
from deepinfer_jax.training.corpus.records import Call, Item, Message, Tool
from deepinfer_jax.training.corpus.scoring import calls_are_valid, check
from deepinfer_jax.training.corpus.story import StoryReport, check_story
from deepinfer_jax.training.corpus.template import expected_text, full_text, prompt_text

__all__ = [
    "COPY_WEIGHT",
    "MIXTURE",
    "TASKS",
    "THINKING_TASKS",
    "TOKEN_WEIGHTS",
    "Call",
    "Item",
    "Message",
    "Packed",
    "Rendered",
    "StoryReport",
    "Tool",
    "calls_are_valid",
    "check",
    "check_story",
    "expected_text",
    "full_text",
    "items",
    "make_item",
    "pack",
    "prompt_text",
    "render",
    "render_batch",
]
