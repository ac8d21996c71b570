"""The tokenizer of nano: byte-level BPE of 2,048 ids, trained on the corpus of the train split.

`python -m deepinfer_jax.training.tokenizer FOLDER` writes tokenizer.json and
tokenizer_config.json.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax.training.corpus import TASKS, THINKING_TASKS, full_text, make_item
from deepinfer_jax.training.corpus.lexicon import (
    NAME_ENDS,
    NAME_STARTS,
    name_parts,
)
from deepinfer_jax.training.corpus.template import BAR, BOS, DSML, EOS, PAD, THINK, THINK_END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The corpus has pairs for about 1,650 ids; the rest are placeholders.
VOCAB_SIZE = 2048
FIRST_TOKENS = (BOS, EOS, PAD)
# Everything recipe's V4.1 encoding can spell, at the end of the vocabulary.
_BARRED = (
    *("System", "User", "Assistant", "latest_reminder"),
    *("image", "ref", "/ref", "box", "/box", "point", "/point", "polygon", "/polygon"),
)
LAST_TOKENS = (THINK, THINK_END, DSML, *(f"<{BAR}{name}{BAR}>" for name in _BARRED))
# Text of a reply: hiding special tokens must not hide these, as in the published tokenizer.
_VISIBLE = frozenset((THINK, THINK_END, DSML))

# Repetitions of each part of names per training index.
_START_BOOST, _END_BOOST = 80, 4

_PATTERN = r" ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPECIAL = re.compile("|".join(map(re.escape, (*FIRST_TOKENS, *LAST_TOKENS))))
_CAPITALISED = re.compile(r"[A-Z][a-z]+")


def _pre_tokenizer() -> dict[str, Any]:
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {
        "type": "Sequence",
        "pretokenizers": [
            isolated | {"pattern": {"Regex": r"\p{N}"}},
            isolated | {"pattern": {"Regex": _PATTERN}},
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": False,
                "use_regex": False,
            },
        ],
    }


def _decoder() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }


def _skeleton(vocab: dict[str, int], merges: list[list[str]], added: list[dict]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(),
        "post_processor": None,
        "decoder": _decoder(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def training_texts(count: int, seed: int) -> Iterator[str]:
    """Yields `count` texts of every task without special tokens, names cut into their parts.

    No name becomes a token of its own, so that names of all splits have the same kind of ids.
    """
    parts = name_parts()

    def cut(found: re.Match[str]) -> str:
        return "\n".join(parts.get(found[0], (found[0],)))

    for index in range(count):
        for task in TASKS:
            thinking = task in THINKING_TASKS and index % 2 == 1
            tokens = 400 if task == "needle" else None
            item = make_item(
                task, split="train", seed=seed, index=index, thinking=thinking, tokens=tokens
            )
            for text in _SPECIAL.split(full_text(item)):
                yield _CAPITALISED.sub(cut, text)
    # First parts occur more often than any pair of letters, so that they are merged before pairs
    # that would cross into the second part.
    for start in NAME_STARTS:
        yield f" {start}\n{start}\n" * (_START_BOOST * count)
    for end in NAME_ENDS:
        yield f"{end}\n" * (_END_BOOST * count)


def train(*, count: int = 500, seed: int = 4) -> dict[str, Any]:
    """Returns the content of tokenizer.json.

    Ids: bos, eos, pad; bytes and merges in the order in which they were learned; placeholders
    where the corpus has no more pairs to merge; the control tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bare = Tokenizer.from_str(json.dumps(_skeleton({}, [], [])))
    room = VOCAB_SIZE - len(FIRST_TOKENS) - len(LAST_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    assert isinstance(bare.model, models.BPE)
    bare.train_from_iterator(training_texts(count, seed), trainer=trainer)
    learned = json.loads(bare.to_str())["model"]
    spelled = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    spare = room - len(spelled)
    holders = [f"<{BAR}place▁holder▁no▁{i}{BAR}>" for i in range(spare)]
    order = [*FIRST_TOKENS, *spelled, *holders, *LAST_TOKENS]
    vocab = {text: number for number, text in enumerate(order)}
    control = {*FIRST_TOKENS, *holders, *LAST_TOKENS}
    numbered = [(number, text) for text, number in vocab.items() if text in control]
    added = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text not in _VISIBLE,
        }
        for number, text in numbered
    ]
    return _skeleton(vocab, learned["merges"], added)


def tokenizer_config(max_len: int = 8192) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "model_max_length": max_len,
    }


def write(folder: Path) -> None:
    """Trains the tokenizer and writes its two files."""
    for name, content in (
        ("tokenizer.json", train()),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        text = json.dumps(content, ensure_ascii=False)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def load(folder: Path | None = None) -> "Tokenizer":
    """Returns the tokenizer of a folder, by default the one in the package."""
    from tokenizers import Tokenizer

    folder = folder or Path(__file__).parent.parent / "data" / "nano"
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
