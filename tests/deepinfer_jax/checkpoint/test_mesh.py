"""Loading straight into the shards of a mesh of fake devices gives the same values."""

import os
import subprocess
import sys

SCRIPT = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from deepinfer_jax.checkpoint.expand import expand_float32
from deepinfer_jax.checkpoint.loader import load_params
from deepinfer_jax.config.hf import read_config

mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)

def placement(spec, shape):
    fits = len(shape) >= 2 and shape[-2] % 2 == 0 and shape[-1] % 2 == 0
    axes = (None,) * (len(shape) - 2) + ("rows", "columns") if fits else ()
    return NamedSharding(mesh, P(*axes))

config = read_config(sys.argv[1])
one = load_params(sys.argv[1], config)
many = load_params(sys.argv[1], config, placement=placement)
pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))
assert len(many.layers.wo_a.sharding.device_set) == 4
assert many.layers.wo_a.addressable_shards[0].data.shape[-1] * 2 == many.layers.wo_a.shape[-1]
for a, b in pairs:
    assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), a.shape
wide = jax.tree.leaves(expand_float32(many))
for a, b in zip(jax.tree.leaves(expand_float32(one)), wide, strict=True):
    assert np.array_equal(a, b), a.shape
print("equal", len(pairs))
"""


def test_four_devices_hold_the_same_values(root, fixtures_dir):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, "-c", SCRIPT, str(fixtures_dir / "tiny_v41")]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal ")
