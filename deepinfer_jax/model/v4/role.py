"""Layer roles of DeepSeek-V4 as data, so that the network can scan over its layers (model.md
10.2).
"""

import jax.numpy as jnp
from flax import struct

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import LayerRole, layer_roles, source_layers, source_ratios
from deepinfer_jax.model.params import Leaf


@struct.dataclass
class V4Role:
    """Layer roles as int32 scalars, or arrays [layers] before the scan. -1 means none.

    group: ratio of the layer as index into `source_ratios`; -1 for window layers. source: its place
    in that group's stacks, at ratio 4 also among the indexers. hashed, scored: its place in the
    token-id table or among the router biases; exactly one of them is not -1.
    """

    layer: Leaf
    group: Leaf
    source: Leaf
    yarn: Leaf
    hashed: Leaf
    scored: Leaf


def v4_role_table(config: ModelConfig) -> V4Role:
    """Returns the roles of all layers as arrays [layers]."""
    entries = [_entry(config, role) for role in layer_roles(config)]
    return V4Role(
        **{name: jnp.asarray([e[name] for e in entries], jnp.int32) for name in entries[0]}
    )


def _entry(config: ModelConfig, role: LayerRole) -> dict[str, int]:
    ratios = source_ratios(config)
    owns = role.ratio in ratios
    hashed = config.moe.num_hash_layers  # the first layers of the network
    return {
        "layer": role.layer,
        "group": ratios.index(role.ratio) if owns else -1,
        "source": source_layers(config, role.ratio).index(role.layer) if owns else 0,
        "yarn": int(role.uses_yarn),
        "hashed": role.layer if role.hash_routed else -1,
        "scored": -1 if role.hash_routed else role.layer - hashed,
    }
