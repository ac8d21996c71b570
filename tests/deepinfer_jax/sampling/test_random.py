"""The generator of engine.md 5.3: known answers, transforms, independence of counters."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import random

MASK = 2**32 - 1
KNOWN = {
    "zeros": ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    "ones": ((MASK, MASK), (MASK, MASK), (0x1CB996FC, 0xBB002BE7)),
    "pi": ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    "child": ((0, 7), (1, 0x40000000), (0xC01E3214, 0x4DD8D1CD)),
    "anchor": ((0, 7), (0x25, 0x40000001), (0x3A17EC66, 0x2AF3D27B)),
}
# seed, index, purpose, lane, words, bits of v, E in float64 of the unrounded v
DRAWS = [
    (
        7,
        37,
        random.TARGET,
        64399,
        (0x5117A9EB, 0x93296637),
        (0x3EA22F54, 0x3F132966),
        (0.3809198188059519, 0.8553142965335452),
    ),
    (
        0x0123456789ABCDEF,
        1048575,
        random.RESIDUAL,
        64639,
        (0x40C80513, 0x9166FC83),
        (0x3E81900A, 0x3F1166FD),
        (0.291759788882944, 0.8392780658485959),
    ),
    (
        2**64 - 1,
        40,
        random.ACCEPT,
        3,
        (0xED1AF775, 0xE8AF96CB),
        (0x3F6D1AF7, 0x3F68AF97),
        (2.606298018632064, 2.396118889302776),
    ),
]


def u32(*values):
    return jnp.asarray(values, jnp.uint32)


def reference(key, count):
    """Threefry-2x32-20 in Python integers."""
    k = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x0, x1 = (count[0] + k[0]) & MASK, (count[1] + k[1]) & MASK
    for r in range(20):
        rotation = (13, 15, 26, 6, 17, 29, 16, 24)[r % 8]
        x0 = (x0 + x1) & MASK
        x1 = (x1 << rotation | x1 >> (32 - rotation)) & MASK
        x1 ^= x0
        if r % 4 == 3:
            s = r // 4 + 1
            x0, x1 = (x0 + k[s % 3]) & MASK, (x1 + k[(s + 1) % 3] + s) & MASK
    return x0, x1


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_known_answers(name, wrap):
    key, count, want = KNOWN[name]
    y0, y1 = wrap(random.threefry)(u32(*key), u32(count[0])[0], u32(count[1])[0])
    assert (int(y0), int(y1)) == want == reference(key, count)


def test_many_counters_against_python_integers():
    rng = np.random.default_rng(5)
    words = rng.integers(0, 2**32, (300, 4), dtype=np.uint32)
    y0, y1 = random.threefry(*map(jnp.asarray, (words[:, :2], words[:, 2], words[:, 3])))
    for row, got in zip(words.tolist(), zip(y0.tolist(), y1.tolist(), strict=True), strict=True):
        assert reference(row[:2], row[2:]) == got


@pytest.mark.parametrize("draw", DRAWS, ids=["target", "residual", "coin"])
def test_known_draws(draw):
    seed, index, purpose, lane, words, bits, exponential = draw
    key = jnp.asarray(random.seed_key(seed))[None]
    y0, y1 = random.random_words(key, jnp.asarray([index]), u32(lane)[None], purpose)
    assert (int(y0[0, 0]), int(y1[0, 0])) == words
    unit = random.unit_interval(jnp.concatenate([y0, y1], axis=1))
    assert np.asarray(unit).view(np.uint32)[0].tolist() == list(bits)
    np.testing.assert_allclose(random.exponential(unit)[0], exponential, rtol=1e-6, atol=0)


def test_noise_and_coins_use_those_draws():
    for seed, index, purpose, lane, _, _, exponential in DRAWS[:2]:
        key = jnp.asarray(random.seed_key(seed))[None]
        noise = random.token_noise(key, jnp.asarray([index]), 129280, purpose)
        got = np.exp(np.asarray(noise, np.float64)[0, 2 * lane : 2 * lane + 2])
        np.testing.assert_allclose(got, exponential, rtol=1e-6, atol=0)
    seed, index, _, lane, _, bits, _ = DRAWS[2]
    key = jnp.asarray(random.seed_key(seed))[None]
    coin = random.coins(key, jnp.asarray([[index]]), jnp.asarray([[lane]]))
    assert np.asarray(coin).view(np.uint32).item() == bits[0]


def test_derived_keys():
    key = jnp.asarray(random.seed_key(7))[None].repeat(3, axis=0)
    children = random.child_key(key, jnp.asarray([0, 1, 2]))
    assert children[0].tolist() == [0, 7]
    for child in (0, 1, 2):
        seed = random.child_seed(7, child)
        assert children[child].tolist() == random.seed_key(seed).tolist()
    assert random.child_seed(7, 1) == 0xC01E3214 << 32 | 0x4DD8D1CD
    anchors = random.anchor_key(key[:2], jnp.asarray([37, 38]))
    assert anchors[0].tolist() == list(KNOWN["anchor"][2])
    assert anchors[1].tolist() == list(reference((0, 7), (38, 0x40000001)))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_raises(seed):
    with pytest.raises(ValueError, match="2\\^64"):
        random.seed_key(seed)


def test_fresh_seeds_are_64_bits():
    seeds = {random.fresh_seed() for _ in range(64)}
    assert len(seeds) == 64
    assert all(0 <= s < 2**64 for s in seeds)
    assert max(seeds) >= 2**60


def test_unit_interval_is_correctly_rounded_and_below_one():
    rng = np.random.default_rng(1)
    ends = np.arange(1024, dtype=np.uint32)
    words = np.concatenate([ends, ~ends, rng.integers(0, 2**32, 50_000, dtype=np.uint32)])
    want = np.minimum(((words + 0.5) * 2**-32).astype(np.float32), np.float32(1 - 2**-24))
    unit = np.asarray(jax.jit(random.unit_interval)(words))
    assert (unit.view(np.uint32) == want.view(np.uint32)).all()
    assert unit.min() > 0
    assert unit.max() < 1
    exponential = np.asarray(random.exponential(jnp.asarray(unit)[None]))[0]
    exact = -np.log1p(-unit.astype(np.float64))
    np.testing.assert_allclose(exponential, exact, rtol=1e-6, atol=0)
    assert np.isfinite(exponential).all()
    assert exponential.min() > 0


def test_counters_of_different_purposes_never_meet():
    purposes = (
        random.TARGET,
        random.ACCEPT,
        random.RESIDUAL,
        random.DRAFT,
        random.DERIVE,
        random.USER,
    )
    assert sorted(purposes) == list(range(6))
    ends = [(p * random.MAX_LANE, (p + 1) * random.MAX_LANE - 1) for p in purposes]
    assert all(a[1] < b[0] for a, b in pairwise(ends))
    assert ends[-1][1] < 2**32
    key = u32(0, 1)[None]
    words = [random.random_words(key, jnp.asarray([9]), u32(0, 1, 2)[None], p) for p in purposes]
    values = np.concatenate([np.asarray(w).ravel() for w in words])
    assert len(set(values.tolist())) == values.size


def test_noise_of_an_id_does_not_depend_on_the_vocabulary():
    key = u32(3, 4)[None]
    index = jnp.asarray([11])
    want = np.asarray(random.token_noise(key, index, 1000))
    for size in (1, 2, 7, 255, 256, 257, 999):
        got = np.asarray(random.token_noise(key, index, size))
        assert got.shape == (1, size)
        assert (got.view(np.uint32) == want[:, :size].view(np.uint32)).all(), size
