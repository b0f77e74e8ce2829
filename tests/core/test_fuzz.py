"""A short run of the fuzzer (`make fuzz-native`): mutated traces through the native parsers, under sanitizers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.examples import examples
from support.paths import ROOT

PROBE = "#include <simdjson.h>\nint main() {}"


@pytest.mark.slow
def test_the_fuzzer_finds_no_fault(tmp_path: Path) -> None:
    if not shutil.which("make") or not shutil.which("c++"):
        pytest.skip("needs make and a C++ compiler")
    probe = [
        "c++",
        "-x",
        "c++",
        "-fsanitize=address,undefined",
        "-std=c++20",
        "-",
        "-lsimdjson",
        "-o",
        str(tmp_path / "probe"),
    ]
    if subprocess.run(probe, input=PROBE, text=True, capture_output=True).returncode:
        pytest.skip("needs simdjson's headers and the compiler's sanitizers")
    inputs = examples(1000)
    done = subprocess.run(
        ["make", "-s", "fuzz-native", "FUZZ_SECONDS=600", f"FUZZ_INPUTS={inputs}", "FUZZ_FLAGS=-O1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(rf"^{inputs} inputs, each through all parsers, .* no fault", done.stdout), done.stdout
