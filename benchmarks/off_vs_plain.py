"""Is `determinism="off"` as fast as a plain jnp forward of the same network? (A13: ratio >= 0.9)

The yardstick below is model.md 3 written down with stock jnp operations: float32, no tiles, no
cache, no scan over layers, dense masked attention, every expert on every row. Dense attention makes
it a weak yardstick for prompts much longer than the window. Both are checked to agree before
anything is timed. One JSON line per point:

    python -m benchmarks.off_vs_plain --preset tiny_v41 --json out.jsonl
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.inventory import spec_tree
from deepinfer_jax.config.engram_primes import engram_primes
from deepinfer_jax.config.hf import config_from_hf
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import index_layers, layer_roles, source_layers, source_ratios
from deepinfer_jax.loading import load
from deepinfer_jax.model.engram.hashing import hash_ids
from deepinfer_jax.model.engram.vocabulary import TokenMap
from deepinfer_jax.model.forward import score
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.rope import inverse_frequencies
from deepinfer_jax.model.spec import ParamSpec

TINY = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "tiny_v41"
TOLERANCE = 1e-4  # of the largest logit
NANO_LIKE = {  # determinism.md 12, without its three extra layers
    "vocab_size": 4096,
    "hidden_size": 192,
    "num_attention_heads": 8,
    "n_routed_experts": 16,
    "moe_intermediate_size": 128,
    "sliding_window": 64,
    "index_topk": 64,
    "candidate_topk_blocks": 32,
}


def unstack(params: Params, config: ModelConfig) -> Params:
    """Returns the tree with its layers as a tuple: slices of a stack would be copied each call."""

    def one(layer: int) -> Any:
        return jax.tree.map(lambda leaf: jnp.array(leaf[layer]), params.layers)

    return replace(params, layers=tuple(map(one, range(config.num_hidden_layers))))


def plain_score(params: Params, config: ModelConfig, token_ids: jax.Array) -> jax.Array:
    """Returns float32 logits of every position; params: float32, from `unstack`."""
    ids, eps, streams = token_ids, config.rms_norm_eps, config.mhc.hc_mult
    position = jnp.arange(ids.shape[0])
    embedded = params.embed[ids]
    x = jnp.broadcast_to(embedded[:, None], (len(ids), streams, config.hidden_size))
    mix = jnp.zeros((len(ids), streams)).at[:, 0].set(1.0)
    shared: dict[str, Any] = {}
    layers: Any = params.layers
    for role in layer_roles(config):
        layer = layers[role.layer]
        if role.has_engram:
            x = _engram(params, config, role.layer, ids, x)
        attend = partial(_attention, params, config, role, layer, shared, position)
        x, mix = _sublayer(config, layer.hc_attn, layer.attn_norm, x, mix, attend)
        x, mix = _sublayer(
            config, layer.hc_ffn, layer.ffn_norm, x, mix, partial(_moe, config, layer)
        )
    hidden = jnp.einsum("tm,tmd->td", mix, x)
    return _norm(hidden, params.norm, eps) @ params.head.T


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return weight * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _sublayer(
    config: ModelConfig, mhc: Any, norm: jax.Array, x: jax.Array, mix: jax.Array, run: Callable
) -> tuple[jax.Array, jax.Array]:
    n, eps = config.mhc.hc_mult, config.mhc.hc_eps
    flat = x.reshape(len(x), -1)
    scale = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + config.rms_norm_eps)
    m = (flat @ mhc.fn.T) * scale
    following = jax.nn.sigmoid(m[:, :n] * mhc.scale[0] + mhc.base[:n]) + eps
    gain = 2 * jax.nn.sigmoid(m[:, n : 2 * n] * mhc.scale[1] + mhc.base[n : 2 * n])
    logits = (m[:, 2 * n :] * mhc.scale[2] + mhc.base[2 * n :]).reshape(-1, n, n)
    b = jax.nn.softmax(logits, axis=2) + eps

    def columns(b: jax.Array) -> jax.Array:
        return b / (b.sum(axis=1, keepdims=True) + eps)

    def both(_: Any, b: jax.Array) -> jax.Array:
        return columns(b / (b.sum(axis=2, keepdims=True) + eps))

    # A loop: unrolled, the forty small steps of every sub-layer cost more than its products.
    b = jax.lax.fori_loop(0, config.mhc.hc_sinkhorn_iters - 1, both, columns(b))
    y = run(_norm(jnp.einsum("tm,tmd->td", mix, x), norm, config.rms_norm_eps))
    return gain[:, :, None] * y[:, None] + jnp.einsum("tij,tid->tjd", b, x), following


def _rope(x: jax.Array, angle: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates interleaved pairs of the last channels; x is [t, .., c]."""
    turned = x[..., -2 * angle.shape[1] :].reshape(*x.shape[:-1], -1, 2)
    angle = angle.reshape(len(angle), *([1] * (x.ndim - 2)), -1)
    cos, sin = jnp.cos(angle), jnp.sin(-angle if inverse else angle)
    a, b = turned[..., 0], turned[..., 1]
    pairs = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    kept = x[..., : x.shape[-1] - 2 * angle.shape[-1]]
    return jnp.concatenate([kept, pairs.reshape(*x.shape[:-1], -1)], axis=-1)


def _attention(
    params: Params,
    config: ModelConfig,
    role: Any,
    layer: Any,
    shared: dict[str, Any],
    position: jax.Array,
    v: jax.Array,
) -> jax.Array:
    attention, eps, count = config.attention, config.rms_norm_eps, len(v)
    frequency = inverse_frequencies(attention, yarn=role.uses_yarn)
    angle = position[:, None] * frequency
    latent = _norm(v @ layer.wq_a.T, layer.q_norm, eps)
    q = (latent @ layer.wq_b.T).reshape(count, attention.num_attention_heads, -1)
    q = _rope(q, angle)
    keys = _rope(_norm(v @ layer.wkv.T, layer.kv_norm, eps), angle)
    back = position[:, None] - position
    visible = (back >= 0) & (back < attention.sliding_window)
    if role.kv_source == role.layer:
        _compress(params, config, role, shared, frequency, v)
    if role.ratio:
        if role.topk_source == role.layer:
            _select(params, config, role, shared, angle, latent, v)
        keys = jnp.concatenate([keys, shared["rows"]])
        visible = jnp.concatenate([visible, shared["chosen"]], axis=1)
    scores = jnp.einsum("thc,sc->hts", q, keys) * attention.head_dim**-0.5
    scores = jnp.where(visible, scores, -jnp.inf)
    sink = layer.attn_sink[:, None, None]
    top = jnp.maximum(scores.max(axis=2, keepdims=True), sink)
    weight = jnp.exp(scores - top)
    weight = weight / (weight.sum(axis=2, keepdims=True) + jnp.exp(sink - top))
    o = _rope(jnp.einsum("hts,sc->thc", weight, keys), angle, inverse=True)
    o = o.reshape(count, attention.o_groups, -1)
    down = layer.wo_a.reshape(attention.o_groups, -1, o.shape[2])
    return jnp.einsum("tgc,grc->tgr", o, down).reshape(count, -1) @ layer.wo_b.T


def _compress(
    params: Params, config: ModelConfig, role: Any, shared: dict[str, Any], f: Any, v: jax.Array
) -> None:
    """Puts the compressed rows and index keys of a source layer into `shared`."""
    ratio, eps = role.ratio, config.rms_norm_eps
    place = source_layers(config, ratio).index(role.layer)
    group = params.compressors[source_ratios(config).index(ratio)]
    leaves = jax.tree.map(lambda leaf: leaf[place], group)
    closed = len(v) // ratio
    value = (v @ leaves.wkv.T)[: closed * ratio].reshape(closed, ratio, -1)
    if ratio > 1:
        gate = (v @ leaves.wgate.T)[: closed * ratio].reshape(closed, ratio, -1)
        value = jax.nn.softmax(gate, axis=1) * value
    latent = _norm(value.sum(axis=1), leaves.norm, eps)
    angle = (jnp.arange(closed) * ratio)[:, None] * f
    shared["rows"] = _rope(latent, angle)
    shared["index"] = _rope(_norm(latent @ leaves.index_wk.T, leaves.index_k_norm, eps), angle)


def _select(
    params: Params,
    config: ModelConfig,
    role: Any,
    shared: dict[str, Any],
    angle: jax.Array,
    latent: jax.Array,
    v: jax.Array,
) -> None:
    """Puts which compressed rows every token sees into `shared`, [t, groups]."""
    indexer, count = config.indexer, len(v)
    leaves = jax.tree.map(
        lambda leaf: leaf[index_layers(config).index(role.layer)], params.indexers
    )
    q = (latent @ leaves.wq_b.T).reshape(count, indexer.index_n_heads, -1)
    weight = v @ leaves.weights_proj.T * (indexer.index_head_dim * indexer.index_n_heads) ** -0.5
    dots = jax.nn.relu(jnp.einsum("thi,si->ths", _rope(q, angle), shared["index"]))
    scores = jnp.einsum("ths,th->ts", dots, weight)
    groups = scores.shape[1]
    length = (jnp.arange(count) + 1) // role.ratio
    open_ = jnp.arange(groups) < length[:, None]
    if role.uses_candidates:
        open_ = open_ & shared["candidates"]
    scores = jnp.where(open_, scores, -jnp.inf)
    shared["chosen"] = _top(scores, indexer.index_topk) & open_
    if role.is_candidate_source:
        size = indexer.candidate_block_size
        padded = jnp.pad(scores, ((0, 0), (0, -groups % size)), constant_values=-jnp.inf)
        best = padded.reshape(count, -1, size).max(axis=2)
        is_last = jnp.arange(best.shape[1]) == ((length - 1) // size)[:, None]
        kept = _top(jnp.where(is_last, jnp.inf, best), indexer.candidate_topk_blocks)
        shared["candidates"] = jnp.repeat(kept, size, axis=1)[:, :groups]


def _top(scores: jax.Array, k: int) -> jax.Array:
    """Returns whether each entry is among the k largest of its row, ties to the lower index."""
    if scores.shape[1] <= k:
        return jnp.ones(scores.shape, bool)
    _, index = jax.lax.top_k(scores, k)
    rows = jnp.arange(len(scores))[:, None]
    return jnp.zeros(scores.shape, bool).at[rows, index].set(True)


def _engram(
    params: Params, config: ModelConfig, layer: int, ids: jax.Array, x: jax.Array
) -> jax.Array:
    engram, memory, n = config.engram, params.engram, config.mhc.hc_mult
    assert engram is not None
    assert memory is not None
    place = engram.engram_layer_ids.index(layer)
    compressed = jnp.asarray(memory.token_map.ids)[ids]
    context = jnp.stack(
        [
            jnp.pad(compressed, (back, 0), constant_values=-1)[: len(ids)]
            for back in range(engram.engram_max_ngram_size)
        ],
        axis=1,
    )
    pad = int(memory.token_map.ids[engram.engram_pad_token_id])
    found = memory.tables[place][hash_ids(engram_primes(config), place, context, pad)]
    kv = (found.reshape(len(ids), -1) @ memory.wkv[place].T).reshape(len(ids), n + 1, -1)
    keys, value = kv[:, :n], kv[:, n:]
    one = jnp.ones(())
    dot = (
        _norm(x, one, 1e-20)
        * memory.q_weight[place]
        * memory.k_weight[place]
        * _norm(keys, one, 1e-20)
    ).sum(axis=2) * config.hidden_size**-0.5
    gate = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)), dot))
    return x + gate[:, :, None] * value


def _moe(config: ModelConfig, layer: Any, v: jax.Array) -> jax.Array:
    moe = config.moe
    s = jnp.sqrt(jax.nn.softplus(v @ layer.gate.T))
    _, ids = jax.lax.top_k(s + layer.gate_bias, moe.num_experts_per_tok)
    weight = jnp.take_along_axis(s, ids, axis=1)
    if moe.norm_topk_prob and moe.num_experts_per_tok > 1:
        weight = weight / (weight.sum(axis=1, keepdims=True) + 1e-20)
    weight = weight * moe.routed_scaling_factor
    dense = jnp.zeros_like(s).at[jnp.arange(len(v))[:, None], ids].set(weight)

    def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
        limit = moe.swiglu_limit
        return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)

    experts, one = layer.experts, layer.shared
    # One batched product per matrix, in the layout the weights have.
    inner = swiglu(
        jnp.einsum("td,efd->etf", v, experts.w1), jnp.einsum("td,efd->etf", v, experts.w3)
    )
    routed = jnp.einsum("etf,edf->etd", inner * dense.T[:, :, None], experts.w2).sum(axis=0)
    return routed + swiglu(v @ one.w1.T, v @ one.w3.T) @ one.w2.T


def random_model(seed: int = 0) -> tuple[Params, ModelConfig]:
    """Returns float32 random parameters of the nano-like size and their config."""
    record = json.loads((TINY / "config.json").read_text())
    record["text_config"] |= NANO_LIKE
    config = config_from_hf(record)
    rng = np.random.default_rng(seed)

    def leaf(spec: ParamSpec) -> jax.Array:
        shape = (*spec.stack, *spec.shape)
        if len(spec.shape) == 1:
            return jnp.asarray(1 + 0.1 * rng.standard_normal(shape, np.float32))
        scale = np.float32(spec.shape[-1] ** -0.5)
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32))

    tree = jax.tree.map(leaf, spec_tree(config), is_leaf=lambda s: isinstance(s, ParamSpec))
    compressed = config.engram.engram_compressed_vocab_size if config.engram else 1
    tokens = TokenMap(np.arange(config.vocab_size, dtype=np.int32) % compressed)
    return replace(tree, engram=replace(tree.engram, token_map=tokens)), config


def measure(params: Params, config: ModelConfig, rows: int, repeats: int) -> dict[str, Any]:
    """Returns one point: agreement first, then times of alternating runs.

    Raises:
        ValueError: The two forwards differ by more than `TOLERANCE`.
    """
    config = replace(
        config, execution=replace(config.execution, numerics="float32", determinism="off")
    )
    ids = jnp.asarray(np.random.default_rng(1).integers(3, 400, rows), jnp.int32)
    programs: dict[str, Callable[[], jax.Array]] = {}
    compile_s, outputs = {}, {}
    forms = {"off": (score, params), "plain": (plain_score, unstack(params, config))}
    for name, (function, tree) in forms.items():
        jitted = jax.jit(partial(function, config=config))
        started = time.perf_counter()
        compiled = jitted.lower(tree, token_ids=ids).compile()
        compile_s[name] = time.perf_counter() - started
        programs[name] = partial(compiled, tree, token_ids=ids)
        outputs[name] = np.asarray(programs[name]())
    largest = float(np.abs(outputs["plain"]).max())
    error = float(np.abs(outputs["off"] - outputs["plain"]).max()) / largest
    if not error <= TOLERANCE:
        raise ValueError(
            f"the two forwards must agree to {TOLERANCE} of the largest logit, they differ by "
            f"{error:.1e} at {rows} rows: a time would mean nothing"
        )
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats):
        # Alternating, and in both orders: load of the machine hits both forms alike.
        for name in sorted(programs, reverse=bool(turn % 2)):
            started, cpu = time.perf_counter(), time.process_time()
            programs[name]().block_until_ready()
            seconds[name].append(time.perf_counter() - started)
            cpu_seconds[name].append(time.process_time() - cpu)
    point: dict[str, Any] = {"rows": rows, "relative_error": error, "repeats": repeats}
    for name, times in seconds.items():
        point |= {
            f"{name}_median_ms": 1e3 * statistics.median(times),
            f"{name}_min_ms": 1e3 * min(times),
            f"{name}_cpu_min_ms": 1e3 * min(cpu_seconds[name]),
            f"{name}_compile_s": compile_s[name],
        }
    # Above 1: "off" is faster.
    for statistic in ("median", "min", "cpu_min"):
        ratio = point[f"plain_{statistic}_ms"] / point[f"off_{statistic}_ms"]
        point[f"speed_of_off_{statistic}"] = ratio
    return point


def main() -> None:
    """Prints one JSON line per preset and number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=("tiny_v41", "nano_like"), action="append")
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also append the lines to this file")
    options = parser.parse_args()
    environment = {
        "question": "off_vs_plain",
        "jax": version("jax"),
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "revision": revision(),
    }
    for preset in options.preset or ("tiny_v41", "nano_like"):
        if preset == "tiny_v41":
            model = load(TINY, numerics="float32", determinism="off")
            params, config = model.params, model.config
        else:
            params, config = random_model()
        for rows in options.rows or (16, 64, 512):
            point = measure(params, config, rows, options.repeats)
            line = json.dumps({**environment, "preset": preset, **point})
            print(line, flush=True)
            if options.json:
                with options.json.open("a") as out:
                    out.write(line + "\n")


def revision() -> str:
    """Returns the git revision of the checkout, with a plus if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
