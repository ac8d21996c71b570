"""The one module that reaches `native_ascend`: from a config and parameters to a device session.

`native_ascend` knows sizes, arrays and CANN; this module knows names and layouts of this package.
Its errors are `DeepInferError` as well. `load(kernels="ascend")` asks here whether it can be had,
`engine.ascend_device` runs an `AscendModel`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import index_layers, layer_roles, source_layers, source_ratios
from deepinfer_jax.errors import ConfigError, DeepInferError, KernelSelectionError
from pallas_kernels import core

if TYPE_CHECKING:
    from native_ascend.network import Network
    from native_ascend.weights import Prepared

Params = Any  # deepinfer_jax.model.params.Params, which comes later in the import order


@cache
def _both(kind: type) -> type:
    """Returns an error type of the bridge that is a `DeepInferError` too."""
    return type(kind.__name__, (kind, DeepInferError), {"__doc__": kind.__doc__})


@contextmanager
def ascend_errors() -> Iterator[None]:
    """Raises the bridge's errors as subclasses that are `DeepInferError` too."""
    from native_ascend import AscendError

    try:
        yield
    except AscendError as error:
        raise _both(type(error))(
            str(error),
            code=error.code,
            call=error.call,
            status=error.status,
            op=error.op,
            device=error.device,
            is_double=error.is_double,
        ) from error


def ascend_name() -> str:
    """Returns chip and version of the loaded runtime; a software double says that it is one."""
    from native_ascend import current

    with ascend_errors():
        return repr(current())


def ascend_report() -> dict[str, str]:
    """Returns what there is of Ascend here, for `deepinfer-jax env`; loads nothing."""
    import native_ascend

    return {"status": native_ascend.STATUS} | native_ascend.diagnostics()


def names_ascend(kernels: str | Mapping[str, str] | None) -> bool:
    """Says whether `load(kernels=...)` asks for Ascend: "ascend", or {"network": "ascend"}.

    Raises:
        KernelSelectionError: a mapping that names it for single operations, or others beside it.
            The bridge's operators on host arrays are no kernels of those: each call would move its
            weights to the device again, in layouts that the parameters do not have.
    """
    if not isinstance(kernels, Mapping):
        return kernels == "ascend"
    named = [op for op, value in kernels.items() if value == "ascend"]
    if named and dict(kernels) != {"network": "ascend"}:
        raise KernelSelectionError(
            named[0],
            "ascend",
            "an Ascend device runs the whole network of a step in one call, not single operations",
            repr(dict(kernels)),
            'use kernels="ascend" or {"network": "ascend"} alone',
        )
    return bool(named)


def require_ascend(config: ModelConfig, *, mesh: Any, engram: str) -> None:
    """Checks that a model can run on an Ascend device here; loads CANN unless it is loaded.

    Args:
        config: of the model; `execution.numerics` is the one asked for.
        mesh: as given to `load`.
        engram: as given to `load`.

    Raises:
        ConfigError: another model type or arithmetic, a mesh, Engram tables off the device, or JAX
            on another platform than the CPU, which the custom calls belong to.
        DeepInferError: also an `AscendUnavailable` (no bridge, no CANN, no device),
            `AscendUnsupported` (no operator expresses a step of the model) or `AscendUnverified`.
    """
    with ascend_errors():
        from native_ascend import runtime
        from native_ascend.operators import STEPS

        if not runtime.is_loaded():
            runtime.load()
        _require_form(config)
        require_length(config, 1)
        runtime.current().require({name for step in STEPS for name in step.operators})
    import jax

    for rule, is_kept, received in (
        ("takes one device: leave mesh out", mesh is None, f"mesh={mesh!r}"),
        ('keeps Engram tables on the device: engram="device"', engram == "device", repr(engram)),
        (
            "is called from programs on the CPU: set JAX_PLATFORMS=cpu",
            jax.default_backend() == "cpu",
            repr(jax.default_backend()),
        ),
        ("is for one process", jax.process_count() == 1, f"{jax.process_count()} processes"),
    ):
        if not is_kept:
            raise ConfigError(f'kernels="ascend" {rule}; received {received}')


def _require_form(config: ModelConfig) -> None:
    if config.model_type != "deepseek_v41" or config.execution.numerics != "checkpoint":
        raise ConfigError(
            'kernels="ascend" runs deepseek_v41 with numerics="checkpoint", received '
            f"{config.model_type} with {config.execution.numerics!r}"
        )


class AscendModel:
    """A model on an Ascend device: several sequences, one custom call a step of one of them."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        rotation: Callable[[np.ndarray, bool], tuple[np.ndarray, np.ndarray]],
        engram_ids: Callable[[np.ndarray, int], tuple[np.ndarray, ...]],
        max_len: int,
        sequences: int = 1,
        chunk: int = 8,
        device: int = 0,
    ) -> None:
        """Uploads the weights to the runtime that `require_ascend` or the caller loaded.

        Args:
            config: of a V4.1 model in checkpoint arithmetic with `use_fp4_sparse_kv=false`.
            params: as loaded, quantised.
            rotation: positions int32 [t] and whether YaRN -> cos and sin, float32 [t, r / 2].
            engram_ids: all token ids and the first wanted position -> Engram rows of every layer.
            max_len: tokens of a sequence.
            sequences: that are held at once, each with a cache of `max_len` tokens.
            chunk: rows of a prefill step.
            device: number of the device.

        Raises:
            ConfigError: another model type or arithmetic.
            DeepInferError: also an `AscendError`: unavailable, unsupported or unverified.
        """
        _require_form(config)
        self.chunk = chunk
        with ascend_errors():
            from native_ascend.session import Session

            self._session = Session(
                ascend_network(config),
                ascend_weights(config, params),
                engram_ids,
                rotation,
                max_len=max_len,
                sequences=sequences,
                chunk=chunk,
                device=device,
            )

    def length(self, sequence: int) -> int:
        """Returns the tokens of a sequence whose rows are on the device."""
        return len(self._session.tokens[sequence])

    def extend(self, sequence: int, token_ids: Sequence[int]) -> np.ndarray:
        """Returns float32 logits [v] behind `token_ids`, which follow all earlier ones."""
        with ascend_errors():
            return self._session.extend(token_ids, sequence)

    def begin(self, sequence: int, length: int = 0) -> None:
        """Begins a sequence anew, or after its first `length` tokens; few can be taken back."""
        with ascend_errors():
            if length:
                self._session.shorten(length, sequence)
            else:
                self._session.restart(sequence)

    def copy(self, source: int, target: int) -> None:
        """Makes a sequence equal to another."""
        with ascend_errors():
            self._session.copy(source, target)

    def close(self) -> None:
        """Frees what the model holds on the device."""
        with ascend_errors():
            self._session.close()


def require_length(config: ModelConfig, max_len: int) -> None:
    """Checks that operators express sequences of `max_len` tokens of a model.

    Raises:
        DeepInferError: also an `AscendUnsupported`.
    """
    with ascend_errors():
        ascend_network(config).require_supported(max_len)


def ascend_config(config: ModelConfig) -> ModelConfig:
    """Returns a config as the bridge runs it: text alone, no drafts, no longer than it reaches.

    Beyond, later index layers are restricted to candidate blocks, which no operator expresses.
    """
    longest = config.max_position_embeddings
    longest = min(longest, ascend_network(config).candidate_rows or longest)
    return replace(config, draft=None, vision=None, max_position_embeddings=longest)


def ascend_network(config: ModelConfig) -> "Network":
    """Returns the sizes and roles of a config as the bridge takes them."""
    from native_ascend.network import Layer, Network

    attention, index, moe, mhc = config.attention, config.indexer, config.moe, config.mhc
    engram = config.engram
    places = engram.engram_layer_ids if engram else ()
    source, rows = index.candidate_source_layer_id, None
    if source is not None:
        ratio = attention.compress_ratios[source]
        rows = index.candidate_topk_blocks * index.candidate_block_size * ratio
    return Network(
        layers=tuple(
            Layer(
                ratio=role.ratio,
                source=-1 if role.kv_source is None else role.kv_source,
                owner=role.kv_source == role.layer,
                index=role.topk_source == role.layer,
                engram=places.index(role.layer) if role.has_engram else -1,
            )
            for role in layer_roles(config)
        ),
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        heads=attention.num_attention_heads,
        head_dim=attention.head_dim,
        rope_dim=attention.qk_rope_head_dim,
        q_rank=attention.q_lora_rank,
        o_rank=attention.o_lora_rank,
        o_groups=attention.o_groups,
        window=attention.sliding_window,
        norm_eps=config.rms_norm_eps,
        hc_eps=mhc.hc_eps,
        hc_iterations=mhc.hc_sinkhorn_iters,
        experts=moe.n_routed_experts,
        experts_per_token=moe.num_experts_per_tok,
        expert_width=moe.moe_intermediate_size,
        route_factor=moe.routed_scaling_factor,
        swiglu_limit=moe.swiglu_limit,
        index_heads=index.index_n_heads,
        index_dim=index.index_head_dim,
        index_topk=index.index_topk,
        engram_columns=engram.columns if engram else 0,
        engram_width=engram.engram_head_dim if engram else 0,
        candidate_rows=rows,
        fp4_rows=attention.use_fp4_sparse_kv,
    )


def ascend_weights(config: ModelConfig, params: Params) -> "Prepared":
    """Returns the parameters in CANN's layouts, on the host."""
    from native_ascend.weights import Prepared, constants

    prepared = Prepared()
    width = config.attention.o_groups
    for name in ("embed", "norm"):
        prepared.plain(name, np.asarray(getattr(params, name)))
    prepared.plain("head", np.asarray(params.head), np.float32)
    for number in range(config.num_hidden_layers):
        layer, name = params.layers, f"layers.{number}"
        for leaf in ("attn_norm", "ffn_norm", "q_norm", "kv_norm", "attn_sink", "gate_bias"):
            prepared.plain(f"{name}.{leaf}", np.asarray(getattr(layer, leaf)[number]))
        for leaf in ("wq_a", "wq_b", "wkv", "wo_b"):
            _fp8(config, prepared, f"{name}.{leaf}", [getattr(layer, leaf)], number)
        output = np.asarray(layer.wo_a[number])
        prepared.plain(f"{name}.wo_a", output.reshape(width, -1, output.shape[-1]))
        prepared.plain(f"{name}.gate", np.asarray(layer.gate[number]), np.float32)
        for part in ("attn", "ffn"):
            mixing = getattr(layer, f"hc_{part}")
            for leaf in ("fn", "base", "scale"):
                prepared.plain(
                    f"{name}.hc_{part}.{leaf}", np.asarray(getattr(mixing, leaf)[number])
                )
        _fp8(config, prepared, f"{name}.shared.gate_up", [layer.shared.w1, layer.shared.w3], number)
        _fp8(config, prepared, f"{name}.shared.w2", [layer.shared.w2], number)
        _fp4(prepared, f"{name}.experts.gate_up", [layer.experts.w1, layer.experts.w3], number)
        _fp4(prepared, f"{name}.experts.w2", [layer.experts.w2], number)
    _sources(config, params, prepared)
    _engram(config, params, prepared)
    constants(
        prepared,
        {
            "head_dim": config.attention.head_dim,
            "hidden": config.hidden_size,
            "index_heads": config.indexer.index_n_heads,
            "index_dim": config.indexer.index_head_dim,
        },
    )
    return prepared


def _bytes(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).view(np.uint8)


def _fp8(
    config: ModelConfig, prepared: "Prepared", name: str, leaves: Sequence[core.QuantArray], at: int
) -> None:
    """Adds FP8 weights, several as one over their output channels."""
    from native_ascend.weights import row_scales

    codes = [_bytes(leaf.payload[at]) for leaf in leaves]
    block = config.dense_block_size
    scales = [
        row_scales(_bytes(leaf.scale[at]), len(code), block)
        for leaf, code in zip(leaves, codes, strict=True)
    ]
    prepared.codes(name, np.concatenate(codes), np.concatenate(scales))


def _fp4(prepared: "Prepared", name: str, leaves: Sequence[core.QuantArray], at: int) -> None:
    """Adds MXFP4 expert weights [e, n, k], several as one over their output channels."""
    codes = np.concatenate([_bytes(leaf.payload[at]) for leaf in leaves], axis=1)
    scales = np.concatenate([_bytes(leaf.scale[at]) for leaf in leaves], axis=1)
    prepared.fp4(name, codes, scales)


def _sources(config: ModelConfig, params: Params, prepared: "Prepared") -> None:
    """Adds compressors and indexers."""
    for group, ratio in enumerate(source_ratios(config)):
        leaves = params.compressors[group]
        dtype = None if ratio == 1 else np.float32  # gates and values are not rounded
        for place, number in enumerate(source_layers(config, ratio)):
            name = f"layers.{number}.compressor"
            prepared.plain(f"{name}.wkv", np.asarray(leaves.wkv[place]), dtype)
            if ratio > 1:
                prepared.plain(f"{name}.wgate", np.asarray(leaves.wgate[place]), dtype)
            for leaf in ("norm", "index_wk", "index_k_norm"):
                prepared.plain(f"{name}.{leaf}", np.asarray(getattr(leaves, leaf)[place]))
    for place, number in enumerate(index_layers(config)):
        name = f"layers.{number}.indexer"
        _fp8(config, prepared, f"{name}.wq_b", [params.indexers.wq_b], place)
        prepared.plain(f"{name}.weights_proj", np.asarray(params.indexers.weights_proj[place]))


def _engram(config: ModelConfig, params: Params, prepared: "Prepared") -> None:
    """Adds the n-gram memory. Tables lie on the device."""
    if config.engram is None:
        return
    memory = params.engram
    for place, table in enumerate(memory.tables):
        if not isinstance(table, core.QuantArray):
            raise ConfigError(
                'kernels="ascend" keeps Engram tables on the device: load with engram="device"'
            )
        name = f"engram.{place}"
        prepared.arrays[f"{name}.table"] = _bytes(table.payload)
        prepared.dtypes[f"{name}.table"] = (table.payload.shape, "float8_e4m3fn")
        prepared.arrays[f"{name}.table.scale"] = _bytes(table.scale)
        prepared.dtypes[f"{name}.table.scale"] = (table.scale.shape, "float8_e8m0fnu")
        _fp8(config, prepared, f"{name}.wkv", [memory.wkv], place)
        weight = np.asarray(memory.q_weight[place], np.float32)
        prepared.plain(f"{name}.weight", weight * np.asarray(memory.k_weight[place], np.float32))


__all__ = [
    "AscendModel",
    "ascend_config",
    "ascend_errors",
    "ascend_name",
    "ascend_network",
    "ascend_report",
    "ascend_weights",
    "names_ascend",
    "require_ascend",
    "require_length",
]
