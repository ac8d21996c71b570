"""Compares a checkpoint with what its config implies: nothing missing, unused or different."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deepinfer_jax.checkpoint.inventory import tensor_inventory
from deepinfer_jax.checkpoint.safetensors import TensorStore
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.model.spec import TensorSpec

#: Copies of the embedding and the head that some files store again per draft stage (2.3, 10.3).
_COPIES = {
    "deepseek_v41": re.compile(r"mtp\.\d+\.(embed|head)\.weight"),
    "deepseek_v4": re.compile(r"mtp\.\d+\.(emb|embed|head)\..+"),
}

#: Lines that one report prints per kind of mismatch.
MAX_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Outcome of the comparison; every entry is one line of text. Empty lists mean complete."""

    expected: int
    ignored: tuple[str, ...]
    index: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    wrong_shape: tuple[str, ...]
    wrong_dtype: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint is exactly what the config implies."""
        return not any(lines for _, lines in self.groups())

    def groups(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Returns a title and the lines of every kind of mismatch."""
        return (
            ("index and shards disagree", self.index),
            ("missing", self.missing),
            ("unused", self.unused),
            ("wrong shape", self.wrong_shape),
            ("wrong dtype", self.wrong_dtype),
        )

    def report(self) -> str:
        """Returns the mismatches as text, the first of each kind and their number."""
        parts = []
        for title, lines in self.groups():
            if lines:
                parts.append(f"  {title} ({len(lines)}):")
                parts.extend(f"    {line}" for line in lines[:MAX_LINES])
                if len(lines) > MAX_LINES:
                    parts.append(f"    ... and {len(lines) - MAX_LINES} more")
        return "\n".join(parts)


def compare(store: TensorStore, config: ModelConfig) -> Coverage:
    """Returns how a checkpoint's tensors differ from the inventory of its config."""
    inventory = tensor_inventory(config)
    copies = _COPIES[config.model_type]
    extra = [name for name in store if name not in inventory]
    ignored = tuple(name for name in extra if copies.fullmatch(name))
    return Coverage(
        expected=len(inventory),
        ignored=ignored,
        index=store.problems,
        missing=tuple(name for name in inventory if name not in store),
        unused=tuple(name for name in extra if not copies.fullmatch(name)),
        wrong_shape=_differences(store, inventory, "shape"),
        wrong_dtype=_differences(store, inventory, "dtype"),
    )


def check_coverage(store: TensorStore, config: ModelConfig) -> Coverage:
    """Returns the comparison of a checkpoint that is complete.

    Raises:
        CheckpointError: It is not; lists missing, unused, wrongly shaped and wrongly typed tensors.
    """
    coverage = compare(store, config)
    if not coverage.is_complete:
        raise CheckpointError(
            f"a checkpoint must hold exactly the {coverage.expected} tensors that its config "
            f"implies; it does not, in {store.folder}:\n{coverage.report()}\n"
            "Check that config.json belongs to these weights, or download the checkpoint again."
        )
    return coverage


def _differences(
    store: TensorStore, inventory: Mapping[str, TensorSpec], attribute: str
) -> tuple[str, ...]:
    lines = []
    for name, spec in inventory.items():
        if name in store:
            expected, received = getattr(spec, attribute), getattr(store[name], attribute)
            if expected != received:
                lines.append(f"{name}: expected {expected}, received {received}")
    return tuple(lines)
