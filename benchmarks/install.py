"""What installing costs: the size of the wheel, the packages it brings, the seconds it takes.

    python -m benchmarks.install --out benchmarks/results/install.jsonl

Builds the wheel, installs it into an empty environment twice, and keeps the second figure: with
everything in the package cache. Needs a package index the first time.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Not brought by the wheel.
OWN = {"pip", "setuptools", "wheel", "deepinfer-jax"}


def run(*command: str | Path, cwd: Path) -> str:
    """Returns what a command printed, run without this process's Python and JAX settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX_"))}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Returns the wheel of this checkout, built into a folder."""
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"),
        *(folder, ROOT),
        cwd=folder,
    )
    [wheel] = folder.glob("*.whl")
    return wheel


def install(wheel: Path, venv: Path) -> tuple[float, float]:
    """Returns seconds and CPU seconds of installing a wheel into a new environment, made before."""
    run(sys.executable, "-m", "venv", venv, cwd=wheel.parent)
    begin, used = time.perf_counter(), _cpu_seconds()
    run(venv / "bin" / "pip", "install", "-qq", wheel, cwd=wheel.parent)
    return time.perf_counter() - begin, _cpu_seconds() - used


def _cpu_seconds() -> float:
    """Returns what child processes have used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(folder: Path) -> dict[str, Any]:
    """Returns one record: bytes, seconds, counts."""
    wheel = build_wheel(folder)
    install(wheel, folder / "first")
    seconds, used = install(wheel, folder / "second")
    pip = folder / "second" / "bin" / "pip"
    listing = json.loads(run(pip, "list", "--format=json", cwd=folder))
    brought = [one["name"] for one in listing if one["name"].lower() not in OWN]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    site = folder / "second" / "lib"
    return {
        "benchmark": "install",
        "wheel_bytes": wheel.stat().st_size,
        "install_s_warm_cache": round(seconds, 1),
        "install_cpu_s": round(used, 1),
        "declared_dependencies": len(project["dependencies"]),
        "installed_packages": len(brought),
        "installed_bytes": sum(f.stat().st_size for f in site.rglob("*") if f.is_file()),
        "installer": run(pip, "--version", cwd=folder).split(" from")[0],
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Prints the record; `--out` writes it."""
    parser = argparse.ArgumentParser(description="Measures what installing costs.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        line = json.dumps(measure(Path(folder)))
    print(line)
    if options.out is not None:
        options.out.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
