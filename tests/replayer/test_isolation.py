"""The process that may die of what it runs: what ends it, what it may not outlive, and what it may not import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etloom.core.errors import EtloomError
from etloom.replayer.compute import isolation

TRIES = """
import os, signal, sys, time
from etloom.replayer.compute import isolation
told, left_out = isolation.connect_to_parent()
for node in (7, 8):
    told(node)
    if node == 7 and node not in left_out:
        {seven}
{then}
"""


def command(folder: Path, monkeypatch: pytest.MonkeyPatch, seven: str, then: str = "") -> list[str]:
    (folder / "tried_apart.py").write_text(TRIES.format(seven=seven, then=then))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))
    return ["tried_apart"]


def test_operators_that_end_the_process_are_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly = command(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGSEGV)", "sys.exit(3)")
    assert isolation.run_isolated(deadly) == (3, {7: "it crashed the process: SIGSEGV"})


@pytest.mark.slow
def test_operators_that_never_end_are_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "OPERATOR_TIMEOUT_S", 0.5)
    assert isolation.run_isolated(command(tmp_path, monkeypatch, "time.sleep(60)")) == (
        0,
        {7: "it did not end within 0.5 s"},
    )


@pytest.mark.slow
def test_repeats_have_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "OPERATOR_TIMEOUT_S", 0.25)
    assert isolation.run_isolated(command(tmp_path, monkeypatch, "pass", "told(None); time.sleep(1.2)")) == (
        0,
        {},
    )


def test_a_killed_process_is_reported_as_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EtloomError, match="killed, probably because memory was exhausted"):
        isolation.run_isolated(command(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)"))


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("colorsys", "runpy", "etloom"):
        (run / f"{name}.py").write_text("import os; os._exit(9)")
    monkeypatch.chdir(run)
    assert isolation.run_isolated(command(tmp_path, monkeypatch, "import colorsys")) == (0, {})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_it_does_not_outlive_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    said = tmp_path / "pid"
    first = f"open({str(said)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(60)"
    asked = command(tmp_path, monkeypatch, first)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from etloom.replayer.compute import isolation; isolation.run_isolated({asked!r})",
        ]
    )
    try:
        until = time.monotonic() + 120
        while not (said.exists() and said.read_text().endswith(" ")) and time.monotonic() < until:
            time.sleep(0.02)
        child = int(said.read_text())
        parent.send_signal(how)
        assert parent.wait(120) == (128 + how if how == signal.SIGTERM else -how)
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 60
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(child)


def _runs(process: int) -> bool:
    """Not so once it is dead, though nobody may have asked for its exit status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
