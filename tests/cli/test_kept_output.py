"""Outputs of info and report are shown again for a run that did not change, and only then."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom import cli
from etloom.cli import error_handling, kept_output, run_arguments
from etloom.cli import info as info_verb
from etloom.core import registry
from etloom.formats import parquet
from support import small_traces


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose files count as old enough, with a cache of its own."""
    monkeypatch.setenv("ETLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_output, "_SETTLED_NS", 0)
    return small_traces.write_run(tmp_path / "run")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of the runs that verbs open."""
    paths: list[Path] = []
    open_job = run_arguments.open_job

    def record(path: Path, *arguments: Any, **options: Any) -> Any:
        paths.append(path)
        return open_job(path, *arguments, **options)

    for verb in ("info", "report"):
        monkeypatch.setattr(importlib.import_module(f"etloom.cli.{verb}"), "open_job", record)
    return paths


def print_output(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, str]:
    assert cli.main([str(word) for word in words]) == 0
    output = capsys.readouterr()
    return output.out, output.err


@pytest.mark.parametrize("options", [(), ("--format", "json"), ("--format", "prometheus")])
def test_info_of_an_unchanged_run_opens_nothing(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    first = print_output(capsys, "info", run, *options)
    assert print_output(capsys, "info", run, *options) == first
    assert len(opened) == 1


def test_report_is_written_again(run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    first = print_output(capsys, "report", run)
    page = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    assert print_output(capsys, "report", run) == first
    assert (run / "report.html").read_bytes() == page
    assert len(opened) == 1


_DESCRIBE = """
import ctypes, os, sys, threading
from etloom import cli
from etloom.cli import info
assert "polars" not in sys.modules
os.cpu_count = lambda: 2
describe = info._describe
def trace(*arguments):
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(64), ctypes.c_size_t()
    libc.pthread_self.restype = ctypes.c_ulong
    libc.pthread_getattr_np(ctypes.c_ulong(libc.pthread_self()), attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    is_main = threading.current_thread() is threading.main_thread()
    print("main" if is_main else f"other {size.value >> 20}", file=sys.stderr)
    return describe(*arguments)
info._describe = trace
sys.exit(cli.main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc for the size of a stack")
@pytest.mark.parametrize(
    ("threads", "copies", "thread"), [("2", 1, "other 16"), ("1", 1, "main"), ("2", 64, "main")]
)
def test_a_small_run_is_described_in_a_thread_of_polars_with_a_large_stack(
    run: Path, threads: str, copies: int, thread: str
) -> None:
    for number in range(2, copies):
        (run / f"kineto_trace_{number}.json").write_bytes((run / "kineto_trace_1.json").read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", _DESCRIBE, "info", str(run)],
        capture_output=True,
        text=True,
        env={**os.environ, "POLARS_MAX_THREADS": threads},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == thread
    assert "kineto" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_report_with_few_threads_ends(run: Path, threads: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etloom", "report", run, "--no-cache", "--jobs", threads],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").exists()


def test_messages_are_printed_again(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    small_traces.write_run(run / "other")
    first = print_output(capsys, "info", run)
    assert "other" in first[1]
    assert print_output(capsys, "info", run) == first
    assert len(opened) == 1


def list_kept_outputs(run: Path) -> list[Path]:
    """The entries of outputs; on a busy machine the cache also holds ranks, which were slow to read."""
    entries = (run.parent / "cache").glob("*/meta.json")
    return [path for path in entries if "text" in json.loads(path.read_text())]


def change_file(run: Path) -> None:
    path = run / "kineto_trace_0.json"
    path.write_text(path.read_text().replace('"ts"', '"ts" ', 1))


def replace_file(run: Path) -> None:
    path = run / "kineto_trace_0.json"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("\n ", " \n", 1))
    os.utime(path, ns=times)  # size and time are the same; the time of change is not


def add_file(run: Path) -> None:
    (run / "notes.txt").write_text("text")


def add_inner_file(run: Path) -> None:
    (run / "inner").mkdir()
    (run / "inner" / "kineto_trace_0.json").write_text("{}")


def remove_file(run: Path) -> None:
    (run / "torch_et_1.json").unlink()


@pytest.mark.parametrize("change", [change_file, replace_file, add_file, add_inner_file, remove_file])
def test_a_changed_run_is_opened_again(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str], change: Any
) -> None:
    print_output(capsys, "info", run)
    change(run)
    print_output(capsys, "info", run)
    assert len(opened) == 2


def test_changed_tables_next_to_a_manifest_are_opened_again(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    saved = run.parent / "saved"
    parquet.writer.write(etloom.open(run), saved)
    print_output(capsys, "info", saved / "meta.json")
    (saved / "rank=0" / "events.parquet").write_bytes(b"damaged")
    assert cli.main(["info", str(saved / "meta.json")]) == 1
    assert len(opened) == 2


def test_messages_are_kept_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_handling, "redact", lambda text: text.replace("secret", "***"))
    with error_handling.recording_messages() as messages:
        error_handling.print_message("https://host/?token=secret")
    assert messages == ["https://host/?token=***"]


def test_other_options_are_other_outputs(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[object, ...]] = [
        ("info", run),
        ("info", run, "--strict"),
        ("info", run, "--step-name", "x"),
        ("info", run / "kineto_trace_0.json"),
        ("info", run, "--no-cache"),
        ("info", run, "--no-cache"),
        ("info", run, "--format", "csv"),
        ("info", run, "--format", "csv"),
    ]
    for command in commands:
        print_output(capsys, *command)
    monkeypatch.setenv("COLUMNS", "500")
    print_output(capsys, "info", run)
    assert len(opened) == len(commands) + 1


def test_a_file_that_may_still_change_is_opened_again(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_output, "_SETTLED_NS", 10**12)
    print_output(capsys, "info", run)
    print_output(capsys, "info", run)
    assert len(opened) == 2


def test_a_run_that_changes_meanwhile_is_opened_again(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = info_verb._describe

    def change(*arguments: Any) -> kept_output.Output:
        output = describe(*arguments)
        change_file(run)
        return output

    monkeypatch.setattr(info_verb, "_describe", change)
    print_output(capsys, "info", run)
    assert not list_kept_outputs(run)


def test_outputs_with_plugins_are_not_kept(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = registry.list_entry_points

    def list_points(group: str) -> Any:
        return ["a plugin"] if group == "etloom.exports" else points(group)

    monkeypatch.setattr(registry, "list_entry_points", list_points)
    print_output(capsys, "info", run, "--no-cache")
    with monkeypatch.context() as patch:
        patch.setattr(info_verb, "_describe", lambda *_: kept_output.Output(""))
        print_output(capsys, "info", run)
    print_output(capsys, "info", run)
    assert len(opened) == 2


def test_a_damaged_entry_is_computed_again(
    run: Path, opened: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first = print_output(capsys, "info", run)
    (entry,) = list_kept_outputs(run)
    entry.write_text(entry.read_text()[:-5])
    assert print_output(capsys, "info", run) == first
    assert len(opened) == 2
    assert print_output(capsys, "info", run) == first
    assert len(opened) == 2, "the entry was replaced"


def test_an_output_with_an_error_is_not_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "kineto_trace_1.json").write_text((run / "kineto_trace_1.json").read_text()[:900])
    for _ in range(2):
        assert cli.main(["info", str(run), "--strict"]) == 1
        assert "read.truncated" in capsys.readouterr().err


def test_a_kept_output_needs_no_library(run: Path) -> None:
    code = (
        "import sys\nfrom etloom.cli import kept_output, main\nkept_output._SETTLED_NS = 0\n"
        f"status = main(['info', {str(run)!r}])\nprint(sorted({{'polars', 'numpy', 'rich'}} & set(sys.modules)))"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert outputs[1].splitlines()[:-1] == outputs[0].splitlines()[:-1]
    assert [text.splitlines()[-1] for text in outputs] == ["['numpy', 'polars', 'rich']", "[]"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["info", "link"])
def test_small_work_imports_no_masked_arrays(run: Path, tmp_path: Path, verb: str) -> None:
    """Their import takes 10 ms; polars needs them to convert an array, `arrays.to_series` does not."""
    code = "import sys; from etloom import cli; status = cli.main(sys.argv[1:]); assert 'numpy.ma' not in sys.modules"
    words = (
        ["info", run, "--no-cache"] if verb == "info" else ["link", run, "--out", tmp_path / "linked.parquet"]
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
