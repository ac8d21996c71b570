"""`AsyncLLM`: one engine for many coroutines."""

from deepinfer_jax.async_llm.llm import AsyncLLM

__all__ = ["AsyncLLM"]
