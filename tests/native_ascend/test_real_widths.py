"""Two layers of DeepSeek-V4.1 at the released widths, every gate of the double on (27a)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.backends import AscendModel
from deepinfer_jax.checkpoint.abstract import abstract_params
from deepinfer_jax.config.presets import preset
from deepinfer_jax.engine.ascend_inputs import engram_ids_of, rotation_of

pytestmark = [pytest.mark.slow, pytest.mark.accept(13)]
IDS = [3, 5, 7]


def narrowed(layers: int):
    """The released config with 2 (or 1) layers, 8 experts, a small vocabulary, FP4 rows off."""
    full = preset("deepseek-v4.1-flash")
    return replace(
        full,
        vocab_size=256,
        num_hidden_layers=layers,
        attention=replace(
            full.attention,
            compress_ratios=(2, 1)[:layers],
            kv_source_layer_ids=(0, 1)[:layers],
            use_fp4_sparse_kv=False,
            index_source_layer_ids=(0, 1)[:layers],
        ),
        indexer=replace(full.indexer, candidate_source_layer_id=None),
        moe=replace(full.moe, n_routed_experts=8),
        engram=None,
        draft=None,
        vision=None,
        execution=replace(full.execution, numerics="checkpoint"),
    )


def random_params(config):
    """Weights of the checkpoint's formats whose products keep the size of what they multiply."""
    rng = np.random.default_rng(11)

    def leaf(path, spec):
        name = jax.tree_util.keystr(path)
        if name.endswith(".scale") and spec.dtype == jnp.uint8:
            width = 5120
            return jnp.full(spec.shape, 127 - int(np.log2(width) / 2), jnp.uint8)
        if spec.dtype == jnp.uint8:
            return jnp.asarray(rng.integers(0, 256, spec.shape, np.uint8))
        if "norm" in name:
            return jnp.ones(spec.shape, spec.dtype)
        scale = 0.02 if spec.dtype != jnp.float8_e4m3fn and len(spec.shape) > 1 else 1.0
        values = rng.standard_normal(spec.shape, np.float32) * (1.0 if "embed" in name else scale)
        return jnp.asarray(values).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(config))


# one layer, then both: a difference is then that of the layer that was added
@pytest.mark.parametrize("layers", [1, 2])
def test_logits_of_real_widths(double, layers):
    config = narrowed(layers)
    params = random_params(config)
    expected = np.asarray(di.score(params, config, IDS))[-1]
    model = AscendModel(
        config,
        params,
        rotation=rotation_of(config),
        engram_ids=engram_ids_of(config, params),
        max_len=16,
        chunk=2,
    )
    found = model.extend(0, IDS)
    model.close()
    assert float(np.abs(expected).max()) > 0.1
    assert float(np.abs(found - expected).max()) < 0.03 * float(np.abs(expected).max())
    assert int(found.argmax()) == int(expected.argmax())
