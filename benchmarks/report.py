"""The report of all committed figures, as Markdown and as one HTML file.

    python -m benchmarks.report            writes docs/numbers.md, docs/charts/*.svg and
                                           benchmarks/report.html
    python -m benchmarks.report --check    says whether they are what the results give

Reads the files of benchmarks/results and nothing else; a test regenerates and compares.
"""

import sys
from html import escape
from pathlib import Path

from benchmarks.report_parts import SECTIONS, Section, code

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE, CHARTS = Path("docs/numbers.md"), Path("docs/charts")
HTML = Path("benchmarks/report.html")
TITLE = "Numbers"
PREFACE = (
    "Written by `python -m benchmarks.report` from the files of `benchmarks/results`; edits by "
    "hand are undone, and a test notices them. Every figure holds for the machine, the model and "
    "the versions that its file names. Most are of nano, the embedded model of 13 MB: they compare "
    "settings with each other and say nothing about the speed of a large model."
)


def sections() -> list[Section]:
    """Returns the parts of the report, in order."""
    return [make(RESULTS) for make in SECTIONS]


def markdown(parts: list[Section]) -> str:
    """Returns the page of the documentation; charts are files beside it."""
    lines = [f"# {TITLE}", "", PREFACE]
    for part in parts:
        lines += ["", f"## {part.title}"]
        for paragraph in part.text:
            lines += ["", paragraph]
        for name, _ in part.charts:
            lines += ["", f"![{part.title}](charts/{name}.svg)"]
        if part.rows:
            lines += ["", "| " + " | ".join(part.columns) + " |", "|---" * len(part.columns) + "|"]
            lines += ["| " + " | ".join(row) + " |" for row in part.rows]
        lines += ["", "From " + ", ".join(f"`{name}`" for name in part.sources) + "."]
    return "\n".join(lines) + "\n"


def html(parts: list[Section]) -> str:
    """Returns the report as one file that needs no other."""
    style = (
        "body{font-family:sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .6rem;"
        "text-align:left}svg{max-width:100%;height:auto}code{background:#f2f2f2}"
    )
    out = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>deepinfer-jax: {TITLE}</title><style>{style}</style></head><body>",
        f"<h1>deepinfer-jax: {TITLE}</h1><p>{code(escape(PREFACE))}</p>",
    ]
    for part in parts:
        out.append(f"<h2>{escape(part.title)}</h2>")
        out += [f"<p>{code(escape(paragraph))}</p>" for paragraph in part.text]
        out += [picture for _, picture in part.charts]
        if part.rows:
            out.append("<table><tr>" + "".join(f"<th>{escape(c)}</th>" for c in part.columns))
            for row in part.rows:
                out.append("<tr>" + "".join(f"<td>{code(escape(cell))}</td>" for cell in row))
            out.append("</table>")
        out.append("<p>From " + ", ".join(f"<code>{s}</code>" for s in part.sources) + ".</p>")
    return "\n".join([*out, "</body></html>"]) + "\n"


def outputs() -> dict[Path, str]:
    """Returns every file of the report with its text, by path below the repository's root."""
    parts = sections()
    charts = {CHARTS / f"{name}.svg": picture for part in parts for name, picture in part.charts}
    return {PAGE: markdown(parts), HTML: html(parts), **charts}


def stale(root: Path = ROOT) -> list[str]:
    """Returns the files that are not what the results give, and charts that nothing writes."""
    wanted = outputs()
    found = [
        str(path)
        for path, text in wanted.items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]
    extra = {path.relative_to(root) for path in (root / CHARTS).glob("*")} - wanted.keys()
    return found + sorted(map(str, extra))


def main(arguments: list[str]) -> int:
    """Writes the report, or with `--check` compares it."""
    if "--check" in arguments:
        problems = stale()
        print("\n".join(problems) or "report: as the results say")
        return bool(problems)
    (ROOT / CHARTS).mkdir(parents=True, exist_ok=True)
    for path, text in outputs().items():
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
