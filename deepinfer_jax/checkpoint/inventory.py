"""Every tensor that a config implies, and what they add up to (model.md 1.7, 2.5)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import param_specs
from deepinfer_jax.model.params_v4 import param_specs_v4, stored_draft_specs
from deepinfer_jax.model.spec import ParamSpec, TensorSpec

#: Name under which the elements of a stored dtype are published.
_PUBLISHED = {"I8": "FP4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSummary:
    """Totals of an inventory. Elements are logical (two per FP4 byte) and exclude scales."""

    elements: int
    elements_by_dtype: dict[str, int]
    scale_elements: int
    tensors: int
    tensors_by_dtype: dict[str, int]
    nbytes: int


def spec_tree(config: ModelConfig) -> Any:
    """Returns the spec tree of the parameters that are loaded."""
    return param_specs_v4(config) if config.model_type == "deepseek_v4" else param_specs(config)


def spec_leaves(tree: Any) -> list[ParamSpec]:
    """Returns the leaves of a spec tree in the order of the parameter tree."""
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def tensor_inventory(
    config: ModelConfig, *, with_stored_draft: bool = True
) -> dict[str, TensorSpec]:
    """Returns every tensor of a checkpoint by name; V4 draft tensors, never loaded, included."""
    specs = spec_leaves(spec_tree(config))
    if with_stored_draft:
        specs.extend(stored_draft_specs(config))
    return {tensor.name: tensor for spec in specs for tensor in spec.tensors()}


def count_summary(inventory: Mapping[str, TensorSpec] | Iterable[TensorSpec]) -> CountSummary:
    """Returns the totals of an inventory, or of a part of one."""
    tensors = list(inventory.values() if isinstance(inventory, Mapping) else inventory)
    elements: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    scales = 0
    for tensor in tensors:
        counts[tensor.dtype] += 1
        if tensor.is_scale:
            scales += tensor.elements
        else:
            elements[_PUBLISHED.get(tensor.dtype, tensor.dtype)] += tensor.elements
    return CountSummary(
        elements=sum(elements.values()),
        elements_by_dtype=dict(sorted(elements.items())),
        scale_elements=scales,
        tensors=len(tensors),
        tensors_by_dtype=dict(sorted(counts.items())),
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )
