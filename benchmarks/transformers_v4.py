"""Generation of tiny_v4 beside transformers' DeepseekV4ForCausalLM, in one run on the CPU (C6).

`python benchmarks/transformers_v4.py --peer /path/to/python` needs a Python that has torch and
transformers (5.24 or newer); they are no dependency of this package. The peer loads the same
weights, dequantised to float32, and generates greedily with its cache; tokens are compared first,
then both sides are timed in turn, alone and 16 prompts together.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TINY = Path(__file__).parent.parent / "tests/fixtures/tiny_v4"
NEW_TOKENS = 32
ROUNDS = 3


def prompts(count: int) -> list[list[int]]:
    """Returns seeded prompts of 24 ids, the same on both sides."""
    state, found = 12345, []
    for _ in range(count):
        ids = []
        for _ in range(24):
            state = (1103515245 * state + 12345) % 2**31
            ids.append(3 + state % 200)
        found.append(ids)
    return found


def peer(folder: str) -> None:
    """Runs inside the peer's Python: prints one JSON line a batch size."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for count in (1, 16):
        ids = torch.tensor(prompts(count))
        arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1}
        best, out = float("inf"), None
        for _ in range(ROUNDS + 1):
            begin = time.perf_counter()
            with torch.no_grad():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
            best = min(best, time.perf_counter() - begin)
        assert out is not None
        print(json.dumps({"count": count, "seconds": best, "tokens": out[:, 24:].tolist()}))


def write_float32(folder: Path) -> None:
    """Writes the fixture's weights as float32 under their own names, without quantisation."""
    import jax
    import numpy as np
    from safetensors.numpy import save_file

    from deepinfer_jax.checkpoint.inventory import spec_tree
    from deepinfer_jax.loading import load
    from deepinfer_jax.model.spec import ParamSpec

    model = load(TINY, numerics="float32")
    specs = jax.tree.leaves(spec_tree(model.config), is_leaf=lambda x: isinstance(x, ParamSpec))
    tensors: dict[str, Any] = {}
    for spec, leaf in zip(specs, jax.tree.leaves(model.params), strict=True):
        values = np.asarray(leaf).reshape(-1, *spec.shape)
        tensors |= {name: np.array(values[i]) for i, name in enumerate(spec.names)}
    config = json.loads((TINY / "config.json").read_text())
    config.pop("quantization_config", None)
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    tables = {k: v.astype(np.int64) for k, v in tensors.items() if "tid2eid" in k}
    save_file(tensors | tables, folder / "model.safetensors", metadata={"format": "pt"})


def ours(count: int) -> tuple[float, list[list[int]]]:
    """Returns (seconds, tokens) of the engine; the best of several rounds after the first."""
    import deepinfer_jax as di

    runtime = di.RuntimeConfig(max_seqs=count, max_len=128, prefix_cache=False)
    llm = di.LLM(TINY, numerics="float32", runtime=runtime)
    params = di.SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    best, outputs = float("inf"), []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        outputs = llm.generate(prompts(count), params, progress=False)
        best = min(best, time.perf_counter() - begin)
    return best, [list(output.token_ids) for output in outputs]


def _agreement(one: list[int], other: list[int]) -> int:
    """Returns the length of the common beginning."""
    pairs = zip(one, other, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))


def main() -> None:
    """Runs both sides and prints ratios."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--peer", help="Python with torch and transformers")
    arguments.add_argument("--serve", help="(internal) folder; runs the peer's side")
    given = arguments.parse_args()
    if given.serve:
        peer(given.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_float32(Path(folder))
        command = [given.peer or sys.executable, __file__, "--serve", folder]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    for line in run.stdout.splitlines():
        if not line.startswith("{"):
            continue
        theirs = json.loads(line)
        seconds, tokens = ours(theirs["count"])
        equal = [_agreement(*pair) for pair in zip(tokens, theirs["tokens"], strict=True)]
        # Two float32 arithmetics part at the first near-tie of a random network, not before.
        assert min(equal) >= 8, f"the two sides part after {equal} tokens"
        print(
            json.dumps(
                {
                    "benchmark": "transformers_v4",
                    "prompts": theirs["count"],
                    "tokens": NEW_TOKENS * theirs["count"],
                    "equal_tokens": sum(equal),
                    "seconds": round(seconds, 4),
                    "transformers_seconds": round(theirs["seconds"], 4),
                    "times_as_fast": round(theirs["seconds"] / seconds, 2),
                }
            )
        )


if __name__ == "__main__":
    main()
