"""Count what a reader passes who follows a verb with a debugger: modules, packages and the deepest call stack.

    python benchmarks/trips.py                  # the table, over the two ranks of tests/data/ddp_2
    python benchmarks/trips.py --list open      # every module with its functions, and the deepest stack

Each verb runs in a new process, so that nothing is cached. Threads count too, each with its own stack. A module counts
if one of its functions runs; code that runs only because a module is imported does not. A level is a function of etloom
on the stack; a comprehension, which has no frame since Python 3.12, is not one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import etloom
from etloom.loading import executor

COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
PACKAGE = Path(etloom.__file__).resolve().parent
DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "ddp_2"


def open_run(run: Path) -> None:
    """`etloom.open` without the cache."""
    etloom.open(run, use_cache=False)


def report(run: Path) -> None:
    """`etloom.open` and `etloom.report`."""
    etloom.report(etloom.open(run, use_cache=False), run.with_suffix(".html"))


def replay_comms(run: Path) -> None:
    """`etloom replay comms --dry-run` as on the command line."""
    from etloom import cli

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["replay", "comms", str(run), "--dry-run"])


VERBS: dict[str, Callable[[Path], None]] = {"open": open_run, "report": report, "replay": replay_comms}


@dataclass
class Trip:
    """The modules, packages and depth of calls that one verb needs.

    Attributes:
        functions: module -> names of its functions that ran.
        deepest: the deepest stack, as (module, function) from the outside in.
    """

    functions: dict[str, set[str]] = field(default_factory=dict)
    deepest: list[tuple[str, str]] = field(default_factory=list)

    @property
    def figures(self) -> tuple[int, int, int]:
        """Number of modules, of packages, and levels of the deepest stack."""
        return (
            len(self.functions),
            len({module.split("/")[0] for module in self.functions}),
            len(self.deepest),
        )

    def enter(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Record a call, as a function for `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name in COMPREHENSIONS:
            return
        stack: list[tuple[str, str]] = []
        caller: FrameType | None = frame
        while caller is not None:
            code = caller.f_code
            if code.co_filename.startswith(str(PACKAGE)):
                if code.co_name == "<module>":
                    return  # an import
                if code.co_name not in COMPREHENSIONS:
                    stack.append((Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_name))
            caller = caller.f_back
        module, function = stack[0]
        self.functions.setdefault(module, set()).add(function)
        if len(stack) > len(self.deepest):
            self.deepest = stack[::-1]


def follow(verb: str) -> Trip:
    """Run a verb in this process and return its trip."""
    trip = Trip()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        for file in DATA.glob("*_[01].json.gz"):
            shutil.copy(file, run)
        for name in ("open", "report"):
            getattr(etloom, name)  # the public names load at their first access
        os.environ["ETLOOM_CACHE"] = str(Path(folder, "cache"))
        executor.MIN_SECONDS_TO_CACHE = float("inf")  # a profiled run is slow
        threading.setprofile(trip.enter)
        sys.setprofile(trip.enter)
        try:
            VERBS[verb](run)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return trip


def main() -> None:
    """Print the table, or the trip of one verb."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    arguments.add_argument("--list", choices=VERBS, dest="verb")
    arguments.add_argument("--figures", choices=VERBS, help="the figures of one verb, without a table")
    options = arguments.parse_args()
    if options.figures:
        print(*follow(options.figures).figures)
    elif options.verb:
        trip = follow(options.verb)
        for module, functions in sorted(trip.functions.items()):
            print(f"{module}: {', '.join(sorted(functions))}")
        print("\ndeepest stack")
        for module, function in trip.deepest:
            print(f"  {module}: {function}")
        print(*trip.figures)
    else:
        print("verb      modules  packages  levels")
        for verb in VERBS:
            command = [sys.executable, __file__, "--figures", verb]
            modules, packages, levels = subprocess.run(
                command, capture_output=True, text=True, check=True
            ).stdout.split()
            print(f"{verb:8}  {modules:>7}  {packages:>8}  {levels:>6}")


if __name__ == "__main__":
    main()
