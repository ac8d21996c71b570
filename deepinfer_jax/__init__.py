"""Functional JAX inference for DeepSeek-V4.1-Flash.

The names below are the public interface (architecture.md 4). They are resolved on first use, so
that importing the package imports no jax and initialises no backend.
"""

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_jax.async_llm import AsyncLLM
    from deepinfer_jax.chat.parse import ChatDelta
    from deepinfer_jax.chat.session import ChatOutput
    from deepinfer_jax.config.hf import config_from_hf, read_config
    from deepinfer_jax.config.model import ExecutionConfig, ModelConfig
    from deepinfer_jax.config.presets import PRESETS, preset
    from deepinfer_jax.config.runtime import RuntimeConfig
    from deepinfer_jax.determinism import determinism_report
    from deepinfer_jax.engine.engine import Engine
    from deepinfer_jax.engine.output import Completion, RequestOutput, ScoreOutput, StreamDelta
    from deepinfer_jax.errors import (
        CacheError,
        CapacityError,
        CheckpointError,
        ConfigError,
        DeepInferError,
        GrammarError,
        InputError,
        KernelSelectionError,
        TokenizerError,
    )
    from deepinfer_jax.grammar.spec import Grammar
    from deepinfer_jax.invariance.report import Report
    from deepinfer_jax.invariance.runner import verify_invariance
    from deepinfer_jax.llm import LLM
    from deepinfer_jax.loading import Model, load
    from deepinfer_jax.model.cached import (
        StepOutput,
        decode,
        init_state,
        make_plan,
        prefill,
        verify,
    )
    from deepinfer_jax.model.draft import DraftOutput
    from deepinfer_jax.model.forward import draft, hidden_states, score
    from deepinfer_jax.record.run_record import RunRecord, read_record
    from deepinfer_jax.sampling.params import SamplingParams

_NAMES = {
    "async_llm": ("AsyncLLM",),
    "chat.parse": ("ChatDelta",),
    "chat.session": ("ChatOutput",),
    "config.hf": ("config_from_hf", "read_config"),
    "config.model": ("ExecutionConfig", "ModelConfig"),
    "config.presets": ("PRESETS", "preset"),
    "config.runtime": ("RuntimeConfig",),
    "determinism": ("determinism_report",),
    "engine.engine": ("Engine",),
    "engine.output": ("Completion", "RequestOutput", "ScoreOutput", "StreamDelta"),
    "errors": (
        "CacheError",
        "CapacityError",
        "CheckpointError",
        "ConfigError",
        "DeepInferError",
        "GrammarError",
        "InputError",
        "KernelSelectionError",
        "TokenizerError",
    ),
    "grammar.spec": ("Grammar",),
    "invariance.report": ("Report",),
    "invariance.runner": ("verify_invariance",),
    "llm": ("LLM",),
    "loading": ("Model", "load"),
    "model.cached": ("StepOutput", "decode", "init_state", "make_plan", "prefill", "verify"),
    "model.draft": ("DraftOutput",),
    "model.forward": ("draft", "hidden_states", "score"),
    "record.run_record": ("RunRecord", "read_record"),
    "sampling.params": ("SamplingParams",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__version__ = _version("deepinfer-jax")
__all__ = [
    "LLM",
    "PRESETS",
    "AsyncLLM",
    "CacheError",
    "CapacityError",
    "ChatDelta",
    "ChatOutput",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DeepInferError",
    "DraftOutput",
    "Engine",
    "ExecutionConfig",
    "Grammar",
    "GrammarError",
    "InputError",
    "KernelSelectionError",
    "Model",
    "ModelConfig",
    "Report",
    "RequestOutput",
    "RunRecord",
    "RuntimeConfig",
    "SamplingParams",
    "ScoreOutput",
    "StepOutput",
    "StreamDelta",
    "TokenizerError",
    "config_from_hf",
    "decode",
    "determinism_report",
    "draft",
    "hidden_states",
    "init_state",
    "load",
    "make_plan",
    "prefill",
    "preset",
    "read_config",
    "read_record",
    "score",
    "verify",
    "verify_invariance",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'deepinfer_jax' has no attribute {name!r}")
    value = getattr(import_module(f"deepinfer_jax.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
