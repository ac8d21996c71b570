"""The bridge and the double under AddressSanitizer and UBSan (I3), as in `make test-ascend`."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.accept(13)]

RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")


def test_ten_thousand_calls_and_injected_failures_are_clean(root):
    build = subprocess.run(
        [root / "tools" / "build_ascend.sh", sys.prefix, "address"],
        capture_output=True,
        text=True,
        check=False,
    )
    if build.returncode == 3:
        pytest.skip(build.stdout.strip())
    assert build.returncode == 0, build.stderr
    compiler = os.environ.get("CXX", "g++")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in RUNTIMES
    ]
    # Leaks are counted by the double: the interpreter's own would drown them.
    env = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    env |= {"LD_PRELOAD": ":".join(found), "JAX_PLATFORMS": "cpu"}
    script = root / "tests" / "native_ascend" / "sanitized_run.py"
    done = subprocess.run(
        [sys.executable, script, root / ".cache" / "ascend" / "address"],
        capture_output=True,
        text=True,
        env=os.environ | env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("10000 calls and 200 failures on AscendRuntime(")
    assert "nothing leaked, no violation" in done.stdout
