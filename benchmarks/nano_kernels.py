"""Does nano at level "batch" keep its bits on Pallas kernels, and agree with XLA? (issue 8, E5)

    python -m benchmarks.nano_kernels [--json OUT.jsonl] [--kernels pallas] [--lock FILE]

nano runs with a kernel for every covered op that has a form for its sizes. A sequence runs in
one call, in chunks, beside five others with all rows mixed, and in a longer plan; its logits are
compared as integers, and every layer with XLA's from the same inputs, for several rows and for more
than a dense product of few rows takes (`benchmarks.layer_distances`). How far the logits are from
XLA's is said, and judged by nothing: twelve layers that round to BF16 are chaotic. A control with a
flipped weight bit must be noticed. The programs are compiled side by side, which takes most of the
time: it is the cheapest form of `benchmarks.invariance_gpu`, which proves more. One JSON line when
programs are compiled, and one a comparison, then one for all.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.invariance_gpu import pin_kernels
from benchmarks.layer_distances import frobenius, layer_distances
from benchmarks.turns import turn

ROWS = 48  # of the sequence
OTHERS = 5  # sequences of as many rows
SHORT, LONG = 16, 512  # rows of the two plans


class Network:
    """A model's programs for plans of two lengths."""

    def __init__(self, model: Any) -> None:
        """Holds the model; nothing is compiled yet."""
        import deepinfer_jax as di

        self.params, self.config = model.params, model.config
        self.runtime = di.RuntimeConfig(max_seqs=OTHERS + 1, max_len=256, max_tokens_per_step=LONG)
        self.programs: dict[int, Any] = {}

    def state(self) -> Any:
        """Returns an empty cache."""
        from deepinfer_jax.model.cached import init_state

        return init_state(self.config, self.runtime)

    def plan(self, length: int, rows: list[tuple[int, int, int]]) -> Any:
        """Returns the plan of (id, position, slot) rows."""
        from deepinfer_jax.model.cached import make_plan

        ids, position, slot = (list(column) for column in zip(*rows, strict=True))
        return make_plan(self.config, ids, position, slot, length=length)

    def compile(self, length: int) -> float:
        """Compiles the program of one length; returns the seconds it took."""
        from deepinfer_jax.model.cached import lower_program

        begin = time.perf_counter()
        plan = self.plan(length, [(3, 0, 1)])
        self.programs[length] = lower_program(
            self.params, self.config, self.state(), plan
        ).compile()
        return round(time.perf_counter() - begin, 1)

    def logits(
        self, calls: list[tuple[int, list[tuple[int, int, int]]]], params: Any = None
    ) -> Any:
        """Returns the logits of sequence 1 after calls of (length, rows), in order of position."""
        import numpy as np

        state, found = self.state(), []
        for length, rows in calls:
            program = self.programs[length]
            state, out = program(params or self.params, state, self.plan(length, rows))
            kept = [place for place, (_, _, slot) in enumerate(rows) if slot == 1]
            found.append(np.asarray(out.logits, np.float32)[kept])
        return np.concatenate(found)


def compositions(vocabulary: int) -> dict[str, list[tuple[int, list[tuple[int, int, int]]]]]:
    """Returns calls of (plan length, rows) by name; sequence 1 is the same in all."""
    import numpy as np

    rng = np.random.default_rng(0)
    ids = rng.integers(3, vocabulary, (OTHERS + 1, ROWS))
    own, *others = [[(int(ids[s, p]), p, s + 1) for p in range(ROWS)] for s in range(OTHERS + 1)]
    queues = [list(rows) for rows in (own, *others)]
    order = rng.permutation(np.repeat(np.arange(OTHERS + 1), ROWS))
    mixed = [queues[s].pop(0) for s in order]

    def cut(rows: list[tuple[int, int, int]], size: int, length: int) -> list[Any]:
        return [(length, rows[start : start + size]) for start in range(0, len(rows), size)]

    beside = [
        (LONG, [*others[0][:20], *rows, *others[1][5 * i : 5 * i + 5]])
        for i, (_, rows) in enumerate(cut(own, 7, LONG))
    ]
    return {
        "one call": [(LONG, own)],
        "chunks of 16": cut(own, SHORT, SHORT),
        "one row a step": cut(own, 1, SHORT),
        "mixed with five others": [(LONG, mixed)],
        "chunks of 7 beside others": beside,
    }


def kernel_calls(program: Any) -> dict[str, int]:
    """Returns how often each Pallas kernel is called in a compiled program."""
    names = re.findall(r'op_name="[^"]*?(\w+)/(?:mpmd_map|pallas_call)"', program.as_text())
    return dict(sorted(Counter(names).items()))


def distance(found: Any, expected: Any) -> dict[str, float]:
    """Returns how far logits [t, v] are from expected ones.

    frobenius: norm of the difference over that of `expected`. largest: difference over its root
    mean square. same_argmax: share of rows.
    """
    import numpy as np

    difference = found - expected
    return {
        "frobenius": frobenius(found, expected),
        "largest": float(np.abs(difference).max() / np.sqrt(np.square(expected).mean())),
        "same_argmax": float((found.argmax(1) == expected.argmax(1)).mean()),
    }


def layers_are_near(ours: Network, theirs: Network, put: Callable[[dict[str, Any]], None]) -> bool:
    """Puts a record a layer and length of the plan; returns whether all are near XLA's."""
    import jax.numpy as jnp

    from deepinfer_jax.model.tile import Rows

    own = compositions(ours.config.vocab_size)["mixed with five others"][0][1]
    near = []
    for length in (SHORT, LONG):
        plan = theirs.plan(length, own[:length])
        state, _ = theirs.programs[length](theirs.params, theirs.state(), plan)
        valid = jnp.arange(length) < plan.count
        tile = Rows(ids=plan.ids, position=plan.position, slot=plan.slot, valid=valid)
        pairs = [(one.config, one.params) for one in (ours, theirs)]
        for record in layer_distances(pairs[0], pairs[1], state, tile):
            put({"rows": int(plan.count), "of": length, **record})
            near.append(record["is_near"])
    return all(near)


def compare(ours: Network, theirs: Network, put: Callable[[dict[str, Any]], None]) -> bool:
    """Puts a record a comparison; returns whether bits held and layers were near XLA's."""
    import numpy as np

    from deepinfer_jax.invariance.control import flipped

    cases = compositions(ours.config.vocab_size)
    first, *others = cases
    lone, stock = ours.logits(cases[first]), theirs.logits(cases[first])
    put({"of": "logits to XLA's", **distance(lone, stock)})

    def differing(found: Any) -> int:
        return int((found.view(np.uint32) != lone.view(np.uint32)).any(axis=1).sum())

    total = 0
    for name in others:
        count = differing(ours.logits(cases[name]))
        put({"case": name, "positions": len(lone), "differing": count})
        total += count
    noticed = differing(ours.logits(cases[first], flipped(ours.params))) > 0
    is_near = layers_are_near(ours, theirs, put)
    put({"differing": total, "control_noticed": noticed, "layers_are_near": is_near})
    return noticed and not total and is_near


def main() -> None:
    """Prints the lines; exits 1 where bits differ or layers are not near XLA's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", default="pallas", help="what load takes")
    parser.add_argument("--lock", type=Path, help="a file to lock while the programs run")
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    options = parser.parse_args()
    pin_kernels()
    import jax

    import deepinfer_jax as di

    begin = time.perf_counter()

    def put(record: dict[str, Any]) -> None:
        line = json.dumps({"benchmark": "nano_kernels", **record})
        print(line, flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    ours, theirs = (
        Network(di.load("nano", numerics="checkpoint", determinism="batch", kernels=kernels))
        for kernels in (options.kernels, "xla")
    )
    with ThreadPoolExecutor(4) as pool:
        jobs = [(one, length) for length in (LONG, SHORT) for one in (ours, theirs)]
        seconds = list(pool.map(lambda job: job[0].compile(job[1]), jobs))
    about = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "kernels": dict(ours.config.execution.kernels),
        "row_tile": ours.config.execution.row_tile,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "calls": kernel_calls(ours.programs[LONG]),
        "compile_seconds": seconds,
    }
    put(about)
    with turn(options.lock):
        is_equal = compare(ours, theirs, put)
    put({"is_equal": is_equal, "seconds": round(time.perf_counter() - begin, 1)})
    if not is_equal:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
