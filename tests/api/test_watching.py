"""Watching a job by the state that its ranks keep: progress, stalls, slow ranks, and the command's exit status."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.analyses.hangs import HangCause
from etloom.analyses.hangs.progress import Observation
from etloom.api.watching import JobWatcher
from etloom.cli import main
from etloom.cli.watch import _report_slowdown

NOW = time.time_ns()
MS = 1_000_000


def write_state(run: Path, rank: int, calls: int, **options: Any) -> None:
    """Write the state of a rank that has made some calls of one all-reduce per 100 ms; the last may be unfinished."""
    late_ns, unfinished = options.pop("late_ns", 0), options.pop("unfinished", False)
    entries = [
        {
            "collective_seq_id": number,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "input_dtypes": ["Float"],
            "input_sizes": [[10]],
            "output_sizes": [[10]],
            "state": "scheduled",
            "retired": not (unfinished and number == calls),
            "is_p2p": False,
            "time_created_ns": NOW + number * 100 * MS + late_ns,
        }
        for number in range(1, calls + 1)
    ]
    process = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "written_ns": time.time_ns(),
        "interval_s": 60,
        "steps": calls,
        "step_ends_ns": [NOW + number * 100 * MS for number in range(calls)],
        **options,
    }
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    dump = {"entries": entries, "pg_config": config, "pg_status": {}, "process": process}
    folder = run / ".watch"
    folder.mkdir(exist_ok=True)
    (folder / f"fr_trace_{rank}.json").write_text(json.dumps(dump))


@pytest.fixture
def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def crashed_run(tmp_path: Path, ended_process: int) -> Path:
    """A job whose rank 1 was killed while the others wait for it."""
    for rank in range(3):
        write_state(
            tmp_path,
            rank,
            20 + (rank != 1),
            unfinished=rank != 1,
            **{"pid": ended_process} if rank == 1 else {},
        )
    return tmp_path


def test_a_healthy_job_is_described(tmp_path: Path) -> None:
    for rank in range(3):
        write_state(tmp_path, rank, 20)
    seen = JobWatcher(tmp_path).observe()
    assert seen is not None
    assert (seen.steps, seen.step_ns, seen.cause, seen.has_stalled) == (20, 100 * MS, None, False)
    assert seen.lateness_ns.keys() == {0, 1, 2}


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        write_state(tmp_path, rank, 20, late_ns=40 * MS * (rank == 2))
    seen = JobWatcher(tmp_path).observe()
    assert seen is not None
    assert seen.cause is not None
    assert (seen.cause.kind, seen.cause.ranks) == ("slow", (2,))


def test_a_job_without_progress_has_stalled(tmp_path: Path) -> None:
    for rank in range(3):
        write_state(tmp_path, rank, 20, frames=["read (/x/torch/utils/data/dataloader.py:1)"])
    watcher = JobWatcher(tmp_path, stall_s=1e-9)
    watcher.observe()
    seen = watcher.observe()
    assert seen is not None
    assert seen.cause is not None
    assert seen.cause.kind == "host"
    assert "data loading" in seen.cause.sentence


def test_a_change_of_the_step_time_is_detected(tmp_path: Path) -> None:
    ends = [*range(0, 2000, 100), *range(2000, 4000, 200)]
    for rank in range(3):
        write_state(tmp_path, rank, 20, step_ends_ns=[NOW + at * MS for at in ends])
    seen = JobWatcher(tmp_path).observe()
    assert seen is not None
    assert seen.step_change == pytest.approx(2, rel=0.1)


def test_a_host_that_waits_in_the_store_is_not_in_communication(tmp_path: Path) -> None:
    frames = ["barrier (/x/torch/distributed/c10d.py:1)", "train (/job/train.py:7)"]
    for rank in range(3):
        write_state(tmp_path, rank, 20, frames=frames)
    watcher = JobWatcher(tmp_path, stall_s=1e-9)
    watcher.observe()
    seen = watcher.observe()
    assert seen is not None
    assert seen.cause is not None
    assert seen.cause.sentence.endswith("the main thread is in train (/job/train.py:7)")


def test_files_that_are_being_written_are_left_out(tmp_path: Path) -> None:
    for rank in range(3):
        write_state(tmp_path, rank, 20)
    state = (tmp_path / ".watch" / "fr_trace_0.json").read_text()
    (tmp_path / ".watch" / ".fr_trace_0.json.0123abcd").write_text(state)
    watcher = JobWatcher(tmp_path)
    seen = watcher.observe()
    assert seen is not None
    kept = {file.name for file in watcher.keep_incident(seen).iterdir()}
    assert kept == {"cause.json", *(f"fr_trace_{rank}.json" for rank in range(3))}


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("written_ns", "x"),
        ("interval_s", float("nan")),
        ("frames", 5),
        ("addresses", [5]),
        ("steps", [1]),
        ("step_ends_ns", ["a", "b"]),
        ("pid", 1 << 70),
    ],
)
def test_facts_of_other_types_are_left_out(tmp_path: Path, fact: str, value: Any) -> None:
    for rank in range(3):
        write_state(tmp_path, rank, 20, **{fact: value})
    assert JobWatcher(tmp_path).observe() is not None
    assert "unexpected type" in etloom.hangs(tmp_path).problems[0]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[Any]]]:
    """The URL of a server on this host, and the bodies that it has received."""
    bodies: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", bodies
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_crash_is_reported_kept_and_sent(
    crashed_run: Path, webhook: tuple[str, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, bodies = webhook
    assert main(["watch", str(crashed_run), "--webhook", url]) == 3
    assert "rank 1 crashed" in capsys.readouterr().out
    assert [(body["kind"], body["ranks"]) for body in bodies] == [("crashed", [1])]
    (incident,) = (crashed_run / "incidents").iterdir()
    assert json.loads((incident / "cause.json").read_text())["ranks"] == [1]
    assert len(etloom.hangs(incident).ranks) == 3


def test_a_job_that_ends_is_a_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        write_state(tmp_path, rank, 20, finished=True)
    assert main(["watch", str(tmp_path)]) == 0
    assert "20 steps, step time 100.0 ms" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["", "step_3"])
def test_a_job_that_ended_without_being_watched_is_one_line(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "run.json").write_text(json.dumps({"command": ["python"], "returncode": 0}))
    assert main(["watch", str(tmp_path)]) == 1
    errors = capsys.readouterr().err
    assert "has ended and was recorded without --watch" in errors
    assert f"etloom collect --watch --overwrite --out {tmp_path} -- COMMAND" in errors


def test_what_a_watcher_waits_for_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job ends without --watch while somebody waits for it."""
    (tmp_path / "run.json").write_text(json.dumps({"command": ["python"], "returncode": None}))

    looks = iter(("before the job ended", "after it"))
    observe = JobWatcher.observe

    def end_before_the_second_look(watcher: JobWatcher) -> Observation | None:
        if next(looks) == "after it":
            (tmp_path / "run.json").write_text(json.dumps({"command": ["python"], "returncode": 1}))
        return observe(watcher)

    monkeypatch.setattr(JobWatcher, "observe", end_before_the_second_look)
    assert main(["watch", str(tmp_path)]) == 1
    waiting, ended = capsys.readouterr().err.splitlines()
    assert "waiting for a job that is started with: etloom collect --watch --out" in waiting
    assert "without --watch" in ended


def test_a_wrong_url_is_a_usage_error(tmp_path: Path) -> None:
    assert main(["watch", str(tmp_path), "--webhook", "file:///etc/passwd"]) == 2


def test_messages_of_one_time_are_printed_in_a_fixed_order(capsys: pytest.CaptureFixture[str]) -> None:
    evidence = pl.DataFrame(schema={"rank": pl.Int64, "text": pl.String})
    for name in "abcdefgh":
        cause = HangCause("slow", (2,), f"rank {name} is slow", evidence)
        observation = Observation(20, 1e8, {}, 2.0, cause, False, False, 0.0)
        _report_slowdown(observation, set(), print, None, None)
    lines = capsys.readouterr().out.splitlines()
    assert ["changed" in line for line in lines] == [True, False] * 8


ANSWERS = {
    "not HTTP": lambda peer: peer.sendall(b"SSH-2.0-OpenSSH\r\n" * 5),
    "many headers": lambda peer: peer.sendall(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n"),
    "a long header": lambda peer: peer.sendall(b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000 + b"\r\n\r\n"),
    "a byte at a time": lambda peer: [peer.sendall(b"H") or time.sleep(0.1) for _ in range(600)],
    "cut": lambda peer: peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n1"),
    "nothing": lambda peer: time.sleep(60),
    "garbage": lambda peer: peer.sendall(bytes(range(256)) * 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_webhook_of_any_kind_loses_no_incident(
    kind: str, crashed_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state is saved first, the status is 3, and a server that never ends its answer does not delay it."""
    monkeypatch.setattr("etloom.cli.watch._WEBHOOK_TIMEOUT_S", 0.5)
    seen = []

    def answer(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer, contextlib.suppress(OSError):
            seen.append(list(crashed_run.glob("incidents/*/cause.json")))
            peer.recv(1 << 16)
            ANSWERS[kind](peer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        start = time.monotonic()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        assert main(["watch", str(crashed_run), "--webhook", url]) == 3
    assert time.monotonic() - start < 15
    assert [len(files) for files in seen] == [1]
    for thread in threading.enumerate():
        if "_post" in thread.name:
            thread.join(2)  # a request that fails later prints nothing more
    err = capsys.readouterr().err
    assert "internal error" not in err and err.count("etloom: webhook") <= 1


def test_an_incident_that_cannot_be_saved_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, 0, 20)
    watcher = JobWatcher(tmp_path)
    seen = watcher.observe()
    assert seen is not None

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match=r"No space left on device: '\S+/incidents/\d+-\d+'"):
        watcher.keep_incident(seen)
    assert list((tmp_path / "incidents").iterdir()) == []
