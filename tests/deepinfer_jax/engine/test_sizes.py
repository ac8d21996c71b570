"""Blocks of a cache with memory to spare: every sequence that has a slot can run."""

from dataclasses import replace

import pytest

from deepinfer_jax.cache.capacity import admissible
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import sizes
from tests.golden.network import tiny_config

pytestmark = pytest.mark.accept(5)
RUNTIME = RuntimeConfig(max_len=96, block_tokens=16)


@pytest.mark.parametrize("max_seqs", [1, 2, 33, 256])
@pytest.mark.parametrize(("depth", "drafts"), [(0, 0), (1, 0), (2, 5)])
def test_the_last_of_the_longest_sequences_is_admitted(monkeypatch, max_seqs, depth, drafts):
    monkeypatch.setattr(sizes, "CPU_CACHE_BYTES", 2**40)
    runtime = replace(RUNTIME, max_seqs=max_seqs, async_depth=depth)
    layout = sizes.engine_capacity(tiny_config(), runtime, drafts).layout
    others = max_seqs - 1
    fits = {"need": layout.max_blocks, "running": others, "block_tokens": 16}
    fits |= {"lookahead": (depth + 1) * (drafts + 1), "num_blocks": layout.num_blocks}
    free = layout.num_blocks - 1 - others * layout.max_blocks
    assert admissible(available=free, **fits)
    assert layout.num_blocks < 2 + 1.4 * max_seqs * layout.max_blocks
