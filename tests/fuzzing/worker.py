"""Runs cases in this process, one after another; prints the start and the faults of each for the parent."""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from etloom import loading
from etloom.core.errors import EtloomWarning
from etloom.loading import LoadOptions
from fuzzing.access import watch
from fuzzing.cases import build_case


class RunCache:
    """Lets the commands of a case share the runs they read: traces are never changed, and reading costs the most."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[list[tuple[Path, int]], Any]] = {}
        self._load_path = loading.load_path
        loading.load_path = self._load_once  # type: ignore[assignment]

    def clear(self) -> None:
        """Forget the runs: the next case has other files under the same names."""
        self._runs.clear()

    def _load_once(self, path: Path, options: LoadOptions, *arguments: Any) -> Any:
        folder = path if path.is_dir() else path.parent
        stamp = [(file, file.stat().st_mtime_ns) for file in sorted(folder.rglob("*")) if file.is_file()]
        key = f"{path} {replace(options, progress=None)} {arguments}"
        if self._runs.get(key, (None, None))[0] != stamp:
            self._runs[key] = stamp, self._load_path(path, options, *arguments)
        return self._runs[key][1]


def run_case(
    seed: int, number: int, seeds: Path, folder: Path, format: str | None = None, *, debug: bool = False
) -> list[str]:
    """Run the commands of a case and return their faults, each one line (or with the traceback: ``debug``)."""
    case = build_case(seed, number, seeds, folder, format)
    faults = []
    for index, command in enumerate(case.commands):
        out = folder / f"out{index}"
        out.mkdir()
        try:
            with watch(seeds.parent) as accesses:
                fault = command.check(case.folder, case.file, out)
            fault = fault or (f"access outside of the run: {accesses[:3]}" if accesses else None)
        except BaseException as error:  # a panic of polars is not an Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__}: {str(error)[:300]} ({place.filename}:{place.lineno})"
            if debug:
                traceback.print_exc()
        if fault:
            faults.append(f"{case.format} | {' '.join(command.words)} | {' '.join(fault.split())}")
    return faults


def main() -> None:
    """Run the cases whose numbers come on stdin: SEED SEEDS_FOLDER FORMAT as arguments."""
    warnings.simplefilter("error")
    # Libraries that etloom uses, not etloom itself.
    warnings.filterwarnings("default", category=DeprecationWarning, module=r"(?!etloom)")
    warnings.filterwarnings("ignore", category=ResourceWarning)
    warnings.filterwarnings("ignore", category=EtloomWarning)  # a message of ours to the user of the library
    seed, seeds, format = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] or None
    channel = sys.stdout
    runs = RunCache()
    with tempfile.TemporaryDirectory(prefix="etloom-fuzz-", dir=seeds.parent) as folder:
        for line in sys.stdin:
            number = int(line)
            runs.clear()
            faults = run_case(seed, number, seeds, Path(folder, "case"), format)
            print(number, *faults, sep="\t", file=channel, flush=True)


if __name__ == "__main__":
    main()
