"""Runs commands while one write, rename or sync below a folder fails; started with write_faults.c preloaded.

A command runs once without a fault, which counts its operations, then once per operation to fail. Afterwards each file
(or saved folder) must be the earlier one or the complete new one, nothing else may lie next to them, and the command
must have failed in one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import hashlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KINDS = ("write", "rename", "sync")
_SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True)
class Case:
    """A command to run under faults.

    Attributes:
        words: its arguments; OUT in them is the folder of the outputs.
        main: the module whose `main` runs it.
        old: names below OUT, of files that exist before and are replaced.
        split: folders in OUT whose entries are judged separately, not as a whole.
        ignored: what may stay after a failure.
        is_needed: whether the command must fail if an operation fails.
        before: arguments of a command that prepares OUT instead of ``old``.
        place: folder that is watched instead of OUT.
    """

    words: Sequence[str]
    main: str = "etloom.cli"
    old: Sequence[str] = ()
    split: Sequence[str] = ()
    ignored: Sequence[str] = ()
    is_needed: bool = True
    before: Sequence[str] = ()
    place: str = ""


def build_library(folder: Path) -> Path | None:
    """Compile the library to preload; return None without a compiler or on another system than Linux."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "write_faults.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
    return library


def find_violations(library: Path, folder: Path, cases: Sequence[Case], is_exhaustive: bool) -> list[str]:
    """Run the cases in one process with the library; return a line per broken promise, and per case without faults."""
    settings = {"LD_PRELOAD": str(library), "ETLOOM_CACHE": str(folder / "cache")}
    request = json.dumps([str(folder), is_exhaustive, [asdict(case) for case in cases]])
    result = subprocess.run(
        [sys.executable, __file__, request],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    violations: list[str] = json.loads(result.stdout)
    return violations


def _list_units(out: Path, split: Sequence[str] = ()) -> dict[str, str]:
    """Return {name: digest} of what lies in a folder; the entries of the folders ``split`` count separately."""
    units = {}
    for entry in sorted(out.iterdir()) if out.exists() else ():
        if entry.name in split:
            units |= {f"{entry.name}/{name}": digest for name, digest in _list_units(entry).items()}
            continue
        files = [entry] if entry.is_file() else sorted(file for file in entry.rglob("*") if file.is_file())
        content = b"".join(file.relative_to(out).as_posix().encode() + _read(file) for file in files)
        units[entry.name] = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    return units


def _read(file: Path) -> bytes:
    content = file.read_bytes()
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


class _Worker:
    """Runs the cases one after the other, in the process with the library.

    Args:
        folder: of all outputs.
        is_exhaustive: let each operation fail, alone and together with all after it; otherwise a few.
    """

    def __init__(self, folder: Path, is_exhaustive: bool) -> None:
        self.out, self._is_exhaustive = folder / "out", is_exhaustive
        self._library: Any = ctypes.CDLL(None)
        self._start = folder / "start"
        self._place = self.out
        self.violations: list[str] = []

    def check(self, case: Case) -> None:
        """Add the violations of a case."""
        self._prepare(case)
        self._place = Path(case.place) if case.place else self.out
        status, usual = self._run(case, KINDS[0], 0)
        counts = {kind: self._library.fault_count(number) for number, kind in enumerate(KINDS)}
        if status not in (0, 3):  # 3: undecided
            self.violations.append(f"{case.words}: status {status} without a fault: {usual}")
            return
        new = _list_units(self.out, case.split)
        self._run(case, KINDS[0], 0)
        unstable = {
            name for name, digest in _list_units(self.out, case.split).items() if digest != new.get(name)
        }
        if not sum(counts.values()):
            self.violations.append(f"{case.words}: writes nothing below {self._place}")
        for kind, count in counts.items():
            for number, is_lasting in self._choose(kind, count):
                status, messages = self._run(case, kind, number, is_lasting)
                name = f"{' '.join(case.words)}: {kind} {number}{'+' * is_lasting} of {count}"
                self.violations += [
                    f"{name}: {text}" for text in self._judge(case, status, messages, usual, new, unstable)
                ]

    def _choose(self, kind: str, count: int) -> list[tuple[int, bool]]:
        """Return (number of the operation to fail, whether all after it fail, as on a full disk)."""
        if self._is_exhaustive:
            return [
                *((number, False) for number in range(1, count + 1)),
                *([(1, True)] if kind == "write" else []),
            ]
        return [(number, kind == "write" and number == 1) for number in sorted({1, count}) if count]

    def _prepare(self, case: Case) -> None:
        shutil.rmtree(self._start, ignore_errors=True)
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        for name in case.old:
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_text("the earlier file")
        if case.before:
            self._call("etloom.cli", case.before)
        self.out.rename(self._start)

    def _run(self, case: Case, kind: str, number: int, is_lasting: bool = False) -> tuple[int, str]:
        """Run a command with a fault; return (status, stderr)."""
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self._start, self.out)
        if case.place:
            shutil.rmtree(case.place, ignore_errors=True)
        self._library.fault_arm(os.fsencode(self._place), KINDS.index(kind), number, int(is_lasting))
        try:
            status, messages = self._call(case.main, case.words)
        finally:
            self._library.fault_count(0)
        return status, messages

    def _call(self, module: str, words: Sequence[str]) -> tuple[int, str]:
        with _redirected() as log:
            try:
                status = importlib.import_module(module).main(
                    [word.replace("OUT", str(self.out)) for word in words]
                )
            except SystemExit as leave:
                status = leave.code if isinstance(leave.code, int) else 1
        return int(status or 0), log.getvalue()

    def _judge(
        self, case: Case, status: int, messages: str, usual: str, new: dict[str, str], unstable: set[str]
    ) -> Iterator[str]:
        old, now = _list_units(self._start), _list_units(self.out, case.split)
        lines = [line for line in messages.splitlines() if line not in usual]
        if case.is_needed and status != 1:
            yield f"status {status}: {lines}"
        if not case.is_needed and (status or set(now) != set(new)):
            yield f"status {status} although nothing that is needed failed: {lines}"
        if case.is_needed and len(lines) != 1:
            yield f"{len(lines)} lines: {lines[:4]}"
        for name, digest in now.items():
            if name.startswith(tuple(case.ignored)) or (name in unstable and digest != old.get(name)):
                continue
            if digest not in (old.get(name), new.get(name)):
                yield (
                    f"{name}: neither the earlier nor the new one"
                    if name in {*old, *new}
                    else f"{name} remains"
                )
        yield from (f"{name}: lost" for name in old if name not in now and name in new)


@contextlib.contextmanager
def _redirected() -> Iterator[io.StringIO]:
    """Send stdout to nowhere, and what is written to stderr, also by native code, to the yielded text."""
    log, kept = io.StringIO(), [os.dup(1), os.dup(2)]
    reader = os.memfd_create("stderr")
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        os.dup2(reader, 2)
        yield log
    finally:
        for stream, number, descriptor in ((sys.stdout, 1, kept[0]), (sys.stderr, 2, kept[1])):
            stream.flush()
            os.dup2(descriptor, number)
            os.close(descriptor)
        log.write(os.pread(reader, 1 << 20, 0).decode())
        os.close(reader)
        os.close(null)


def _main() -> None:
    folder, is_exhaustive, cases = json.loads(sys.argv[1])
    worker = _Worker(Path(folder), is_exhaustive)
    for case in cases:
        worker.check(Case(**case))
    print(json.dumps(worker.violations))


if __name__ == "__main__":
    _main()
