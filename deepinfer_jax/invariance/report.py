"""What a verification found: one row a case, as values, JSON, a table and a picture."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax.invariance.fingerprint import Fingerprint
from deepinfer_jax.pictures import new_picture, save_picture

if TYPE_CHECKING:
    from rich.table import Table

MOST_POSITIONS = 4096  # kept of a row for the picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first differing value of a case.

    run: of the case, from 0, and what it did. position: of the token whose logits differ first.
    layer, op: the first value in the order of computation that differs at any position, and
    op_position the first of these; layer is None outside the layers. found, lone: hashes of that
    value's bits, in the case and in the lone run. note: what could not be found out.
    """

    run: int
    detail: str
    position: int
    op: str
    op_position: int
    found: str
    lone: str
    layer: int | None = None
    note: str = ""

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer}, "
        text = (
            f"run {self.run} ({self.detail}): position {self.position}; first {where}{self.op} "
            f"at position {self.op_position}: {self.found} is not {self.lone}"
        )
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow:
    """One case. positions: compared; differing: of these. at: the differing ones, for `plot`.

    skipped: why it did not run. expects_difference: a positive control, which must differ. detail:
    what its runs met.
    """

    name: str
    runs: int = 0
    positions: int = 0
    differing: int = 0
    seconds: float = 0.0
    first: Difference | None = None
    at: tuple[int, ...] = ()
    detail: str = ""
    skipped: str | None = None
    expects_difference: bool = False

    @property
    def is_right(self) -> bool:
        """Whether it did not run, or its bits are equal (different, for a control)."""
        return self.skipped is not None or (self.differing > 0) == self.expects_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of `verify_invariance`. level: of determinism. versions: of jax and jaxlib.

    rows: one for each case. run: weights and options that decide bits. environment: device,
    versions, flags, code. promises: what is claimed here, [held, reason] by name. fingerprints: of
    the lone runs.

    Raises:
        ConfigError: by `plot`, without matplotlib.

    Examples:
        >>> report = di.verify_invariance(model, cases=["slots=1"], locate=False)
        >>> [(row.name, row.differing) for row in report.rows]
        [('slots', 0)]
    """

    source: str
    level: str
    numerics: str
    device: str
    versions: tuple[str, str]
    seed: int
    seconds: float
    rows: tuple[CaseRow, ...]
    run: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    promises: dict[str, list[Any]] = field(default_factory=dict)
    fingerprints: tuple[Fingerprint, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether at least one case ran and all that ran came out as they should."""
        return any(row.skipped is None for row in self.rows) and all(
            row.is_right for row in self.rows
        )

    def to_json(self) -> str:
        """Returns the report as JSON with sorted keys and a final newline."""
        record = asdict(self) | {"is_equal": self.is_equal}
        return json.dumps(record, indent=1, sort_keys=True) + "\n"

    def table(self) -> "Table":
        """Returns a Rich table."""
        from rich.table import Table

        table = Table(
            title=f"{self.source}: level {self.level}, {self.numerics}, {self.device}, jax "
            f"{self.versions[0]}, seed {self.seed}",
            title_justify="left",
        )
        table.add_column("case", overflow="fold")
        for name in ("runs", "positions", "differing", "s"):
            table.add_column(name, justify="right")
        table.add_column("", overflow="fold")
        for row in self.rows:
            table.add_row(*_cells(row))
        return table

    def plot(self, path: Path | str) -> None:
        """Writes a PNG: a line a case, positions along it, differing ones marked.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        rows = [row for row in self.rows if row.skipped is None]
        figure, axis = new_picture((8.0, 1 + 0.22 * len(rows)))
        axis.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
        for line, row in enumerate(rows):
            axis.axhline(line, color="0.85", linewidth=0.8, zorder=0)
            colour = "tab:blue" if row.expects_difference else "tab:red"
            axis.plot(row.at, [line] * len(row.at), "|", color=colour)
        axis.set(xlabel="position whose bits differ (blue: a control, which must)", xlim=(0, None))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_title(f"{self.source}, level {self.level}", fontsize=9)
        save_picture(figure, path)


def _cells(row: CaseRow) -> tuple[Any, ...]:
    if row.skipped is not None:
        return row.name, "-", "-", "-", "-", f"[dim]skipped: {row.skipped}[/dim]"
    colour = "green" if row.is_right else "red"
    text = row.detail if row.first is None or row.expects_difference else str(row.first)
    if row.expects_difference:
        text = "noticed, as it must be" if row.differing else "[red]NOT noticed: void[/red]"
    return (
        row.name,
        str(row.runs),
        str(row.positions),
        f"[{colour}]{row.differing}[/{colour}]",
        f"{row.seconds:.1f}",
        text,
    )
