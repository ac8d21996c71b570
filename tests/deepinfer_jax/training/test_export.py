"""nano's config within its budget, and a checkpoint that holds what the forward pass used."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as di
from deepinfer_jax.checkpoint.inventory import tensor_inventory
from deepinfer_jax.config.hf import config_from_hf, config_to_hf
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.step import logits
from deepinfer_jax.training.config import nano_config
from deepinfer_jax.training.export import export_checkpoint
from deepinfer_jax.training.forward import training_forward
from deepinfer_jax.training.losses import LossSettings, total_loss
from deepinfer_jax.training.quantise import quantised_params
from tests.deepinfer_jax.training.tiny_training import every_role_config, parameters, random_ids
from tests.golden.network import TINY


def test_nano_has_every_role_within_14_megabytes():
    config = nano_config()
    assert config_from_hf(config_to_hf(config)) == config
    roles = layer_roles(config)
    assert {role.mode for role in roles} == {"window", "full", "reuse", "reindex"}
    assert any(role.uses_candidates for role in roles)
    assert sum(role.has_engram for role in roles) == 2
    assert config.draft is not None
    tensors = tensor_inventory(config).values()
    # What else is stored: a header line a tensor (105 bytes on average), the index (75).
    assert sum(t.nbytes for t in tensors) + 180 * len(tensors) < 14_000_000


def test_exported_checkpoint_is_what_the_forward_pass_used(tmp_path):
    config = every_role_config()
    params = parameters(config)
    bias = params.layers.gate_bias + 0.25
    params = params.replace(layers=params.layers.replace(gate_bias=bias))
    used = jax.jit(quantised_params, static_argnums=1)(params, config)
    folder = export_checkpoint(
        params, config, tmp_path / "out", tokenizer_from=TINY, shard_bytes=200_000
    )
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = di.load(folder, numerics="float32", determinism="off")
    assert (model.params.layers.gate_bias_vl == bias).all()
    used = used.replace(layers=used.layers.replace(gate_bias_vl=bias))
    assert jax.tree.structure(used) == jax.tree.structure(model.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(used):
        loaded = jax.tree_util.tree_leaves_with_path(model.params)
        other = dict(loaded)[path]
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes(), path
    ids = random_ids(config, (2, 40))

    @jax.jit
    def forward(params, ids):
        hidden, _ = training_forward(params, config, ids)
        return logits(params, config, hidden.reshape(-1, config.hidden_size))

    found = forward(used, ids).reshape(2, 40, -1)
    for row in range(2):
        expected = di.score(model.params, model.config, ids[row])
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=1e-5)


@pytest.mark.accept(4)
@pytest.mark.slow
def test_rounded_training_sees_what_checkpoint_arithmetic_computes(tmp_path):
    config = every_role_config()
    params = parameters(config)
    folder = export_checkpoint(params, config, tmp_path / "out", tokenizer_from=TINY)
    model = di.load(folder, determinism="off")
    ids = random_ids(config, (1, 40))
    used = jax.jit(quantised_params, static_argnums=1)(params, config)

    @partial(jax.jit, static_argnums=1)
    def first_layer(params, rounded):
        _, seen = training_forward(params, config, ids, rounded=rounded, collect=("x_out",))
        return seen["x_out"][0, 0]

    expected = np.asarray(di.hidden_states(model.params, model.config, ids[0])[0])
    error = {r: np.linalg.norm(first_layer(used, r) - expected) for r in (False, True)}
    # Sums of another order land on other sides of rounding points now and then; behind the first
    # selection of a random network that shows.
    assert error[True] < 0.15 * error[False]

    def loss(params):
        settings = LossSettings(rounded=True)
        return total_loss(params, config, ids, jnp.ones(ids.shape), settings)[0]

    slopes = jax.jit(jax.grad(loss))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(slopes.layers):
        is_moved = "bias" not in jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), path
        assert (np.abs(leaf).max() > 0) == is_moved, path


def test_parameters_that_are_not_finite_are_refused(tmp_path):
    config = every_role_config()
    params = parameters(config)
    broken = params.replace(norm=params.norm.at[3].set(jnp.nan))
    with pytest.raises(CheckpointError, match=r"finite.*norm\.weight"):
        export_checkpoint(broken, config, tmp_path)
