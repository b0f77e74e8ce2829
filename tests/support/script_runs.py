"""Runs the scripts of `scripts` alone and under `etloom collect`, and compares what they do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from etloom.collector.launcher import collection
from etloom.collector.launcher.collection import job_environment, prepare_command
from etloom.collector.launcher.finalization import finalize_run
from etloom.collector.options import CollectOptions
from etloom.collector.run_folder import list_windows
from etloom.collector.session.on_demand import REQUEST_FILE
from support.paths import ROOT

SCRIPTS = ROOT / "tests" / "collector" / "scripts"
_HELPERS = {
    "light",
    "tiny",
    "training",
    "server",
    "watched_imports",
}  # not compared with a run alone
STARTING = {"nested", "multiprocessing_spawn", "multiprocessing_forkserver"}
"""Scripts that start Pythons, which import torch again: too slow for every set of options."""
EXCEPTED = {("closed_descriptors", "stock observer")}
"""torch's observer goes on writing to the number of its descriptor, by then that of another file of the job."""
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in _HELPERS)
OPTIONS: dict[str, CollectOptions] = {
    "steps": CollectOptions("2:22"),
    "from the first step": CollectOptions(":18"),
    "every": CollectOptions(every=6, length=3),
    "on demand": CollectOptions(on_demand=16),
    "steps by time": CollectOptions(step_by="20ms", every=6, length=4),
    "ring": CollectOptions(ring=True, max_bytes=2 << 20),
    "stock observer": CollectOptions("2:22", observer="stock"),
    "all sources": CollectOptions("2:22", sources="kineto,et,shapes,stacks,memory,flight-recorder"),
}
TIMEOUT_S = 300.0
_EXTRA_S = 60.0  # a busy machine; without a hang no run takes that long
_LOG_LINES = ("etloom: ", "USDT:", "ERROR: External init callback")
_LOG_TEXT = (
    " Enabling Execution Trace Observer",
    " Disabling Execution Trace Observer",
    " gpuGetDeviceCount failed",  # a torch built with CUDA, without a GPU
)
_LIMITATION = "this torch cannot profile threads that Python code starts"  # before 2.8, in every recording
_ADDRESS = re.compile(r"0x[0-9a-f]+|(?<=pid=)\d+|Thread-\d+")


def profiles_all_threads() -> bool:
    """Return whether the installed torch can profile threads that Python code starts."""
    from torch._C._profiler import _ExperimentalConfig

    return "profile_all_threads" in str(_ExperimentalConfig.__init__.__doc__)


def without_limitations(messages: Sequence[str]) -> list[str]:
    """Return the messages of a recording except those that it has with an older torch only."""
    return [message for message in messages if _LIMITATION not in message]


@dataclass(frozen=True)
class Outcome:
    """What a script did: compared between runs, except for `seconds`, `windows` and `messages`."""

    status: int | None  # exit status; negative: signal; None: it was still running
    stdout: str
    stderr: str
    files: dict[str, int]  # in its current folder, with their sizes
    seconds: float
    windows: int = 0
    messages: tuple[str, ...] = ()


@dataclass
class Server:
    """A process of scripts/server.py."""

    process: subprocess.Popen[str]
    ends_early: bool = False  # scripts leave out the end of the interpreter, which takes longer than they do

    def run(self, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
        request: dict[str, Any] = {"words": words, "environment": dict(environment), "folder": str(folder)}
        request |= {"timeout_s": TIMEOUT_S, "ends_early": self.ends_early}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))


@contextmanager
def serve() -> Iterator[Server]:
    """Start a server that runs scripts without importing torch again each time."""
    environment = _job_environment(Path())
    command = [sys.executable, str(SCRIPTS / "server.py")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


@contextmanager
def jobs_in_forks(server: Server, place: Path) -> Iterator[None]:
    """Let `collect` run scripts in forks of the server in this block; their streams are place/stdout and place/stderr.

    A new Python would import torch for more than a second. The launch itself is the subject of other tests.
    """
    folder = place / "job"
    folder.mkdir(parents=True)

    def run_in_fork(words: Sequence[str], environment: Mapping[str, str], _on_usr2: Any = None) -> int:
        assert words[0] == sys.executable, words
        script = list(words[1:])
        if script[0] == "-c":
            (place / "script.py").write_text(script[1])
            script[:2] = [str(place / "script.py")]
        status = server.run(script, environment, folder)["status"]
        assert status is not None, "the job did not end"
        return int(status if status >= 0 else 128 - status)

    original = collection.run_command
    collection.run_command = run_in_fork
    try:
        yield
    finally:
        collection.run_command = original


@dataclass
class Comparison:
    """Runs scripts alone, once each, and under collect; `differences` lists what was not the same."""

    scratch: Path
    server: Server | None = None
    runs: int = 0
    recorded: int = 0
    differences: list[str] = field(default_factory=list)  # of all scripts so far
    _alone: dict[tuple[str, ...], Outcome] = field(default_factory=dict)

    def compare(self, name: str, options: str, *arguments: str) -> Outcome:
        """Run a script under one set of options; return what it did."""
        words = (name, *arguments)
        if words not in self._alone:
            self._alone[words] = self.run(words, None)
        alone, collected = self._alone[words], self.run(words, OPTIONS[options])
        self.runs += 1
        self.recorded += collected.windows > 0
        for part in ("status", "stdout", "stderr", "files"):
            before, after = getattr(alone, part), getattr(collected, part)
            if before != after:
                self.differences.append(
                    f"{' '.join(words)} ({options}): {part}: {_first_difference(before, after)}"
                )
        if collected.status is None:
            self.differences.append(
                f"{' '.join(words)} ({options}): was still running after {TIMEOUT_S:.0f} s"
            )
        if collected.seconds > alone.seconds + _EXTRA_S:
            self.differences.append(
                f"{' '.join(words)} ({options}): {collected.seconds:.0f} s instead of {alone.seconds:.0f}"
            )
        return collected

    def run(self, words: tuple[str, ...], options: CollectOptions | None) -> Outcome:
        """Run a script in an empty folder, under collect if there are ``options``."""
        place = self.scratch / "run"
        folder, out = place / "job", place / "traces"
        folder.mkdir(parents=True)
        environment = _job_environment(folder)
        command = [str(SCRIPTS / f"{words[0]}.py"), *words[1:]]
        if options is not None:
            out.mkdir()
            job = prepare_command([sys.executable, *command], out, options)
            recording = replace(job.options, supervised=True)
            environment |= job_environment(recording)
            Path(recording.scratch).mkdir()
            if options.on_demand is not None:
                (out / REQUEST_FILE).touch()
        start = self.server.run if self.server is not None else _start
        end = start(command, environment, folder)
        messages: tuple[str, ...] = ()
        if options is not None:
            messages = finalize_run(recording, end["status"] or 0).warnings
        texts = [_comparable((place / name).read_text(errors="replace")) for name in ("stdout", "stderr")]
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        windows = (
            [path for path in (out, *list_windows(out)) if (path / "run.json").exists()] if options else []
        )
        shutil.rmtree(place)
        return Outcome(end["status"], *texts, files, end["seconds"], len(windows), messages)


def _start(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Run a script in a new Python, as `etloom collect` does."""
    start = time.monotonic()
    with (folder.parent / "stdout").open("w") as stdout, (folder.parent / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    return {"status": status, "seconds": time.monotonic() - start}


def _job_environment(folder: Path) -> dict[str, str]:
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "XDG_CACHE_HOME", "ETLOOM_OBSERVER_CACHE")
        if name in os.environ
    }
    # So that `Thread-N` and sets of names are in the same order in every run.
    return {**kept, "JOB_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def _comparable(text: str) -> str:
    """Return a text without messages of the collector and of torch's profilers, and without addresses."""
    lines = text.splitlines(keepends=True)
    kept = [
        line for line in lines if not (line.startswith(_LOG_LINES) or any(part in line for part in _LOG_TEXT))
    ]
    return _ADDRESS.sub("*", "".join(kept))


def _first_difference(before: Any, after: Any) -> str:
    if not isinstance(before, str):
        return f"{before} alone, {after} under collect"
    lines = zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    pair = next(((a, b) for a, b in lines if a != b), ("", ""))
    return f"{pair[0][:1500]!r} alone, {pair[1][:1500]!r} under collect"
