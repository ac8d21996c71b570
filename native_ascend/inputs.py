"""What the host computes for a step: slots, pages, lengths, rotations; packed in two arrays."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from native_ascend.network import Inputs, Network, Sizes
from native_ascend.plan import PlanBuilder, Tensor

#: ids of the tokens up to now [n], first position wanted -> Engram rows int32 [t, columns] a layer.
EngramIds = Callable[[np.ndarray, int], tuple[np.ndarray, ...]]
#: positions int32 [t], whether YaRN -> (cos, sin), float32 [t, r / 2].
Rotation = Callable[[np.ndarray, bool], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Names and shapes of the int32 pieces and of the rotations, in order."""

    ints: tuple[tuple[str, tuple[int, ...]], ...]
    rotations: tuple[str, ...]


def packing(net: Network, sizes: Sizes) -> Packing:
    """Returns how the inputs of a step are packed."""
    rows = sizes.rows
    ints: list[tuple[str, tuple[int, ...]]] = [
        ("ids", (rows,)),
        ("starts", (2,)),
        ("length", (1,)),
        ("window_slots", (rows,)),
        ("window_table", (1, sizes.pages(1))),
        ("tail_slots", (rows,)),
        ("tail_pairs", (rows, 2)),
    ]
    for ratio in net.ratios:
        ints += [
            (f"keys{ratio}", (1,)),
            (f"residual{ratio}", (1,)),
            (f"table{ratio}", (1, sizes.pages(ratio))),
            (f"row_slots{ratio}", (rows,)),
            (f"index_slots{ratio}", (rows,)),
        ]
    count = sum(layer.engram >= 0 for layer in net.layers)
    ints += [(f"engram{n}", (rows, net.engram_columns)) for n in range(count)]
    groups = tuple(f"group{ratio}" for ratio in net.ratios)
    return Packing(ints=tuple(ints), rotations=("plain", "yarn", *groups))


# Every piece starts at a multiple of 32 bytes, as operands of operators have to.
_STEP = 8


def _padded(shape: tuple[int, ...]) -> int:
    return -(-int(np.prod(shape)) // _STEP) * _STEP


def input_tensors(builder: PlanBuilder, net: Network, sizes: Sizes) -> Inputs:
    """Adds the two operands to a plan and returns their pieces."""
    packed = packing(net, sizes)
    total = sum(_padded(shape) for _, shape in packed.ints)
    ints = builder.operand((total,), "int32")
    pieces: dict[str, Tensor] = {}
    first = 0
    for name, shape in packed.ints:
        size = int(np.prod(shape))
        pieces[name] = ints.cut(0, first, size).reshape(*shape)
        first += _padded(shape)
    rows, width = sizes.rows, net.rope_dim
    turns = builder.operand((3 * len(packed.rotations), rows, 1, 1, width), "float32")
    rotation = {}
    for place, name in enumerate(packed.rotations):
        three = [turns.cut(0, 3 * place + n, 1).reshape(rows, 1, 1, width) for n in range(3)]
        rotation[name] = (three[0], three[1], three[2])
    by_ratio = {
        name: {ratio: pieces[f"{name}{ratio}"] for ratio in net.ratios}
        for name in ("keys", "residual", "table", "row_slots", "index_slots")
    }
    return Inputs(
        ids=pieces["ids"],
        starts=pieces["starts"],
        length=pieces["length"],
        window_slots=pieces["window_slots"],
        window_table=pieces["window_table"],
        tail_slots=pieces["tail_slots"],
        tail_pairs=pieces["tail_pairs"],
        keys=by_ratio["keys"],
        residual=by_ratio["residual"],
        table=by_ratio["table"],
        row_slots=by_ratio["row_slots"],
        index_slots=by_ratio["index_slots"],
        engram=tuple(pieces[name] for name in pieces if name.startswith("engram")),
        rotation=rotation,
    )


def input_arrays(
    net: Network,
    sizes: Sizes,
    tokens: np.ndarray,
    first: int,
    engram_ids: EngramIds,
    rotation: Rotation,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two operands for the rows `first` to the end of `tokens`, the whole sequence."""
    position = np.arange(first, len(tokens), dtype=np.int32)
    if len(position) != sizes.rows or len(tokens) > sizes.max_len:
        raise ValueError(
            f"a step has {sizes.rows} rows of at most {sizes.max_len} tokens, received "
            f"{len(position)} rows of {len(tokens)}"
        )
    pair = position // 2 * 2
    values: dict[str, np.ndarray] = {
        "ids": tokens[first:],
        "starts": np.asarray([0, sizes.rows]),
        "length": np.asarray([len(tokens)]),
        "window_slots": position,
        "window_table": np.arange(sizes.pages(1)),
        "tail_slots": position % sizes.tail_rows,
        "tail_pairs": (pair[:, None] + np.arange(2)) % sizes.tail_rows,
    }
    for ratio in net.ratios:
        closes = (position + 1) % ratio == 0
        spare = sizes.pages(ratio) * sizes.page
        values |= {
            f"keys{ratio}": np.asarray([len(tokens) // ratio]),
            f"residual{ratio}": np.asarray([len(tokens) % ratio]),
            f"table{ratio}": np.arange(sizes.pages(ratio)),
            f"row_slots{ratio}": np.where(closes, position // ratio, spare),
            f"index_slots{ratio}": np.where(closes, position // ratio, -1),
        }
    for number, rows in enumerate(engram_ids(tokens, first)):
        values[f"engram{number}"] = rows
    packed = packing(net, sizes)
    flat = np.zeros(sum(_padded(shape) for _, shape in packed.ints), np.int32)
    start = 0
    for name, shape in packed.ints:
        size = int(np.prod(shape))
        flat[start : start + size] = np.reshape(values[name], -1)
        start += _padded(shape)
    turns = np.zeros((3 * len(packed.rotations), sizes.rows, 1, 1, net.rope_dim), np.float32)
    for place, name in enumerate(packed.rotations):
        ratio = int(name.removeprefix("group")) if name.startswith("group") else 1
        cos, sin = rotation(position // ratio * ratio, name != "plain")
        cos, sin = (np.repeat(table, 2, axis=-1)[:, None, None] for table in (cos, sin))
        turns[3 * place : 3 * place + 3] = np.stack([cos, sin, -sin])
    return flat, turns
