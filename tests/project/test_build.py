"""What is built: the wheel's contents, the sentences for what a machine lacks, the traces that benchmarks replicate."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.paths import ROOT


@pytest.mark.slow
def test_a_wheel_contains_everything_the_package_needs(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    # A copy, for a wheel must not take the library that was built in place.
    source = tmp_path / "source"
    kept = shutil.ignore_patterns(".*", "build", "run", "docs", "tests", "benchmarks", "__pycache__", "*.so")
    shutil.copytree(ROOT, source, ignore=kept)
    # Only the contents are checked, and the whole library takes minutes to compile.
    for file in (source / "native").rglob("*.cpp"):
        file.write_text(
            "#include <nanobind/nanobind.h>\nNB_MODULE(_native, module) {}\n" if file.stem == "module" else ""
        )
    stale = source / "src" / "etloom" / "_native.stale.so"
    stale.write_bytes(b"not a library")
    shutil.copy(ROOT / ".gitignore", source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-C",
        "cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O0",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    built = [name for name in names if name.endswith(".so")]
    assert len(built) == 1
    assert re.fullmatch(r"etloom/_native\.(cpython|abi3).*\.so", built[0])
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        files = [name for name in tracked.stdout.splitlines() if (ROOT / name).exists()]
        assert {name.removeprefix("src/") for name in files} <= names
    assert {"etloom/py.typed", "etloom/__init__.py", "etloom/cli/__init__.py"} <= names
    unexpected = {name.split("/")[0] for name in names} - {"etloom"}
    assert all(re.fullmatch(r"etloom-[\d.]+\.dist-info", name) for name in unexpected)


def test_installations_of_one_clone_build_in_separate_folders() -> None:
    """scikit-build-core builds in a temporary folder unless one is configured, which two installations would share."""
    assert "build-dir" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def configure(build: Path, *options: str, **env: str) -> str:
    """What CMake says when it fails, as one line."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake on the PATH")
    command = [cmake, "-S", str(ROOT), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}", *options]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode != 0
    return " ".join(done.stderr.split())


@pytest.mark.slow
def test_without_a_compiler_the_error_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    make = shutil.which("make")
    if make is None:
        pytest.skip("no make on the PATH")
    (tmp_path / "bin" / "make").symlink_to(make)
    said = configure(tmp_path / "build", "-G", "Unix Makefiles", CXX="", PATH=str(tmp_path / "bin"))
    assert "etloom: no C++ compiler: install build-essential (Debian, Ubuntu)" in said


@pytest.mark.slow
def test_without_simdjson_and_network_the_error_names_what_to_install(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    said = configure(
        tmp_path / "build",
        "-DCMAKE_DISABLE_FIND_PACKAGE_simdjson=ON",
        https_proxy=nowhere,
        HTTPS_PROXY=nowhere,
        all_proxy=nowhere,
    )
    assert re.search(r"no simdjson, and v[\d.]+ could not be fetched \(.+\): install libsimdjson-dev", said)


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_maker", ROOT / "benchmarks" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def events_of(trace: Any) -> list[dict[str, Any]]:
    """The events that are written once a copy."""
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] not in ("M", "i") and event.get("cat") != "Trace"
    ]


@pytest.mark.slow
def test_a_replicated_kineto_trace_is_a_longer_one_of_the_same_kind(
    maker: ModuleType, data: Path, tmp_path: Path
) -> None:
    text = maker.read_text(data / "nccl_ddp" / "kineto_trace_0.json.gz")
    maker.make_kineto(text, tmp_path / "two.json", 2 * len(text))
    before, after = json.loads(text), json.loads((tmp_path / "two.json").read_text())
    one, two = events_of(before), events_of(after)
    size = len(one)
    assert two[:size] == one
    assert len(two) == 2 * size
    assert len(after["traceEvents"]) == len(before["traceEvents"]) + size
    assert {key: value for key, value in after.items() if key != "traceEvents"} == {
        key: value for key, value in before.items() if key != "traceEvents"
    }
    begin = min(event["ts"] for event in two[size:])
    assert begin > max(event["ts"] + event.get("dur", 0) for event in one)
    shift = {round((b["ts"] - a["ts"]) * 1000) for a, b in zip(one, two[size:], strict=True)}
    assert len(shift) == 1
    for a, b in zip(one, two[size:], strict=True):
        assert (b["name"].split("#")[0], b.get("dur"), b["tid"]) == (
            a["name"].split("#")[0],
            a.get("dur"),
            a["tid"],
        )
    recorded = Counter(
        args["Record function id"] for event in two if "Record function id" in (args := event.get("args", {}))
    )
    assert set(recorded.values()) == {1}
    device = [
        event["args"]["correlation"]
        for event in two
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    launches = {event["args"]["correlation"] for event in two if event["cat"] == "cuda_runtime"}
    assert len(set(device)) == len(device) == 2 * 3774
    assert set(device) <= launches
    steps = {event["name"] for event in two if event["name"].startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{step}" for step in range(4, 10)}


@pytest.mark.slow
def test_a_replicated_execution_trace_is_consistent(maker: ModuleType, data: Path, tmp_path: Path) -> None:
    text = maker.read_text(data / "nccl_ddp" / "torch_et_0.json.gz")
    maker.make_et(text, tmp_path / "two.json", 2 * len(text))
    before, after = json.loads(text)["nodes"], json.loads((tmp_path / "two.json").read_text())["nodes"]
    assert len(after) == 2 * len(before) - 3  # the process and its two threads are there once
    ids = [node["id"] for node in after]
    assert len(set(ids)) == len(ids)
    assert {node["ctrl_deps"] for node in after} <= set(ids)
    name = {node["id"]: node["name"] for node in after}
    parents = [
        Counter((node["name"], name[node["ctrl_deps"]]) for node in nodes) for nodes in (before, after)
    ]
    assert {pair for pair in parents[0] if not pair[0].startswith("[")} == {
        pair for pair in parents[1] if not pair[0].startswith("[")
    }
    attrs = [{attr["name"]: attr["value"] for attr in node["attrs"]} for node in after]
    recorded = Counter(attr["rf_id"] for attr in attrs if attr["rf_id"])
    assert set(recorded.values()) == {1}
    assert len(recorded) == 2 * 14388


def test_the_imports_of_benchmarks_resolve() -> None:
    """Benchmarks run code in child processes, where neither the linter nor mypy sees its imports."""
    pattern = re.compile(r"from (etloom[\w.]*) import ([\w, ]+)|import (etloom[\w.]*)")
    for path in (ROOT / "benchmarks").glob("*.py"):
        for package, names, module in pattern.findall(path.read_text(encoding="utf-8")):
            imported = importlib.import_module(package or module)
            for name in filter(None, (part.split(" as ")[0].strip() for part in names.split(","))):
                if not hasattr(imported, name):
                    importlib.import_module(f"{package}.{name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    ["import etloom; etloom.open('run')", "import runpy; runpy.run_module('etloom', run_name='__main__')"],
    ids=["api", "cli"],
)
def test_a_clone_without_the_compiled_part_is_one_line(tmp_path: Path, script: str) -> None:
    """Python started in a clone prefers its source folder to the package that is installed."""
    ignored = shutil.ignore_patterns("_native.*", "__pycache__")
    shutil.copytree(ROOT / "src" / "etloom", tmp_path / "etloom", ignore=ignored)
    # An editable installation, which has a finder of its own, is preferred even to the current folder.
    plain = (
        "import sys; sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", plain + script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "without the compiled part; start Python in another folder" in last and "make setup" in last
    assert "ModuleNotFoundError" not in done.stderr
