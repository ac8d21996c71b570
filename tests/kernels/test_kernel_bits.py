"""benchmarks.kernel_bits: what it compares, on functions whose answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernel_bits


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(kernel_bits, "BATCH", 64)
    monkeypatch.setattr(kernel_bits, "COUNTS", (1, 3, 8, 64))


def case(run, group=1):
    rows = jax.random.normal(jax.random.key(0), (64, 5))
    return kernel_bits.Case("toy", (rows,), run, (jnp.float32(3),), group)


def test_rows_alone_are_compared_with_all_together():
    record, whole = kernel_bits.judge(case(lambda x, scale: x * scale), None)
    assert record["counts"] == [1, 3, 8, 64]
    assert record["compared"] == 3 * (1 + 3 + 8 + 64)
    assert record["differing"] == 0
    assert record["control_noticed"]
    assert whole.shape == (64, 5)


def test_rows_that_see_each_other_are_found():
    record, _ = kernel_bits.judge(case(lambda x, scale: x + scale * x.sum()), None)
    assert record["differing"] > 0


def test_a_kernel_that_reads_nothing_fails_the_control():
    record, _ = kernel_bits.judge(case(lambda x, scale: jnp.zeros_like(x) * scale), None)
    assert not record["control_noticed"]


def test_another_form_is_compared_with_the_first():
    _, whole = kernel_bits.judge(case(lambda x, scale: x * scale), None)
    record, _ = kernel_bits.judge(case(lambda x, scale: x * (scale + 1)), None, whole)
    assert record["differing"] == record["compared"]


@pytest.mark.parametrize("group", [3, 8])
def test_groups_are_neighbours_of_one_sequence(group):
    chosen = kernel_bits.selections(group)
    assert {len(rows) for rows in chosen} == ({3} if group == 3 else {8, 64})
    for rows in chosen:
        tiles = rows.reshape(-1, group)
        assert (np.diff(tiles, axis=1) == 1).all()
        assert (tiles // kernel_bits.SHARING == tiles[:, :1] // kernel_bits.SHARING).all()
