"""The build of the native observer: what a failure costs the next process, and which versions of torch it fits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from etloom.collector.observer import BuildError, build_library, native_build  # noqa: E402

Call = Callable[..., tuple[int, str, str]]
FAILING = """#!/bin/sh
echo call >> "$0.calls"
echo "operators.cpp:9: error: no member named 'handle'" >&2
exit 1
"""
HEADERS_VARIABLE = "ETLOOM_TORCH_HEADERS"


class Compiler:
    """A C++ compiler that always fails, and counts how often it is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text(FAILING)
        self.path.chmod(0o755)

    @property
    def calls(self) -> int:
        calls = Path(f"{self.path}.calls")
        return calls.read_text().count("call") if calls.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setenv("ETLOOM_OBSERVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "cc"))
    return Compiler(tmp_path / "cc")


def test_a_failed_build_is_not_repeated_by_the_next_process(compiler: Compiler) -> None:
    announced: list[int] = []
    chosen = [native_build.build_if_native("native", lambda: announced.append(1)) for _ in range(3)]
    assert (compiler.calls, len(announced)) == (1, 1)
    assert [observer for observer, _ in chosen] == ["stock"] * 3
    for _, warnings in chosen:
        assert "no member named 'handle'" in warnings[0] and "\n" not in warnings[0]
    assert "etloom collect --build" in chosen[1][1][0] and "--build" not in chosen[0][1][0]


def test_the_option_build_always_compiles(compiler: Compiler, call: Call) -> None:
    for calls in (1, 2):
        status, _, err = call("collect", "--build")
        assert status != 0 and "no member named 'handle'" in err and compiler.calls == calls


def test_another_compiler_ends_a_failure(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        with pytest.raises(BuildError):
            build_library()

    build()
    compiler.path.write_text(FAILING + "# updated\n")
    build()
    assert compiler.calls == 2
    monkeypatch.setenv("CXX", f"{compiler.path} --flag")
    build()
    assert compiler.calls == 3
    build()
    assert compiler.calls == 3


def test_a_failure_expires_and_a_damaged_record_of_it_is_ignored(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(BuildError):
        build_library()
    (failure,) = (tmp_path / "cache").glob("*.failure")
    text = failure.read_text()
    for calls, content, age_s in ((2, text, 700), (3, text, -700), (4, "half", 0), (5, "", 0)):
        failure.write_text(content)
        moment = failure.stat().st_mtime - age_s
        os.utime(failure, (moment, moment))
        assert native_build.find_failure() is None
        with pytest.raises(BuildError):
            build_library()
        assert compiler.calls == calls
    assert native_build.find_failure() is not None


def test_a_build_that_succeeds_removes_the_failure(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "_try_library", lambda *_: None)  # it would be an empty file
    with pytest.raises(BuildError):
        build_library()
    compiler.path.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n: > "$out"\n'
    )
    library = build_library()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(["lock", library.name])


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["observer", "fake_world"])
def test_the_sources_fit_the_headers_of_other_versions(folder: str) -> None:
    """$ETLOOM_TORCH_HEADERS names folders torch/include of unpacked wheels, separated by colons."""
    import torch

    headers = os.environ.get(HEADERS_VARIABLE)
    if not headers:
        pytest.skip(f"no headers of other versions of torch: {HEADERS_VARIABLE} is not set")
    installed = str(Path(torch.__file__).parent / "include")
    sources = Path(native_build.__file__).parents[1] / folder / "native"
    words = [word for source in sorted(sources.glob("*.cpp")) for word in ("-include", str(source))]
    for include in headers.split(os.pathsep):
        flags = [flag.replace(installed, include) for flag in native_build._compiler_flags()]
        command = [*native_build._compiler_words(), "-fsyntax-only", "-Werror", *words]
        done = subprocess.run(
            [*command, "-x", "c++", os.devnull, "-x", "none", *flags],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{include}: {done.stderr[:2000]}"
