"""Golden file compressor_indexer: latents, rows, keys, scores, top-k, candidate blocks, ties."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model import rows
from deepinfer_jax.model.attention import compress, indexer
from deepinfer_jax.model.rope import rope_frequencies, rope_tables
from pallas_kernels import core
from tests.golden import compare
from tests.golden.ledger import Fixture, Suite
from tests.golden.network import NUMERICS, Weights, ops, tiny_config
from tests.golden.sublayer import Sublayer, sublayer_weights

RATIO = {"L2": 2, "L6": 1}


def check_layer(fixture: Fixture, kind: str, count: int, numerics: str) -> None:
    """Every stage from `v` and the query latent to the selection; f32 or bf16, sets for top-k."""
    mode, ratio, name = NUMERICS[numerics], RATIO[kind], f"{kind}.n{count}"
    config, prims = tiny_config(mode), ops(mode)
    weights = Weights(fixture, f"{kind}.w", mode)
    compressor, query_side = weights.compressor(), weights.indexer()
    closed, length = count // ratio, jnp.asarray((np.arange(count) + 1) // ratio)

    def run(v, latent_q):
        frequency = rope_frequencies(config.attention)[1]
        first = jnp.arange(closed) * ratio
        if ratio == 1:
            latent = compress.single(prims, config, compressor, v)
        else:
            tail = compress.project(prims, compressor, v)[: closed * ratio]
            latent = compress.pool(
                prims, config, compressor, tail.reshape(closed, ratio, *tail.shape[1:])
            )
        row, key = compress.publish(prims, config, compressor, latent, first, frequency)
        row = rows.decode_main(config, rows.encode_main(config, row))
        key = rows.decode_index(config, *rows.encode_index(config, key))
        rope = rope_tables(jnp.arange(count), frequency)
        query = indexer.index_query(prims, config, query_side, latent_q, rope)
        weight = indexer.head_weights(prims, query_side, v)
        keys = jnp.broadcast_to(key, (count, *key.shape))
        score = indexer.score_block(prims, config, query, weight, keys)
        score = jnp.where(jnp.arange(closed) < length[:, None], score, -jnp.inf)
        topk = indexer.select(config, score, length)
        blocks = indexer.candidate_mask(config, score, length)
        mask = indexer.candidate_positions(config, blocks, closed)
        return {
            "latent": latent,
            "compressed_row": row,
            "index_key": key,
            "index_query": query,
            "head_weight": weight,
            "score": score,
            "topk": topk,
            "candidate_mask": mask,
        }

    got = jax.jit(run)(fixture.value(f"{name}.v"), fixture.value(f"{name}.ql"))
    check = compare.relative if numerics == "f32" else compare.rounded
    for key in ("latent", "compressed_row", "index_key", "index_query", "head_weight", "score"):
        check(f"{name}.{numerics}.{key}", got[key], fixture.take(f"{name}.{numerics}.{key}"))
    _check_selection(fixture, f"{name}.{numerics}", got, numerics)


def _check_selection(fixture: Fixture, name: str, got: dict, numerics: str) -> None:
    """Top-k lists ascend, then -1; sets may differ only where scores cannot tell."""
    score = np.asarray(got["score"])
    largest = float(np.abs(score[np.isfinite(score)]).max()) if np.isfinite(score).any() else 0.0
    tolerance = {"f32": 1e-5, "bf16": 0.05}[numerics] * largest
    topk, want = np.asarray(got["topk"]), fixture.take(f"{name}.topk")
    compare.close_sets(f"{name}.topk", topk, want, score, tolerance)
    for row in topk:
        chosen = np.sort(row[row >= 0])
        ordered = np.pad(chosen, (0, len(row) - len(chosen)), constant_values=-1)
        compare.exact(f"{name}.topk order", row, ordered)
    key = f"{name}.candidate_mask"
    if key in fixture.arrays:
        compare.exact(key, got["candidate_mask"].astype(jnp.uint8), fixture.take(key))


def check_single_token(fixture: Fixture) -> None:
    """One token closes no group of ratio 2: nothing is visible to it."""
    fixture.input("L2.n1.v"), fixture.input("L2.n1.ql")
    got = indexer.select(tiny_config(), jnp.zeros((1, 4)), jnp.asarray([1 // 2]))
    compare.exact("L2.n1.topk", got, np.full((1, 6), -1))


def check_decode(fixture: Fixture) -> None:
    """Token by token, a compressed row appears exactly where the reference emits one."""
    weights = sublayer_weights(Weights(fixture, "L2.w", "float32"))
    run = Sublayer("float32", tokens=8)
    state, emitted = run.state(), []
    for position, row in enumerate(fixture.value("L2.n7.v")):
        before = np.asarray(state.main[0])
        state, _ = run.rows(weights, 2, state, row[None], position)
        if (np.asarray(state.main[0]) != before).any():
            emitted.append(position)
    compare.exact("L2.n7.decode_emits_at", emitted, fixture.take("L2.n7.decode_emits_at"))


def check_unused_weights(fixture: Fixture) -> None:
    """The file repeats the attention weights of its layers; nothing here multiplies by them."""
    for kind in RATIO:
        Weights(fixture, f"{kind}.w", "checkpoint").attention()


def candidate_config(block_size: int, blocks: int) -> ModelConfig:
    """Returns tiny_v41 with another candidate geometry."""
    config = tiny_config()
    return replace(
        config,
        indexer=replace(
            config.indexer, candidate_block_size=block_size, candidate_topk_blocks=blocks
        ),
    )


def check_candidates(fixture: Fixture, name: str) -> None:
    """Block selection alone; exact."""
    config = candidate_config(
        int(fixture.input(f"{name}.block_size")), int(fixture.input(f"{name}.topk_blocks"))
    )
    score, length = fixture.input(f"{name}.score"), fixture.input(f"{name}.len").astype(np.int32)
    size = score.shape[1]

    def run(score, length):
        mask = indexer.candidate_mask(config, score, length)
        return indexer.candidate_positions(config, mask, size)

    got = np.asarray(jax.jit(run)(jnp.asarray(score), jnp.asarray(length)))
    compare.exact(f"{name}.mask", got.astype(np.uint8), fixture.take(f"{name}.mask"))


def check_ties(fixture: Fixture) -> None:
    """Score descending, then index ascending; exact."""
    score = jnp.asarray(fixture.input("ties.score"))
    want = fixture.take("ties.top4_lowest_index_first")
    compare.exact("ties", np.sort(core.top_k(score, 4)[1], axis=1), want)
    config = tiny_config()
    config = replace(config, indexer=replace(config.indexer, index_topk=4))
    got = indexer.select(config, score, jnp.full((score.shape[0],), score.shape[1]))
    compare.exact("ties ascending", got, want)


def _layer(kind: str, count: int, numerics: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_layer(fixture, kind, count, numerics)


def _candidates(name: str) -> Callable[[Fixture], None]:
    return lambda fixture: check_candidates(fixture, name)


CASES = (
    {
        f"{kind} n{count} {numerics}": _layer(kind, count, numerics)
        for kind in RATIO
        for count in (1, 2, 7, 40)
        for numerics in NUMERICS
        if (kind, count) != ("L2", 1)
    }
    | {f"cand.{name}": _candidates(f"cand.{name}") for name in "abcd"}
    | {"ties": check_ties, "L2 n1": check_single_token, "weights": check_unused_weights}
    | {"L2 decode": check_decode}
)
SUITE = Suite("modules/compressor_indexer", CASES)
pytestmark = pytest.mark.accept(2)


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    SUITE.run(case)


def test_every_key_is_compared_once_or_left_to_a_named_issue(record_property):
    SUITE.report(record_property)
