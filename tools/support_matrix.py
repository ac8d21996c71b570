"""Renders support.json as the matrix in README.md.

`python tools/support_matrix.py` prints it; `--write` puts it between the markers of README.md.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- support matrix: written by tools/support_matrix.py from support.json -->"
END = "<!-- end of support matrix -->"


def load(root: Path = ROOT) -> dict[str, Any]:
    """Returns support.json as it is; `check` says whether its claims have evidence."""
    return json.loads((root / "support.json").read_text(encoding="utf-8"))


#: What a result of a device names, in its file name or its lines. Tests run on a CPU.
_NAMED = {"h200": "h200", "sm100": "b200", "ascend": "ascend"}


def _is_evidence(path: Path, device: str) -> bool:
    """Says whether a test or result is there, and is of this kind of device."""
    word = _NAMED.get(device)
    if word is None:
        return path.is_file() or any(path.rglob("test_*.py"))
    if not path.is_file() or path.parent.name != "results":
        return False
    return word in path.name.lower() or word in path.read_text(encoding="utf-8").lower()


def check(record: dict[str, Any], root: Path = ROOT) -> list[str]:
    """Returns what is wrong: unknown statuses, missing devices, claims without evidence.

    On a CPU a test is evidence, elsewhere a result of that device.
    """
    problems = []
    for row in record["capabilities"]:
        for device in record["devices"]:
            where = f"{row['name']} on {device}"
            cell = row.get(device)
            if cell is None:
                problems.append(f"{where}: no entry")
                continue
            if cell["status"] not in record["statuses"]:
                problems.append(f"{where}: unknown status {cell['status']!r}")
            if cell["status"] in ("works", "limits"):
                evidence = cell.get("evidence")
                if not evidence or not _is_evidence(root / evidence, device):
                    problems.append(
                        f"{where}: evidence {evidence!r} is no test or result of that device"
                    )
            if cell["status"] == "limits" and not cell.get("note"):
                problems.append(f"{where}: limits without a note")
    return problems


def render(record: dict[str, Any]) -> str:
    """Returns the Markdown table, its notes and the meaning of the words."""
    devices = record["devices"]
    notes: list[str] = []
    lines = [
        "| | " + " | ".join(devices.values()) + " |",
        "|---|" + "---|" * len(devices),
    ]
    for row in record["capabilities"]:
        cells = []
        for device in devices:
            cell = row[device]
            note = cell.get("note")
            if cell.get("evidence"):
                note = "; ".join(filter(None, [note, f"evidence: `{cell['evidence']}`"]))
            mark = ""
            if note:
                if note not in notes:
                    notes.append(note)
                mark = f" [{notes.index(note) + 1}]"
            cells.append(cell["status"] + mark)
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    lines += ["", *[f"[{number}] {note}  " for number, note in enumerate(notes, 1)], ""]
    words = [f"*{status}*: {meaning}" for status, meaning in record["statuses"].items()]
    return "\n".join([*lines, ". ".join(words) + "."])


def block_of(readme: str) -> str:
    """Returns what stands between the markers."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md needs the lines {BEGIN!r} and {END!r} once each")
    return readme.split(BEGIN)[1].split(END)[0].strip("\n")


def main(arguments: list[str]) -> int:
    """Prints the matrix, or writes it into README.md."""
    record = load()
    problems = check(record)
    if problems:
        print("support.json: " + "\nsupport.json: ".join(problems), file=sys.stderr)
        return 1
    text = render(record)
    if "--write" not in arguments:
        print(text)
        return 0
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    block_of(readme)
    before, rest = readme.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
