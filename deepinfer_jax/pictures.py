"""Pictures as PNG files. matplotlib is optional and imported at first use."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError


def require_matplotlib(what: str) -> None:
    """Checks, without importing it, that matplotlib is there for `what`.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{what} needs matplotlib, which is not installed: pip install "
            "'deepinfer-jax[notebook]'"
        )


def new_picture(size: tuple[float, float], columns: int = 1) -> tuple[Any, Any]:
    """Returns (figure, axis) of `size` inches; no global state, so any thread may draw.

    columns: axes side by side; more than one are returned as an array.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib("a picture")
    from matplotlib.backends.backend_agg import (  # pyright: ignore[reportMissingImports]
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def save_picture(figure: Any, path: Path | str) -> None:
    """Writes a figure as PNG."""
    figure.savefig(path, format="png", dpi=120)
