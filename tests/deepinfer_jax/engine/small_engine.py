"""The engine's host side on `FakeDevice`, with blocks of 2 tokens so that 4 tokens meet borders."""

from collections.abc import Callable
from dataclasses import replace

from deepinfer_jax.cache.capacity import Capacity
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import engine as module
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.loading import Model
from deepinfer_jax.model.state import CacheLayout
from tests.deepinfer_jax.engine.fake_device import FakeDevice
from tests.golden.network import tiny_config, tiny_params

BLOCK = 2


def small_engines(
    monkeypatch, *, slots: int, blocks: int, max_len: int, drafts: int = 0, **options
) -> Callable[[], Engine]:
    """Returns a maker of engines with `slots` slots and `blocks` blocks of 2 tokens.

    drafts: of a round, verified in any number.
    """
    if drafts:
        options = {"draft_policy": "fixed", "draft_length": drafts, **options}
    runtime = RuntimeConfig(
        max_seqs=slots,
        max_len=max_len,
        max_tokens_per_step=16,
        check=True,
        drafting=drafts > 0,
        **options,
    )
    # Refused for a real network, whose compressed groups and index blocks need 16.
    object.__setattr__(runtime, "block_tokens", BLOCK)
    layout = CacheLayout(
        num_slots=slots + 1,
        num_blocks=blocks + 1,
        max_blocks=-(-max_len // BLOCK),
        block_tokens=BLOCK,
    )
    capacity = Capacity(layout=layout, block_bytes=1, slot_bytes=1, available_bytes=100)
    monkeypatch.setattr(module, "engine_device", FakeDevice)
    monkeypatch.setattr(module, "engine_capacity", lambda config, runtime, drafts: capacity)
    config = tiny_config()
    draft = replace(config.draft, dspark_block_size=drafts or 1)
    config = replace(config, draft=draft)
    model = Model(config=config, params=tiny_params(), tokenizer=None, source="fake")
    return lambda: Engine(model, runtime, clock=lambda: 0.0)
