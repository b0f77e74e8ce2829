"""Holds the opened runs in memory while agents ask about them, and checks the paths that agents may open."""

from __future__ import annotations

import difflib
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from etloom.cli.limited_process import LimitedProcess
from etloom.core.errors import EtloomError

if TYPE_CHECKING:
    from etloom.api.questions import Difference
    from etloom.cli.mcp.bounded_text import Answer
    from etloom.core.trace import Job
from collections.abc import Iterator
from contextlib import contextmanager

MAX_OPEN_RUNS = 4
"""Runs kept in memory; the one that was used longest ago is closed first."""
MAX_MEMORY = 2 << 30
"""Bytes that a question in a process of its own may use beyond the opened run."""
_MAX_ANSWERS = 1024
_MAX_CACHED_QUESTION = 2000
_LISTED_LEVELS = 2
_MAX_LISTED = 1000


class OpenedRuns:
    """The runs below the root folders that agents may open; each run is opened once, and answers are cached.

    Args:
        roots: folders and files that may be opened.
        prepare: function that is called in the background with each opened run, for example to compute what the first
            questions need.

    Attributes:
        turns: the order of questions and preparation.

    Raises:
        EtloomError: a root does not exist.
    """

    def __init__(
        self, roots: Sequence[Path], prepare: Callable[[OpenedRuns, Path], None] | None = None
    ) -> None:
        missing = [root for root in roots if not root.exists()]
        if missing:
            raise EtloomError("no such file or folder", where=missing[0], remedy="check the path")
        self.roots = [root.resolve() for root in roots]
        self.turns = Turns()
        self._prepare = prepare
        self._jobs: OrderedDict[Path, Job] = OrderedDict()
        self._processes: dict[Path, LimitedProcess] = {}
        self._differences: dict[tuple[Path, Path], Difference] = {}
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._opening: dict[Path, threading.Lock] = {}
        self._lock = threading.RLock()

    def resolve(self, run: str) -> Path:
        """Return the path of a run from an absolute path or a path relative to a root; an empty text is the first root.

        Raises:
            EtloomError: it does not exist, or it or a file in it is outside of the roots.
        """
        path = self._find_path(run) if run else self.roots[0]
        if path is None:
            near = difflib.get_close_matches(run, self.list_runs(), n=1, cutoff=0.5)
            suggestion = f"did you mean {near[0]!r}? " if near else ""
            raise EtloomError(
                f"{run!r} is not a path below the roots", remedy=suggestion + self.describe_roots()
            )
        outside = self._find_link_outside(path)
        if outside is not None:
            raise EtloomError(
                f"{outside.name} in {run!r} is a link to outside of the roots, or unreadable",
                remedy="remove it",
            )
        return path

    def get_job(self, run: str) -> Job:
        """Return the linked Job of a run, opened on first use.

        Raises:
            EtloomError: the path is refused or the run cannot be read.
        """
        import etloom

        path = self.resolve(run)
        with self._lock:
            opening = self._opening.setdefault(path, threading.Lock())
        with opening:  # questions about other runs do not wait
            with self._lock:
                if path in self._jobs:
                    self._jobs.move_to_end(path)
                    return self._jobs[path]
            job = etloom.open(path, use_cache=False)  # the server writes nothing
            with self._lock:
                self._jobs[path] = job
                while len(self._jobs) > MAX_OPEN_RUNS:
                    oldest, _ = self._jobs.popitem(last=False)
                    if process := self._processes.pop(oldest, None):
                        process.close()
                    self._differences.clear()
                    self._answers.clear()  # a question may name a run by several paths
        if self._prepare is not None:
            threading.Thread(target=self._prepare, args=(self, path), daemon=True).start()
        return job

    def get_process(self, run: str) -> LimitedProcess:
        """Return the process for questions about a run that may need any time and memory; it opens the run itself.

        Raises:
            EtloomError: the path is refused or the run cannot be read.
        """
        import etloom
        from etloom.core.machine import available_memory

        self.get_job(run)
        path = self.resolve(run)
        with self._lock:
            if path not in self._processes:
                memory = min(MAX_MEMORY, available_memory() // 2)
                open_run = functools.partial(etloom.open, path, use_cache=False)
                self._processes[path] = LimitedProcess(open_run, memory)
            return self._processes[path]

    def close(self) -> None:
        """End the processes for questions, and with the next piece of work all preparation."""
        for process in list(self._processes.values()):
            process.close()
        self._jobs.clear()

    def is_open(self, path: Path) -> bool:
        """Return whether the run at a path (a result of `resolve`) is in memory."""
        return path in self._jobs

    def get_difference(self, before: str, after: str) -> Difference:
        """Return the comparison of two runs by `etloom.diff`, computed on first use.

        Raises:
            EtloomError: a path is refused or a run cannot be read.
        """
        import etloom

        key = self.resolve(before), self.resolve(after)
        first, second = self.get_job(before), self.get_job(after)
        with self._lock:
            if key not in self._differences:
                self._differences[key] = etloom.diff(first, second)
            return self._differences[key]

    def answer_once(self, question: str, compute: Callable[[], Answer]) -> Answer:
        """Return the answer to a question about opened runs from the cache, or compute and cache it.

        Cached are the last 1,024 answers, each of bounded length, to questions of at most 2,000 characters.
        """
        with self._lock:
            if question in self._answers:
                self._answers.move_to_end(question)
                return self._answers[question]
        answer = compute()  # without the lock: a long query must not delay other questions
        if len(question) <= _MAX_CACHED_QUESTION:
            with self._lock:
                self._answers[question] = answer
                if len(self._answers) > _MAX_ANSWERS:
                    self._answers.popitem(last=False)
        return answer

    def list_runs(self) -> list[str]:
        """Return the folders and files of the first levels below the roots, as paths that `resolve` accepts."""
        runs: list[str] = []
        for root in self.roots:
            level = [root]
            for _ in range(_LISTED_LEVELS):
                level = [path for folder in level for path in _list_folder(folder)][:_MAX_LISTED]
                runs += [str(path.relative_to(root)) for path in level]
        return runs[:_MAX_LISTED]

    def list_folders(self) -> list[str]:
        """Return the folders of the first level below the first root, as paths that `resolve` accepts."""
        return [path.name for path in _list_folder(self.roots[0])[:_MAX_LISTED] if path.is_dir()]

    def describe_roots(self) -> str:
        """Return the list of root folders as text, for messages."""
        return "roots: " + ", ".join(map(str, self.roots))

    def _join(self, root: Path, run: str) -> Path:
        """Join a root folder and the relative path of a run, which may begin with the name of the root folder."""
        first, *rest = Path(run).parts
        return root.joinpath(*rest) if first == root.name and not (root / run).exists() else root / run

    def _find_path(self, run: str) -> Path | None:
        """Return the resolved path of a run if it exists below the roots, else None."""
        try:
            candidates = (
                [Path(run)] if Path(run).is_absolute() else [self._join(root, run) for root in self.roots]
            )
            paths = [path.resolve() for path in candidates]
            return next((path for path in paths if self._is_inside(path) and path.exists()), None)
        except (OSError, ValueError, RuntimeError):  # null bytes, loops of links, too long names
            return None

    def _find_link_outside(self, folder: Path) -> Path | None:
        """Return a link in a folder, at any depth, that leads outside of the roots or cannot be read; else None."""
        seen: set[Path] = set()
        pending = [folder]
        while pending:
            link = pending.pop()
            try:
                path = link.resolve()
                if not self._is_inside(path):
                    return link
                if path in seen or not path.is_dir():
                    continue
                seen.add(path)
                with os.scandir(path) as entries:
                    pending += [Path(entry) for entry in entries if entry.is_symlink() or entry.is_dir()]
            except (OSError, RuntimeError):
                return link
        return None

    def _is_inside(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self.roots)


def _list_folder(folder: Path) -> list[Path]:
    """Return the visible entries of a folder in order; none for a file, a link or what cannot be read."""
    try:
        return sorted(
            path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_symlink()
        )
    except OSError:
        return []


# Gives agents' questions priority over the computation of likely answers in the background.


class Turns:
    """Makes the background preparation of answers wait while questions are answered."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions = 0
        self._threads = threading.local()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count an agent's question as open while the block runs, unless this thread prepares answers."""
        if self._is_preparing():
            yield
            return
        with self._changed:
            self._questions += 1
        try:
            yield
        finally:
            with self._changed:
                self._questions -= 1
                self._changed.notify_all()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Mark this thread as a background preparer, which waits for agents' questions, while the block runs."""
        self._threads.is_preparing = True
        try:
            yield
        finally:
            self._threads.is_preparing = False

    def give_way(self) -> None:
        """In a background thread, wait until no question is open; the caller must hold no lock that questions need."""
        if self._is_preparing():
            with self._changed:
                self._changed.wait_for(lambda: not self._questions)

    def _is_preparing(self) -> bool:
        return getattr(self._threads, "is_preparing", False)
