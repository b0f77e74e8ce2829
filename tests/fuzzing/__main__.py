"""Fuzz the readers and verbs: ``python -m fuzzing --inputs 20000``.

Cases run in a worker process; one that takes more than 10 s of CPU time, 60 s or 1 GB is ended and reported. The exit status is 1 if any
case had a fault. Each fault is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from support.paths import ROOT

CPU_SECONDS, SECONDS, BYTES = 10.0, 60.0, 1 << 30
"""Limits of a case: CPU time, which other load does not change, elapsed time without waiting for a processor, memory."""
_CASES_PER_WORKER = 400
_TOO_LARGE = f"more than {BYTES >> 20} MiB in memory"


class Worker:
    """A process that runs cases one at a time."""

    def __init__(self, seed: int, seeds: Path, format: str, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "fuzzing.worker", str(seed), str(seeds), format]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
            cwd=seeds.parent,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._forward, daemon=True).start()
        self.cases = 0
        self.peak = 0

    def _forward(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def run(self, number: int) -> list[str] | None:
        """Run a case and return its faults; None if the worker ended."""
        assert self._process.stdin
        self.cases += 1
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        factor = 3 if self.cases == 1 else 1  # the first case also imports everything
        cpu_limit = self._cpu_seconds() + factor * CPU_SECONDS
        deadline = time.monotonic() + factor * SECONDS - self._queued_seconds()
        while True:
            try:
                line = self._lines.get(timeout=0.05)
            except queue.Empty:
                self.peak = max(self.peak, self._resident_bytes())
                if self.peak > BYTES:
                    return [_TOO_LARGE]
                if self._cpu_seconds() > cpu_limit:
                    return [f"more than {CPU_SECONDS:.0f} s of CPU time"]
                if time.monotonic() - self._queued_seconds() > deadline:
                    return [f"more than {SECONDS:.0f} s"]
                continue
            return line.rstrip("\n").split("\t")[1:] if line else None

    def _resident_bytes(self) -> int:
        try:
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
        except (OSError, IndexError):
            return 0

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError):
            return 0.0

    def _queued_seconds(self) -> float:
        """Return how long the process was ready to run while others had the processors."""
        try:
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="number of cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=1, help="other seeds give other cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--format", default="", help="only this format")
    parser.add_argument("--case", type=int, help="run this case here, with tracebacks, and keep its input")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-case"), help="folder for the input of --case")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="etloom-fuzz-") as scratch:
        os.environ["ETLOOM_CACHE"] = f"{scratch}/cache"
        os.environ.setdefault("POLARS_MAX_THREADS", "1")
        os.environ.pop("ETLOOM_DEBUG", None)
        from fuzzing.cases import build_seeds

        seeds = Path(scratch, "seeds")
        build_seeds(seeds)
        return _run_one(args, seeds) if args.case is not None else _run_all(args, seeds)


def _run_one(args: argparse.Namespace, seeds: Path) -> int:
    import warnings

    from fuzzing.worker import run_case

    os.environ["ETLOOM_DEBUG"] = "1"
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=ResourceWarning)
    faults = run_case(args.seed, args.case, seeds, args.keep.resolve(), args.format or None, debug=True)
    print(*faults or ["no fault"], f"the input is in {args.keep}", sep="\n")
    return bool(faults)


def _run_all(args: argparse.Namespace, seeds: Path) -> int:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    started, done, faulty, peak, slowest = time.monotonic(), 0, 0, 0, 0.0
    worker: Worker | None = None
    seen: dict[str, int] = {}
    for number in range(args.first, args.first + args.inputs):
        if time.monotonic() - started > args.seconds:
            break
        worker = worker or Worker(args.seed, seeds, args.format, environment)
        begin = time.monotonic()
        faults = worker.run(number)
        if faults == [_TOO_LARGE] and worker.cases > 1:  # perhaps with what earlier cases left behind
            worker.stop()
            worker = Worker(args.seed, seeds, args.format, environment)
            faults = worker.run(number)
        if worker.cases > 1:
            slowest = max(slowest, time.monotonic() - begin)
        peak = max(peak, worker.peak)
        done += 1
        if done % 500 == 0:
            print(f"{done:,} cases, {faulty} with a fault", file=sys.stderr, flush=True)
        if faults is None:
            faults = ["the process died"]
        if faults:
            faulty += 1
            for fault in faults:
                kind = fault.rpartition(" | ")[2][:100]
                seen[kind] = seen.get(kind, 0) + 1
                if seen[kind] <= 3:
                    repeat = f"python -m fuzzing --seed {args.seed} --case {number}" + (
                        f" --format {args.format}" if args.format else ""
                    )
                    print(f"{fault}\n    repeat: PYTHONPATH=src:tests {repeat}", flush=True)
        if faults or worker.cases >= _CASES_PER_WORKER:
            worker.stop()
            worker = None
    if worker:
        worker.stop()
    for kind, count in sorted(seen.items(), key=lambda item: -item[1]):
        print(f"{count:6} x {kind}")
    took = time.monotonic() - started
    print(
        f"{done:,} inputs, four commands each, in {took:.0f} s; slowest {slowest:.1f} s; peak {peak >> 20} MiB; "
        f"{faulty} with a fault"
    )
    return faulty > 0


if __name__ == "__main__":
    sys.exit(main())
