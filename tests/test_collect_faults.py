"""What goes wrong around a recording costs as little as it can: kills, full disks, containers, questions too late."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from etloom.collector import aftermath, ends, files, leftovers, seen
from etloom.collector.options import Options
from etloom.collector.window import Window

HERE = socket.gethostname()


def test_threads_of_a_process_leave_what_it_saw_at_once(tmp_path: Path) -> None:
    facts = seen.Seen(str(tmp_path))
    left: list[bool] = []

    def leave() -> None:
        for number in range(300):
            facts.facts["missed"] = ["x" * number]
            left.append(facts.leave())

    threads = [threading.Thread(target=leave) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [True] * 900
    assert [found["missed"] for found in seen.taken(tmp_path)] == [["x" * 299]]


def test_ranks_in_containers_are_all_process_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    options = Options(str(tmp_path), f"{tmp_path}/.etloom-host-9-abc", et=False, kineto=False, every=10)
    first, second = Window(options), Window(options)
    for rank, window in enumerate((first, second)):
        window.prepare()
        (window._folder / "kineto.json").write_text(str(rank))
        assert leftovers.process_of(window._folder) == 1
    second.abandon()
    assert [path.read_text() for path in Path(options.scratch).glob("*/kineto.json")] == ["0"]
    for rank in range(2):
        facts = seen.Seen(options.scratch)
        facts.facts |= {"rank": rank, "ended": rank == 1}
        assert facts.leave()
    processes = seen.taken(Path(options.scratch))
    assert [(facts["rank"], facts["pid"]) for facts in processes] == [(0, 1), (1, 1)]
    for rank in range(2):
        seal = {"rank": rank, "host": socket.gethostname(), "pid": 1, "job": {"launch": "a"}, "ended": None}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(seal | {"world_size": 2, "start_ns": 1}))
    leftovers.note(tmp_path, "a", 0, processes, tmp_path)
    assert [facts["ended"]["how"] for facts in files.sealed_ranks(tmp_path)] == ["killed", "exited"]


def test_who_was_killed_after_the_seal_lost_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / f".etloom-{HERE}-1-abc"
    folder = scratch / f"{2**22 + 1}-{'0' * 12}"
    folder.mkdir(parents=True)
    (folder / ends.STARTED).touch()
    facts = {
        "rank": 0,
        "world_size": 1,
        "host": HERE,
        "pid": 2**22 + 1,
        "start_ns": 10**18,
        "end_ns": 10**18 + 9,
    }
    facts |= {
        "steps": [3, 4],
        "restart": 0,
        "files": ["observer_0.etob"],
        "ended": None,
        "job": {"launch": "a"},
    }
    (folder / ends.NOTE).write_text(json.dumps(facts | {"window": "."}))
    (tmp_path / "rank_0.json").write_text(json.dumps(facts))
    (tmp_path / "observer_0.etob").write_text("whole")
    options = Options(str(tmp_path), str(scratch), supervised=True)
    windows, ranks, warnings = aftermath.gather(options, 137)
    assert (windows, ranks, warnings) == ([tmp_path], [0], [])
    assert not scratch.exists() and (tmp_path / "observer_0.etob").read_text() == "whole"


def test_who_is_killed_as_he_prunes_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3):
        (tmp_path / f"step_{step}").mkdir()
        for name in (
            "observer_0.etob",
            "kineto_trace_0.json.gz",
            "torch_et_0.json.gz",
            "rank_0.json",
            "run.json",
        ):
            (tmp_path / f"step_{step}" / name).write_text("{}")
        os.utime(tmp_path / f"step_{step}" / "rank_0.json", (step, step))
    unlink = Path.unlink
    for _ in range(3):
        left = 1

        def killed(path: Path, missing_ok: bool = False) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            unlink(path, missing_ok)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Path, "unlink", killed)
            files.prune(tmp_path, 0, 2)
        # Whatever there is of the window still has its seal, so that the next one sees it.
        assert (tmp_path / "step_0" / "rank_0.json").exists()
    assert files.prune(tmp_path, 0, 2)
    assert [place.name for place in files.windows_in(tmp_path)] == ["step_1", "step_2"]
