"""Makes the records of an engine's requests."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.backends import ascend_name
from deepinfer_jax.cache.keys import ImageSpan
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.determinism import report
from deepinfer_jax.environment import provenance
from deepinfer_jax.loading import Model
from deepinfer_jax.model.attention.core import BLOCK
from deepinfer_jax.numerics.selection import kernel_table, kernel_tiles
from deepinfer_jax.record.run_record import RecordedOutput, RunRecord, Section, json_hash, plain
from deepinfer_jax.record.weights import WeightsHash
from deepinfer_jax.sampling.params import SamplingParams
from pallas_kernels.core import tiles
from sharding.processes import Channel


class Recorder:
    """Describes one model with the weights it has now, and how it is run; nothing before asked.

    weights: their hash, which costs most.
    """

    def __init__(self, model: Model, runtime: RuntimeConfig) -> None:
        """Keeps what is described."""
        engram = model.config.engram
        tables = () if engram is None else engram.engram_num_embeddings
        self.weights = WeightsHash(model.params, tables)
        self._config, self._source, self._runtime = model.config, model.source, runtime

    @cached_property
    def facts(self) -> dict[str, Section]:
        """The sections that all records of the engine share, without the hash of the weights."""
        config, folder = describe_config(self._config), Path(self._source)
        is_folder = self._source != "nano" and folder.exists()
        options, runtime = _options(self._config, self._runtime)
        has_drafts = self._config.draft is not None
        promises = report(self._config.execution, self._runtime, has_drafts=has_drafts)
        return {
            "environment": provenance(),
            "model": {
                "source": str(folder.resolve()) if is_folder else self._source,
                "config": config,
                "config_sha256": json_hash(config),
            },
            "execution": _execution(self._config),
            "promises": plain(promises),
            "options": options,
            "runtime": runtime,
        }

    def record(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        outputs: Sequence[RecordedOutput],
        images: Sequence[ImageSpan] = (),
    ) -> RunRecord:
        """Returns the record of one request; the first call hashes the weights.

        Args:
            prompt: its ids.
            params: what was asked for.
            seed: the one in use, drawn or given.
            outputs: its completions.
            images: of the prompt; the record has their places and digests, not their pixels.

        Raises:
            InputError: the weights were replaced before any record was made.
        """
        fields = asdict(replace(params, seed=seed))
        del fields["cache_salt"]  # a secret that no output depends on
        request = {"prompt_token_ids": list(prompt), "params": fields}
        if images:
            request["images"] = [asdict(one) | {"digest": one.digest.hex()} for one in images]
        facts = self.facts | {
            "model": self.facts["model"] | {"weights_sha256": self.weights.root()},
            "request": plain(request),
        }
        return RunRecord(**facts, outputs=tuple(outputs))


def make_recorder(model: Model, runtime: RuntimeConfig) -> Recorder | None:
    """Returns the recorder of an engine, None if `runtime.record` is.

    In a job of several processes all make theirs, and hash the weights together now: later the
    others only run steps.
    """
    if runtime.record is None:
        return None
    recorder = Recorder(model, runtime)
    if jax.process_count() > 1:
        Channel("weights").meet()  # the first exchange has to begin everywhere within 30 s
        recorder.weights.root(together=True)
    return recorder


def describe_config(config: ModelConfig) -> Section:
    """Returns what a model is, without how it is run, as JSON values."""
    fields = asdict(config)
    del fields["execution"]
    return plain(fields)


def _execution(config: ModelConfig) -> Section:
    """Returns the choices of `load`, and the tiles that are part of the arithmetic.

    kernel_tiles: hashes of the tables that kernels take their tiles from. ascend: chip and version
    of an Ascend device, where the network runs on one.
    """
    execution = config.execution
    return ({"ascend": ascend_name()} if execution.on_ascend else {}) | {
        "numerics": execution.numerics,
        "determinism": execution.determinism,
        "kernels": kernel_table(execution),
        "kernel_tiles": kernel_tiles(execution),
        "network_row_tile": execution.row_tile,
        "row_tile": tiles.ROW_TILE,
        "k_chunk": tiles.K_CHUNK,
        "attention_block": BLOCK,
    }


def _options(config: ModelConfig, runtime: RuntimeConfig) -> tuple[Section, Section]:
    """Returns (options that outputs depend on at level "batch", the others)."""
    fields: dict[str, Any] = plain(asdict(runtime))
    options = {
        "replay": fields.pop("replay"),
        "replay_keep_tokens": fields.pop("replay_keep_tokens"),
        "max_len": runtime.longest(config),
    }
    del fields["max_len"]
    if runtime.replay == "off":
        options["replay_keep_tokens"] = None  # without effect
    return options, fields
