"""Writes tests/golden/data/nano.npz: what the embedded checkpoint computes, by full recomputation.

    python tools/nano_goldens.py [--folder deepinfer_jax/data/nano] [--out FILE]

Run it when the checkpoint is replaced, and only then: tests compare later code with these numbers.
Five prompts of the test split; of each, float32 logits of its last positions and the greedy ids
that follow. A prompt whose greedy choice is nearly a tie is refused: other machines might choose
otherwise.
"""

import argparse
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import deepinfer_jax as di
from deepinfer_jax.loading import EMBEDDED
from deepinfer_jax.training.corpus import make_item, prompt_text

TASKS = ("story", "extraction", "arithmetic", "trace", "needle")
THINKING = ("trace",)
NEEDLE_TOKENS = 240
ROWS = 4  # last positions of a prompt whose logits are kept
GREEDY = 8
LEAST_MARGIN = 1e-2
OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "nano.npz"


def fingerprint(folder: Path) -> str:
    """Returns the SHA-256 of everything that decides the numbers: config, weights, tokenizer."""
    digest = sha256()
    names = {"config.json", "tokenizer.json", *(p.name for p in folder.glob("*.safetensors"))}
    for name in sorted(names):
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()


def greedy(logits_of: Callable[[list[int]], np.ndarray], ids: list[int]) -> list[int]:
    """Returns the likeliest continuation, every token by a new pass over all before it.

    Raises:
        ValueError: Two tokens are nearly as likely.
    """
    out = list(ids)
    for _ in range(GREEDY):
        last = logits_of(out)[-1]
        second, first = np.sort(last)[-2:]
        if first - second < LEAST_MARGIN:
            raise ValueError(
                f"a margin of {LEAST_MARGIN} between the two likeliest tokens is needed, got "
                f"{first - second:.2g} after {len(out) - len(ids)} tokens: take another item"
            )
        out.append(int(last.argmax()))
    return out[len(ids) :]


def collect(folder: Path, index: int) -> dict[str, np.ndarray]:
    """Returns `ids`, `logits` and `greedy` of every prompt, and the fingerprint.

    Of each task the first item from place `index` on that is no near tie.
    """
    model = di.load(folder, numerics="float32")
    tokenizer = model.tokenizer
    assert tokenizer is not None  # load has needed it for the Engram hash
    score = jax.jit(di.score, static_argnums=1)
    longest = 2 * NEEDLE_TOKENS

    def logits_of(ids: list[int]) -> np.ndarray:
        # One length, one program: what follows a token does not change its logits.
        padded = jnp.asarray(np.pad(np.asarray(ids, np.int32), (0, longest - len(ids))))
        return np.asarray(score(model.params, model.config, padded))[: len(ids)]

    out = {"fingerprint": np.array(fingerprint(folder))}
    for task in TASKS:
        for place in range(index, index + 20):
            tokens = NEEDLE_TOKENS if task == "needle" else None
            item = make_item(
                task,
                split="test",
                seed=0,
                index=place,
                thinking=task in THINKING,
                tokens=tokens,
            )
            ids = tokenizer.encode(prompt_text(item), add_special_tokens=False).ids
            try:
                chosen = greedy(logits_of, ids)
            except ValueError as error:
                print(f"{item.key}: {error}")
                continue
            out[f"{task}.ids"] = np.asarray(ids, np.int32)
            out[f"{task}.logits"] = logits_of(ids)[-ROWS:]
            out[f"{task}.greedy"] = np.asarray(chosen, np.int32)
            print(f"{item.key}: {len(ids)} ids, then {tokenizer.decode(chosen)!r}")
            break
        else:
            raise ValueError(f"every tried item of {task} is a near tie")
    return out


def main() -> None:
    """Computes the numbers and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=EMBEDDED)
    parser.add_argument("--index", type=int, default=0, help="first place in the corpus stream")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    values = collect(chosen.folder, chosen.index)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(chosen.out, **values)
    print(f"{chosen.out}: {chosen.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
