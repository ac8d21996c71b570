"""`load`: from a checkpoint to parameters, config and tokenizer, with every option decided once."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
from jax.sharding import Mesh

from deepinfer_jax.backends import ascend_config, names_ascend, require_ascend
from deepinfer_jax.checkpoint.convert import is_converted, load_converted
from deepinfer_jax.checkpoint.expand import expand_float32
from deepinfer_jax.checkpoint.inventory import count_summary, tensor_inventory
from deepinfer_jax.checkpoint.loader import EngramPlace, load_params
from deepinfer_jax.checkpoint.random_weights import random_params
from deepinfer_jax.config.hf import read_config
from deepinfer_jax.config.model import (
    Branches,
    DeterminismLevel,
    ExecutionConfig,
    ModelConfig,
    NumericsMode,
)
from deepinfer_jax.determinism import GPU_PLATFORMS, require_level, row_tile
from deepinfer_jax.errors import (
    CheckpointError,
    ConfigError,
    TokenizerError,
)
from deepinfer_jax.model.engram.vocabulary import build_token_map
from deepinfer_jax.model.kernel_layout import for_kernels
from deepinfer_jax.model.on_mesh import padding_of, placement_on, settle
from deepinfer_jax.model.placement import check_mesh
from deepinfer_jax.model.registry import AnyParams
from deepinfer_jax.numerics.selection import attention_widths, choose_kernels
from deepinfer_jax.speculative.calibration import read_temperatures
from deepinfer_jax.speculative.pairing import check_target
from sharding.errors import ShardingError
from sharding.mesh import build_mesh, mesh_sizes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The checkpoint "nano", shipped in the wheel (architecture.md 5).
EMBEDDED = Path(__file__).parent / "data" / "nano"
#: Float32 weights up to this size are expanded once at load; larger ones stay quantised and are
#: dequantised where they are used, with the same values.
EXPAND_LIMIT_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Model:
    """A loaded model: `params` is a pytree, `config` is static and hashable.

    params: records of arrays, float32 where the weights were expanded (small models with numerics
    "float32"), else the checkpoint's codes (float8_e4m3fn, packed FP4 in uint8) with their scales.
    draft_temperatures: of the confidences of its drafts (engine.md 3.4), None if none were fitted.

    Raises:
        TypeError: a field is missing; `load` makes these records.

    Examples:
        >>> model.source, model.config.vocab_size, model.params.head.shape
        ('nano', 2048, (2048, 192))
    """

    config: ModelConfig
    params: AnyParams
    tokenizer: "Tokenizer | None"
    source: str
    draft_temperatures: tuple[float, ...] | None = None


def load(
    source: str | os.PathLike[str],
    *,
    numerics: str = "checkpoint",
    determinism: str = "batch",
    mesh: Any = None,
    kernels: str | Mapping[str, str] | None = None,
    tp_chunks: int | None = None,
    seed: int | None = None,
    engram: EngramPlace = "device",
    progress: Callable[[int, int, str], None] | None = None,
) -> Model:
    """Returns the model of a checkpoint.

    Args:
        source: A folder in Hugging Face layout, a folder written by `convert`, the word "nano"
            (embedded), or a hub id "org/name".
        numerics: "checkpoint" (every rounding point of the released code) or "float32" (weights
            dequantised, nothing else rounded).
        determinism: "batch", "run" or "off" (determinism.md 1).
        mesh: None (one device), a `jax.sharding.Mesh` with the axes er, dp, cp and tp, or a dict of
            their sizes (a missing one is 1): er copies of the experts, dp attention replicas, cp
            devices that share the rows of a replica; experts are split over dp * cp.
        kernels: None (per op the best kernel that is verified on this kind of device, else XLA),
            "xla", "pallas" (a verified kernel for every op of `pallas_kernels.COVERED`, or it
            raises), "pallas_interpret" (the same bodies interpreted on a CPU: for tests), "ascend"
            (the whole network on an Ascend device through `native_ascend`, which has never run on
            hardware: text alone, no drafts, no level "batch"), or a mapping op -> implementation.
            `deepinfer-jax env` lists what exists where.
        tp_chunks: Only None so far; it belongs to tensor parallelism.
        seed: Draws random weights from 0 to 2^32 - 1 for a folder that has a config (and a
            tokenizer, with Engram layers) but no weights; raises for a source that has some.
        engram: Engram tables on the "device", in "host" memory, or "mapped" from the file.
        progress: Called as `(done_bytes, total_bytes, name)` for every tensor read.

    Raises:
        ConfigError: The config or an option cannot be honoured.
        KernelSelectionError: A kernel that was named does not exist or cannot run here.
        DeepInferError: With "ascend" also an `AscendUnavailable`, `AscendUnsupported` or
            `AscendUnverified` of `native_ascend`.
        CheckpointError: Files are absent, damaged or do not match the config.
        TokenizerError: The tokenizer does not belong to the config.

    Examples:
        >>> model = di.load("nano", numerics="float32")
        >>> model.config.execution.determinism
        'batch'
    """
    _check_options(numerics, determinism, tp_chunks)
    execution = ExecutionConfig(
        numerics=cast(NumericsMode, numerics),
        determinism=cast(DeterminismLevel, determinism),
        row_tile=row_tile(determinism),
    )
    grid = None if mesh is None else _mesh(mesh)
    execution = replace(execution, mesh=grid)
    require_level(execution)
    folder = resolve_folder(source)
    if seed is not None:
        _check_seed(seed, folder, grid)
    config = read_config(folder)
    if config.model_type == "deepseek_v4" and numerics != "float32":
        raise ConfigError(
            f'deepseek_v4 runs with numerics="float32" only, got {numerics!r}: no vectors of its '
            "own rounding points exist"
        )
    if names_ascend(kernels):
        require_ascend(replace(config, execution=execution), mesh=mesh, engram=engram)
        chosen = (("network", "ascend"),)
        require_level(replace(execution, kernels=chosen))
    else:
        chosen = choose_kernels(
            kernels,
            numerics=numerics,
            scale_block=config.dense_block_size,
            device_kind=jax.devices()[0].device_kind,
            widths=attention_widths(config),
        )
    tokenizer = read_tokenizer(folder)
    token_map = None
    if config.engram is not None:
        if tokenizer is None:
            raise TokenizerError(
                f"the Engram hash needs tokenizer.json, {folder} has none: copy the one published "
                "with the checkpoint"
            )
        token_map = build_token_map(tokenizer, config.engram, config.vocab_size)
    read = load_converted if is_converted(folder) else load_params
    if grid is not None:
        check_mesh(config, mesh_sizes(grid))
        read = partial(read, placement=placement_on(grid))
        if not is_converted(folder):
            read = partial(read, padding=padding_of(mesh_sizes(grid)))
    if seed is None:
        params = read(folder, config, progress=progress, engram=engram)
    else:
        params = random_params(config, seed)
    if numerics == "float32" and fits_expanded(config):
        params = expand_float32(params)
    execution = replace(execution, kernels=chosen, branches=_branches(config))
    params = for_kernels(params, execution)
    if token_map is not None:
        params = replace(params, engram=replace(params.engram, token_map=token_map))
    fitted = None
    if config.draft is not None:
        check_target(folder, params, config)
        fitted = read_temperatures(folder, params, config)
    if grid is not None:
        params = settle(params, config, grid)
    if execution.on_ascend:
        params, fitted = replace(params, draft=None, vision=None), None
        config = ascend_config(config)
    return Model(
        config=replace(config, execution=execution),
        params=params,
        tokenizer=tokenizer,
        source=str(source),
        draft_temperatures=fitted.values if fitted else None,
    )


def _check_seed(seed: int, folder: Path, mesh: Mesh | None) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed of random weights must be from 0 to 2^32 - 1, got {seed}")
    if is_converted(folder) or any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"seed initialises random weights, but {folder} has weights: leave seed out "
            "(a request's seed belongs to SamplingParams)"
        )
    if mesh is not None:
        raise ConfigError("random weights are drawn on one device: leave mesh or seed out")


def resolve_folder(source: str | os.PathLike[str]) -> Path:
    """Returns the local folder of a source; downloads a hub id at first use.

    Raises:
        CheckpointError: The source is neither a folder, "nano" nor a hub id that can be had.
    """
    if source == "nano":
        return EMBEDDED
    folder = Path(source)
    if folder.is_dir():
        return folder
    name = os.fspath(source)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _download(name)
    raise CheckpointError(
        f'a source is a folder in Hugging Face layout, "nano", or a hub id "org/name"; {name!r} is '
        "none of them: check the path"
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise CheckpointError(
            f"{name!r} is no local folder, and as a hub id it could not be fetched: {error}"
        ) from error


def read_tokenizer(folder: Path) -> "Tokenizer | None":
    """Returns the tokenizer of a checkpoint folder, None if it has no tokenizer.json.

    Raises:
        TokenizerError: The file cannot be read.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise TokenizerError(f"{path} is no readable tokenizer: {error}") from error


def _check_options(
    numerics: str,
    determinism: str,
    tp_chunks: int | None,
) -> None:
    for name, value, legal in (
        ("numerics", numerics, ("checkpoint", "float32")),
        ("determinism", determinism, ("off", "run", "batch")),
    ):
        if value not in legal:
            raise ConfigError(f"{name} must be one of {legal}, got {value!r}")
    if tp_chunks is not None:
        raise ConfigError(f"tp_chunks must be None without tensor parallelism, got {tp_chunks!r}")


def _mesh(mesh: Any) -> Mesh:
    """Returns the device mesh of a mesh or of a dict of sizes.

    Raises:
        ConfigError: other axes or sizes, or more devices than there are.
    """
    try:
        return build_mesh(mesh)
    except ShardingError as error:
        raise ConfigError(f"mesh: {error}") from error


def _branches(config: ModelConfig) -> Branches:
    """Returns how the programs branch here: see `ExecutionConfig.branches`. V4 has one form."""
    on_gpu = jax.default_backend() in GPU_PLATFORMS
    return "static" if on_gpu and config.model_type == "deepseek_v41" else "data"


@cache
def fits_expanded(config: ModelConfig) -> bool:
    """Says whether all weights as float32 take at most `EXPAND_LIMIT_BYTES`."""
    return 4 * count_summary(tensor_inventory(config)).elements <= EXPAND_LIMIT_BYTES


__all__ = ["EMBEDDED", "Model", "fits_expanded", "load", "read_tokenizer", "resolve_folder"]
