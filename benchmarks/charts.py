"""Charts as SVG text: the same input gives the same bytes, so that a test can compare them."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH = 760
COLOURS = ("#2a6f97", "#d9822b", "#4f8a4b", "#8e5ea2", "#7a7a7a")
Point = tuple[float, float, str]  # x, y, label


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, style: str = 'stroke="#ddd"') -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _picture(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-family="sans-serif" fill="#222" role="img">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>'
    )
    return "\n".join([head, _text(10, 20, title, size=14), *parts, "</svg>"]) + "\n"


def _legend(names: Sequence[str], y: float) -> list[str]:
    parts, x = [], 10.0
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 15, y, name))
        x += 30 + 7 * len(name)
    return parts


def bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    reference: float | None = None,
    form: str = "{:.2f}",
) -> str:
    """Returns horizontal bars: for each row a label, and for each series a length.

    reference: where a dashed line is drawn, such as 1 for ratios.
    """
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    left, right, bar = 320, WIDTH - 60, 14
    top = 56 if len(names) > 1 else 34
    most = max([v for _, values in rows for v in values.values()] + [reference or 0.0])
    scale, y, parts = (right - left) / most, float(top), []
    for label, values in rows:
        parts.append(_text(left - 8, y + 7 + bar * len(values) / 2 - 3, label, anchor="end"))
        for name, value in values.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            parts.append(
                f'<rect x="{left}" y="{y:.1f}" width="{value * scale:.1f}" height="{bar - 2}" '
                f'fill="{colour}"/>'
            )
            parts.append(_text(left + value * scale + 5, y + bar - 4, form.format(value), size=11))
            y += bar
        y += 8
    if reference is not None:
        x = left + reference * scale
        parts.insert(0, _line(x, top - 4, x, y, 'stroke="#888" stroke-dasharray="4 3"'))
    if len(names) > 1:
        parts += _legend(names, 42)
    return _picture(title, y + 8, parts)


def points(
    title: str, series: Mapping[str, Sequence[Point]], *, across: str, up: str, log: bool = True
) -> str:
    """Returns points joined within each series, each with its label, which may be empty.

    log: logarithmic axes; else both begin at 0.
    """
    left, right, top, bottom = 70, WIDTH - 90, 60, 330
    every = [point for values in series.values() for point in values]
    xs, x_ticks = _axis([p[0] for p in every], log)
    ys, y_ticks = _axis([p[1] for p in every], log)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + xs(x) * (right - left), bottom - ys(y) * (bottom - top)

    parts = []
    for tick in x_ticks:
        x, _ = place(tick, y_ticks[0])
        parts += [_line(x, top, x, bottom), _text(x, bottom + 16, f"{tick:g}", anchor="middle")]
    for tick in y_ticks:
        _, y = place(x_ticks[0], tick)
        parts += [_line(left, y, right, y), _text(left - 6, y + 4, f"{tick:g}", anchor="end")]
    for index, values in enumerate(series.values()):
        colour = COLOURS[index % len(COLOURS)]
        places = [place(x, y) for x, y, _ in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        for (x, y), (_, _, label) in zip(places, values, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            parts.append(_text(x + 7, y - 5, label, size=11))
    parts.append(_text((left + right) / 2, bottom + 36, across, anchor="middle"))
    parts.append(_text(left, top - 6, up, size=11))
    return _picture(title, bottom + 48, [*parts, *_legend(list(series), 40)])


def _axis(values: Sequence[float], log: bool) -> tuple[Callable[[float], float], list[float]]:
    """Returns where along an axis of length 1 a value stands, and the ticks."""
    if log:
        powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
        every = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        low = max(tick for tick in every if tick <= min(values))
        high = min(tick for tick in every if tick >= max(values) and tick > low)
        span = math.log10(high / low)
        return (lambda v: math.log10(v / low) / span), [t for t in every if low <= t <= high]
    most = max(values)
    step = next(s for s in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if most / s <= 5)
    count = math.ceil(most / step - 1e-9)
    return (lambda v: v / (step * count)), [step * k for k in range(count + 1)]
