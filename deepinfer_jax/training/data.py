"""Packed training data: drawn from the corpus by all CPUs, stored, and read as batches."""

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from deepinfer_jax.errors import InputError, TokenizerError
from deepinfer_jax.loading import read_tokenizer
from deepinfer_jax.model.engram.vocabulary import TokenMap, build_token_map, reduction_key
from deepinfer_jax.training import corpus
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.corpus.template import BOS, EOS, PAD
from deepinfer_jax.training.state import Batch

BatchAt = Callable[[int], Batch]
# Items are drawn and packed in groups, each a function of its own first place.
_GROUP = 20_000


@dataclass(frozen=True)
class Packed:
    """Token sequences of equal length, with what a model needs to know of their tokenizer."""

    ids: np.ndarray  # uint16 or int32 [n, length]
    weights: np.ndarray  # [n, length], any dtype that holds them
    token_map: np.ndarray  # int32 [vocab]: compressed ids of the Engram
    special: dict[str, int]  # bos_token_id, eos_token_id, pad_token_id, ..

    @property
    def compressed_vocab_size(self) -> int:
        """Distinct ids of the token reduction."""
        return int(self.token_map.max()) + 1


def save_packed(path: Path, packed: Packed) -> None:
    """Writes sequences as a compressed .npz: uint16 ids; whole weights below 256 as bytes."""
    ids, weights = np.asarray(packed.ids), np.asarray(packed.weights)
    if ids.max(initial=0) < 2**16:
        ids = ids.astype(np.uint16)
    exact = np.asarray(weights, np.uint8)
    weights = exact if (exact == weights).all() else np.asarray(weights, np.float32)
    special = json.dumps(packed.special)
    np.savez_compressed(
        path, ids=ids, weights=weights, token_map=packed.token_map, special=np.asarray(special)
    )


def load_packed(path: Path) -> Packed:
    """Returns the sequences of a file that `save_packed` wrote.

    Raises:
        InputError: The file is absent, no such archive, or its arrays do not belong together.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("ids", "weights", "token_map", "special")}
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"training data is an .npz with ids, weights, token_map and special: {error}, at "
            f"{path}. Write it with `training.data.save_packed`."
        ) from error
    ids, weights = arrays["ids"], arrays["weights"]
    if ids.ndim != 2 or ids.shape != weights.shape or not len(ids):
        raise InputError(
            f"ids and weights must have one shape [n, length], got {ids.shape} and {weights.shape}"
            f", in {path}. Pack the data again."
        )
    return Packed(ids, weights, arrays["token_map"], json.loads(str(arrays["special"])))


def pack_corpus(tokenizer_folder: Path, *, items: int, length: int, seed: int) -> Packed:
    """Returns `items` items of the corpus's training split, packed to rows of `length` tokens.

    Raises:
        TokenizerError: The folder has no tokenizer with the control tokens of V4.1.
    """
    tokenizer = read_tokenizer(tokenizer_folder)
    spelled = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    special: dict[str, int] = {}
    for name, text in spelled.items():
        number = None if tokenizer is None else tokenizer.token_to_id(text)
        if number is not None:
            special[name] = number
    if tokenizer is None or len(special) < len(spelled):
        raise TokenizerError(
            "the corpus needs a tokenizer.json with the control tokens of V4.1: there is none in "
            f"{tokenizer_folder}. Name the folder of nano's tokenizer."
        )
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    spellings = [tokenizer.id_to_token(token) or "" for token in range(vocab_size)]
    # Open draft positions are fed an id that no text has.
    unused = [token for token, text in enumerate(spellings) if "place▁holder" in text]
    special["noise_token_id"] = unused[-1] if unused else vocab_size - 1
    keys = {
        reduction_key(tokenizer.decode([token], skip_special_tokens=False), text)
        for token, text in enumerate(spellings)
    }
    engram = nano_config(vocab_size, len(keys)).engram
    assert engram is not None
    token_map = build_token_map(tokenizer, engram, vocab_size)
    draw = partial(_draw_group, tokenizer_folder, items, length, seed, special["pad_token_id"])
    starts = range(0, items, _GROUP)
    if len(starts) == 1:
        rows = [draw(0)]
    else:
        # Fresh processes: a fork of one that runs JAX may hang.
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            rows = list(pool.map(draw, starts))
    ids, weights = (np.concatenate(part) for part in zip(*rows, strict=True))
    return Packed(ids, weights, np.asarray(token_map.ids), special)


def _draw_group(
    tokenizer_folder: Path, items: int, length: int, seed: int, pad_id: int, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids (uint16) and weights (float32) [n, length] of the group from `start` on."""
    count = min(_GROUP, items - start)
    drawn = corpus.items("train", seed=seed, count=count, start=start, max_tokens=length)
    tokenizer = read_tokenizer(tokenizer_folder)
    assert tokenizer is not None
    # Items start where a group of two tokens does, as in a sequence of their own.
    packed = corpus.pack(
        corpus.render_batch(list(drawn), tokenizer),
        length,
        seed + start,
        pad_id=pad_id,
        align=2,
        task_weights=corpus.TOKEN_WEIGHTS,
        copy_weight=corpus.COPY_WEIGHT,
    )
    return packed.ids.astype(np.uint16), packed.weights


def packed_batches(packed: Packed, *, batch: int, length: int, seed: int) -> BatchAt:
    """Returns batch(step): every sequence once an epoch, in an order drawn from (seed, epoch).

    length: a divisor of the stored length; longer sequences are cut into parts of it.

    Raises:
        InputError: The stored length is no multiple of `length`, or there are too few sequences.
    """
    stored = packed.ids.shape[1]
    if stored % length:
        raise InputError(
            f"--length must divide the length of the packed sequences, got {length} for {stored}"
        )
    ids, weights = packed.ids.reshape(-1, length), packed.weights.reshape(-1, length)
    count = len(ids) // batch
    if not count:
        raise InputError(f"a batch of {batch} needs as many sequences, there are {len(ids)}")
    orders: dict[int, np.ndarray] = {}

    def at(step: int) -> Batch:
        epoch, place = divmod(step, count)
        if epoch not in orders:
            orders.clear()
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(len(ids))
        rows = orders[epoch][place * batch : (place + 1) * batch]
        return ids[rows].astype(np.int32), weights[rows].astype(np.float32)

    return at


def alternating(short: BatchAt, long: BatchAt, every: int) -> BatchAt:
    """Returns batch(step): of `long` at every `every`-th step, of `short` at the others."""

    def at(step: int) -> Batch:
        longs, place = divmod(step, every)
        return long(longs) if place == every - 1 else short(step - longs)

    return at


def packed_token_map(packed: Packed, vocab_size: int) -> TokenMap:
    """Returns the Engram's token map of packed data, ids beyond the tokenizer marked -1."""
    ids = np.full((vocab_size,), -1, np.int32)
    ids[: len(packed.token_map)] = packed.token_map
    ids.setflags(write=False)
    return TokenMap(ids)
