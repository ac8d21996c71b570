"""The vocabulary of tiny_v41 as grammars see it."""

import pytest

from deepinfer_jax.grammar.vocabulary import Vocabulary, grammar_vocabulary
from tests.e2e.lab import model


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of tiny_v41: 512 ids."""
    return model().tokenizer


@pytest.fixture(scope="session")
def vocabulary(tokenizer) -> Vocabulary:
    """What grammars see of it."""
    return grammar_vocabulary(tokenizer, model().config)
