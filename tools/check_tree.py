"""Checks that need no imports: import direction, file lengths, final newlines, large files.

`python tools/check_tree.py` prints every violation and exits 1 if there is one.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("deepinfer_jax", "pallas_kernels", "sharding", "native_ascend")
LOWER = ("pallas_kernels", "sharding", "native_ascend")
LOWER_MAY_IMPORT = {"jax", "jaxlib", "numpy"}
NOBODY_IMPORTS = {"tests", "benchmarks"}
# Imported at first use, never while a module loads (architecture.md 2).
HEAVY = {
    *("orbax", "optax", "tokenizers", "deepseek_recipe", "llguidance", "huggingface_hub", "PIL"),
}

# A module of deepinfer_jax imports only from its own row or a row above (architecture.md 2).
ORDER = (
    ("errors", "config", "environment", "pictures"),
    ("numerics", "backends", "determinism"),
    ("checkpoint", "model"),
    ("cache", "sampling", "grammar", "speculative", "loading", "record", "vision"),
    ("engine",),
    ("chat",),
    ("llm", "invariance"),
    ("async_llm", "jobs"),
    ("serve", "cli", "training"),
)
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}

MAX_LINES = 400
# Path -> why this file may be longer.
LONG_FILES: dict[str, str] = {}

MAX_BYTES = 4 * 2**20
# Path prefix -> why files below it may be larger.
LARGE_FILES: dict[str, str] = {
    "tests/fixtures/": "golden numbers, copied unchanged",
    "deepinfer_jax/data/": "the checkpoint that ships in the wheel",
}
TEXT = {".py", ".md", ".toml", ".json", ".yaml", ".yml", ".sh", ".txt", ".cff"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module of a file: dotted name, line, whether it runs while the file loads."""

    module: str
    line: int
    on_load: bool


def tree_files(root: Path = ROOT) -> list[Path]:
    """Returns the tracked files and the new ones that git does not ignore, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout
    return [Path(name) for name in sorted(listing.split("\0")) if name and (root / name).is_file()]


def module_name(path: Path) -> str:
    """Returns the dotted name of a Python file given relative to the root."""
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _nodes(tree: ast.AST, on_load: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(tree):
        yield child, on_load
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _nodes(child, on_load and not deferred and not _is_type_checking(child))


def imports_of(source: str, path: Path) -> list[Import]:
    """Returns what a file imports, also inside functions and through `import_module("name")`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = []
    for node, on_load in _nodes(ast.parse(source, filename=str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "import_module",
            "importlib.import_module",
            "__import__",
        ):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                names = [argument.value]
        line = getattr(node, "lineno", 0)
        found += [Import(module=name, line=line, on_load=on_load) for name in names]
    return found


def _part(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def import_violations(source: str, path: Path) -> list[str]:
    """Returns one sentence for each import of a file that points the wrong way."""
    own = path.parts[0]
    own_part = _part(module_name(path))
    problems = []
    if own == "deepinfer_jax" and own_part and own_part not in RANK:
        problems.append(
            f"{path}: deepinfer_jax.{own_part} has no place in the import order; "
            "add it to ORDER in tools/check_tree.py"
        )
    for item in imports_of(source, path):
        top = item.module.split(".")[0]
        where = f"{path}:{item.line}: imports {item.module}"
        if top in NOBODY_IMPORTS and own != top:
            problems.append(f"{where}: nothing imports {top}")
        elif own in LOWER:
            if top not in LOWER_MAY_IMPORT | {own} | sys.stdlib_module_names:
                problems.append(f"{where}: {own} imports only jax, numpy and the standard library")
            elif own == "native_ascend" and top in ("jax", "jaxlib") and item.on_load:
                problems.append(f"{where}: native_ascend imports jax inside functions only")
        elif own == "deepinfer_jax":
            if top == "native_ascend" and str(path) != "deepinfer_jax/backends.py":
                problems.append(f"{where}: native_ascend is reached through deepinfer_jax.backends")
            if top == "native_ascend" and item.on_load:
                problems.append(f"{where}: native_ascend is imported inside functions only")
            if top in HEAVY and item.on_load:
                problems.append(f"{where}: {top} is imported at first use, inside a function")
            part = _part(item.module) if top == "deepinfer_jax" else ""
            if own_part in RANK and RANK.get(part, -1) > RANK[own_part]:
                problems.append(f"{where}: {part} comes after {own_part} in the import order")
    return problems


def cycles(sources: dict[Path, str]) -> list[str]:
    """Returns the pairs of parts of deepinfer_jax that import each other, also through others."""
    edges: dict[str, set[str]] = {}
    for path, source in sources.items():
        part = _part(module_name(path))
        if path.parts[0] != "deepinfer_jax" or part not in RANK:
            continue
        targets = {
            _part(item.module)
            for item in imports_of(source, path)
            if item.module.startswith("deepinfer_jax.")
        }
        edges.setdefault(part, set()).update((targets & RANK.keys()) - {part})

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(edges.get(start, ()))
        while todo:
            part = todo.pop()
            if part not in seen:
                seen.add(part)
                todo += edges.get(part, ())
        return seen

    reach = {part: reached(part) for part in edges}
    return [
        f"deepinfer_jax.{a} and deepinfer_jax.{b} import each other"
        for a in sorted(reach)
        for b in sorted(reach[a])
        if a < b and a in reach.get(b, set())
    ]


def length_violations(files: list[Path], root: Path = ROOT) -> list[str]:
    """Returns one sentence for each Python file of the packages with 400 lines or more."""
    problems = []
    for path in files:
        if path.suffix != ".py" or path.parts[0] not in PACKAGES or str(path) in LONG_FILES:
            continue
        lines = len((root / path).read_text(encoding="utf-8").splitlines())
        if lines >= MAX_LINES:
            problems.append(f"{path}: {lines} lines; a file stays under {MAX_LINES}, so split it")
    return problems


def text_violations(files: list[Path], root: Path = ROOT) -> list[str]:
    """Returns one sentence for each text file without a final newline and each too large file."""
    problems = []
    for path in files:
        size = (root / path).stat().st_size
        if size > MAX_BYTES and not any(str(path).startswith(prefix) for prefix in LARGE_FILES):
            problems.append(f"{path}: {size} bytes; a committed file stays under {MAX_BYTES}")
        if path.suffix in TEXT and size and not any(str(path).startswith(p) for p in LARGE_FILES):
            with (root / path).open("rb") as file:
                file.seek(-1, 2)
                if file.read() != b"\n":
                    problems.append(f"{path}: does not end with a newline")
    return problems


def checked_sources(files: list[Path], root: Path = ROOT) -> dict[Path, str]:
    """Returns the text of every Python file outside tests and benchmarks."""
    return {
        path: (root / path).read_text(encoding="utf-8")
        for path in files
        if path.suffix == ".py" and path.parts[0] not in NOBODY_IMPORTS
    }


def violations(root: Path = ROOT) -> list[str]:
    """Returns everything that is wrong with the tree."""
    files = tree_files(root)
    sources = checked_sources(files, root)
    problems = [
        line for path, source in sources.items() for line in import_violations(source, path)
    ]
    return (
        problems + cycles(sources) + length_violations(files, root) + text_violations(files, root)
    )


if __name__ == "__main__":
    found = violations()
    print(
        "\n".join(found)
        if found
        else "check_tree: imports, lengths and files are as they should be"
    )
    sys.exit(bool(found))
