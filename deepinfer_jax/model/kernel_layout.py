"""Weights in the layouts that chosen kernels read: rearranged once, at load, with equal values."""

from dataclasses import replace
from typing import Any

from deepinfer_jax.config.model import ExecutionConfig
from deepinfer_jax.model.params import ExpertParams, LayerParams
from pallas_kernels.grouped_matmul.api import prepare_experts


def for_kernels(params: Any, execution: ExecutionConfig) -> Any:
    """Returns the parameters as the implementations of an execution config want them.

    Only `grouped_matmul` has a layout of its own, for the MXFP4 experts of all layers and stages.
    Both layouts are in memory while one is made from the other. Traceable.

    Args:
        params: Parameters of the network as loaded or abstract.
        execution: Its `kernels` decide.
    """
    if execution.kernel("grouped_matmul") == "xla":
        return params
    params = replace(params, layers=_prepared(params.layers))
    if params.draft is None:
        return params
    return replace(params, draft=replace(params.draft, stages=_prepared(params.draft.stages)))


def _prepared(layers: LayerParams) -> LayerParams:
    stored = layers.experts
    w1, w3, w2 = prepare_experts(stored.w1, stored.w3, stored.w2)
    return replace(layers, experts=ExpertParams(w1=w1, w3=w3, w2=w2))
