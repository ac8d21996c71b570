"""Do a row's bits depend on the rows beside it? Every GPU kernel, over numbers of rows (E2).

    python -m benchmarks.kernel_bits [--json OUT.jsonl] [--only TEXT] [--seconds 120]
                                     [--lock FILE]

For each case the rows of `BATCH` are computed together; then M of them, for every M of `COUNTS`:
the first ones, the last ones, and some drawn at random in random order. One line a case counts the
rows with other bits. A control whose input bits are flipped must differ, or the case is void. The
scores of the indexer run in both forms that it has, and are compared across them: with a tile for
every row, and with up to eight rows of a sequence in one.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.turns import turn
from pallas_kernels import core
from pallas_kernels.block_scaled_matmul import api as dense
from pallas_kernels.block_scaled_matmul.arg_specs import LINEARS, NARROW
from pallas_kernels.indexer_logits import api as indexer
from pallas_kernels.mhc_pre import api as mixing
from pallas_kernels.mhc_pre import arg_specs as mixing_specs
from pallas_kernels.select_topk import api as selection
from pallas_kernels.sparse_mla_decode import api as attention
from pallas_kernels.sparse_mla_decode.arg_specs import random_arguments

COUNTS = (1, 2, 3, 8, 63, 64, 65, 128, 257, 1024)
BATCH = 1024
SHARING = 8  # rows of one sequence
DENSE = {**LINEARS, "narrow": NARROW}


@dataclass(frozen=True)
class Case:
    """One kernel on numbered rows.

    Attributes:
        name: op and shape.
        rows: arrays [BATCH, ...] of which a row is computed from its own slice.
        run: run(*rows of a selection, *shared) -> [m, ...].
        shared: what all rows read.
        group: rows have to come in so many neighbours that share a sequence.
    """

    name: str
    rows: tuple[jax.Array, ...]
    run: Callable[..., jax.Array]
    shared: tuple[Any, ...] = ()
    group: int = 1


def _dense(name: str) -> Case:
    n, k = DENSE[name]
    keys = jax.random.split(jax.random.key(1), 3)
    x = core.fake_q8(jax.random.normal(keys[0], (BATCH, k))).astype(jnp.bfloat16)
    payload = jax.random.normal(keys[1], (n, k)).astype(jnp.float8_e4m3fn)
    scale = jax.random.randint(keys[2], (n // 32, k // 32), 118, 124).astype(jnp.uint8)

    def run(x: jax.Array, payload: jax.Array, scale: jax.Array) -> jax.Array:
        w = core.QuantArray(payload, scale, "fp8_block32")
        return dense.block_scaled_matmul(x, None, w, implementation="mosaic_sm90")

    return Case(f"block_scaled_matmul {name}", (x,), run, (payload, scale))


def _attention(form: str, row_bytes: int) -> Case:
    q, own, own_ids, cache, ids, sink = random_arguments(1, BATCH, 64, 512, row_bytes)

    def run(q: Any, own_ids: Any, ids: Any, own: Any, cache: Any, sink: Any) -> jax.Array:
        kernel = partial(attention.sparse_mla_decode, implementation="mosaic_sm90")
        return kernel(q, own, own_ids, cache, ids, sink)

    return Case(f"sparse_mla_decode {form}", (q, own_ids, ids), run, (own, cache, sink))


def _indexer(group: int, page: int, listed: int) -> Case:
    """Rows of BATCH / SHARING sequences; pages are drawn from one pool, so that rows share some."""
    keys = jax.random.split(jax.random.key(1), 5)
    query = core.quantize_q4m(jax.random.normal(keys[0], (BATCH, 32, 128)))
    weight = (jax.random.normal(keys[1], (BATCH, 32)) / 64).astype(jnp.bfloat16)
    cache = core.quantize_q4m(jax.random.normal(keys[2], (4 * listed, page, 128)))
    pages = jax.random.randint(keys[3], (BATCH // SHARING, listed), 0, 4 * listed, jnp.int32)
    pages = jnp.repeat(pages, SHARING, axis=0)
    length = jax.random.randint(keys[4], (BATCH,), 0, listed * page + 1, jnp.int32)

    def run(
        query: Any, scale: Any, weight: Any, pages: Any, length: Any, key: Any, key_scale: Any
    ) -> jax.Array:
        kernel = partial(indexer.indexer_logits, implementation="mosaic_sm90")
        return kernel(query, scale, weight, key, key_scale, pages[::group], length)

    label = f"indexer_logits keys={listed * page} page={page} rows a tile={group}"
    return Case(label, (*query, weight, pages, length), run, cache, group)


def _select(size: int, k: int) -> Case:
    scores = jax.random.normal(jax.random.key(1), (BATCH, size)).astype(jnp.bfloat16)
    length = jax.random.randint(jax.random.key(2), (BATCH,), 0, size + 1, jnp.int32)

    def run(scores: jax.Array, length: jax.Array) -> jax.Array:
        return selection.select_topk(scores, k, length=length, implementation="triton")

    return Case(f"select_topk n={size} k={k}", (scores, length), run)


def _mixing() -> Case:
    x, *shared = mixing_specs.random_arguments(1, BATCH)

    def run(x: jax.Array, *shared: jax.Array) -> jax.Array:
        keywords = mixing_specs.CASES[0].kwargs
        wide = x.astype(jnp.float32)
        found = mixing.mhc_pre(wide, *shared, **keywords, implementation="triton")
        return jnp.concatenate([part.reshape(x.shape[0], -1) for part in found], axis=1)

    # flipping a bit of float32 would give values that no stream has
    return Case("mhc_pre", (x.astype(jnp.bfloat16),), run, tuple(shared))


def cases(only: str) -> Iterator[Case]:
    """Yields the cases whose name contains `only`, each made when it is asked for."""
    makers: dict[str, Callable[[], Case]] = {
        f"indexer_logits {group} {page}": partial(_indexer, group, page, 4096 // page)
        for group, page in ((1, 64), (SHARING, 64), (3, 64), (5, 64), (1, 128), (SHARING, 128))
    }
    makers |= {f"block_scaled_matmul {name}": partial(_dense, name) for name in DENSE}
    makers |= {
        "sparse_mla_decode q4n": partial(_attention, "q4n", 288),
        "sparse_mla_decode q8": partial(_attention, "q8", 528),
        "select_topk 16384": partial(_select, 16384, 512),
        "mhc_pre": _mixing,
    }
    for name, make in makers.items():
        if only in name:
            yield make()


def picks(count: int, group: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields the rows of three selections of `count`: the first, the last, random ones.

    With a group, `group` neighbours of one sequence stay together.
    """
    sequences = BATCH // SHARING
    tiles = count // group
    if group == 1:
        yield np.arange(count)
        yield np.arange(BATCH - count, BATCH)
        yield rng.permutation(BATCH)[:count]
        return
    for chosen in (np.arange(tiles), rng.permutation(sequences)[:tiles]):
        first = rng.integers(0, SHARING - group + 1, tiles)
        yield (chosen * SHARING + first)[:, None].repeat(group, 1).ravel() + np.tile(
            np.arange(group), tiles
        )


def selections(group: int) -> list[np.ndarray]:
    """Returns the rows of all selections of a case with such groups."""
    rng, found = np.random.default_rng(0), []
    for count in COUNTS:
        if count % group == 0 and (group == 1 or count // group <= BATCH // SHARING):
            found += list(picks(count, group, rng))
    return found


def programs(case: Case, counts: set[int]) -> dict[int, Any]:
    """Returns the kernel compiled for so many rows each, side by side."""

    def compiled(count: int) -> Any:
        rows = [jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype) for a in case.rows]
        return jax.jit(case.run).lower(*rows, *case.shared).compile()

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(counts, pool.map(compiled, counts), strict=True))


def judge(
    case: Case, lock: Path | None, together: np.ndarray | None = None
) -> tuple[dict[str, Any], np.ndarray]:
    """Returns (the record of a case, the bits of all rows).

    together: bits that another form of the same op gave the same rows; None: this one's own.
    """
    chosen, few = selections(case.group), SHARING // case.group * case.group
    counts = sorted({len(rows) for rows in chosen})
    compiled = programs(case, {*counts, few, BATCH} if together is None else {*counts, few})

    def bits(rows: Sequence[jax.Array]) -> np.ndarray:
        found = np.asarray(compiled[len(rows[0])](*rows, *case.shared))
        return found.view(f"u{found.dtype.itemsize}")

    with turn(lock):
        whole = bits(case.rows) if together is None else together
        differing = 0
        for rows in chosen:
            found = bits([array[rows] for array in case.rows]).reshape(len(rows), -1)
            differing += int((found != whole[rows].reshape(len(rows), -1)).any(axis=1).sum())
        first, *others = (array[:few] for array in case.rows)
        flipped = (first.view(f"u{first.dtype.itemsize}") ^ 1).view(first.dtype)
        noticed = bool((bits([flipped, *others]) != whole[:few]).any())
    compared = sum(len(rows) for rows in chosen)
    record = {"case": case.name, "counts": counts, "compared": compared, "differing": differing}
    return record | {"control_noticed": noticed}, whole


def main() -> None:
    """Prints one JSON line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no new case after these")
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    parser.add_argument("--lock", type=Path, help="a file to lock while kernels run")
    options = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        parser.error("the kernels need an NVIDIA GPU, and this machine has none")
    begin = time.monotonic()
    about = {"question": "kernel bits", "device": jax.devices()[0].device_kind}
    forms: dict[str, np.ndarray] = {}
    for case in cases(options.only):
        if time.monotonic() - begin > options.seconds:
            record: dict[str, Any] = {"case": case.name, "skipped": "out of time"}
        else:
            form = case.name.partition(" rows a tile")[0]
            try:
                record, forms[form] = judge(case, options.lock, forms.get(form))
            except Exception as error:  # the other cases still count
                text = f"{type(error).__name__}: {error}"
                record = {"case": case.name, "error": text[:600]}
        line = json.dumps(about | record | {"seconds": round(time.monotonic() - begin, 1)})
        print(line, flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
